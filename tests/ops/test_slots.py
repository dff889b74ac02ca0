"""Slot tables of a step against loops over its tokens that follow the formulas one by one."""

import random
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.op_case import step_tokens
from tests.support.traffic import Traffic
from torch import Tensor

from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.slots import (
    complete_slots,
    compress_step,
    index_step,
    token_groups,
    window_slots,
    write_slots,
)

SEEDS, NUM_SEQS, DECODE = st.integers(0, 40), st.integers(1, 5), st.booleans()
DRAWS = st.integers(0, 2**32).map(random.Random)


@settings(max_examples=60, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS, DECODE)
def test_window(seed: int, draw: random.Random, num_seqs: int, decode: bool) -> None:
    traffic = Traffic(seed, draw, num_seqs, decode=decode)
    tokens, size = traffic.tokens(), traffic.config.sliding_window
    inputs = traffic.build().inputs
    table = inputs.tables["window"]
    written = write_slots(inputs.tokens, table)
    assert written.tolist() == [traffic.slot(c.sequence, "window", t) for c, t in tokens]
    seen = window_slots(inputs.tokens, table, size)
    assert seen.tolist() == [
        [
            traffic.slot(c.sequence, "window", p) if p >= 0 else -1
            for p in range(t - size + 1, t + 1)
        ]
        for c, t in tokens
    ]
    for slots in (written, seen):
        assert slots.dtype == torch.int64 and slots.is_contiguous()
    # Derived once a step.
    assert write_slots(inputs.tokens, table) is written
    assert window_slots(inputs.tokens, table, size) is seen


@settings(max_examples=60, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS, DECODE)
def test_what_compressors_read_and_write(
    seed: int, draw: random.Random, num_seqs: int, decode: bool
) -> None:
    traffic = Traffic(seed, draw, num_seqs, decode=decode, prefix_caching=draw.random() < 0.5)
    check_compress(traffic, "c4", 4, 8)
    check_compress(traffic, "c128", 128, 128)


def check_compress(traffic: Traffic, group: Literal["c4", "c128"], ratio: int, mixed: int) -> None:
    tokens, inputs = traffic.tokens(), traffic.build().inputs
    state: Literal["c4_state", "c128_state"] = "c4_state" if group == "c4" else "c128_state"
    step = compress_step(inputs.tokens, inputs.tables[state], inputs.tables[group], ratio, 4)
    num_history = len(step.history_slots)
    entries = [(c, t // ratio) for c, t in tokens if (t + 1) % ratio == 0]
    assert step.entry_slots.tolist() == [traffic.slot(c.sequence, group, w) for c, w in entries]
    assert step.entry_positions.tolist() == [w * ratio for _, w in entries]
    assert step.entry_sources.shape == (len(entries), mixed)
    # By what each source stands for: a new token of the step, or a kept row of the state.
    row_of = {(c.sequence.key, t): i for i, (c, t) in enumerate(tokens)}
    for (chunk, w), sources in zip(entries, step.entry_sources.tolist(), strict=True):
        for j, source in enumerate(sources):
            token = (w + 1) * ratio - mixed + j
            if token < 0:
                assert source == -1
            elif token >= chunk.start:
                assert source == num_history + row_of[chunk.sequence.key, token]
            else:
                assert 0 <= source < num_history
                kept = step.history_slots[source].item()
                assert kept == traffic.slot(chunk.sequence, state, token)

    # Every new row that an entry after this step mixes is kept, and no other. A step of at most
    # four tokens may be undone but for its first.
    def settled(c: Any) -> int:
        return c.end if c.end - c.start > 4 else c.start + 1

    left = [
        (c, t)
        for c, t in tokens
        if t >= (settled(c) // ratio + 1) * ratio - mixed  # the first entry still to complete
    ]
    if ratio == 4:  # and at the ends of blocks, where another sequence may go on
        left += [
            (c, t)
            for c, t in tokens
            if t % 256 >= 252
            and t < settled(c) // 4 * 4 - 4
            and traffic.has_page(c.sequence, state, t)
        ]
        if traffic.prefix_caching:
            ends = [(c, t) for c, t in tokens if t % 256 >= 252]
            assert all(
                traffic.has_page(c.sequence, state, t) for c, t in ends if t // 256 < c.end // 256
            )
    stored = zip(step.state_sources.tolist(), step.state_slots.tolist(), strict=True)
    assert sorted(stored) == sorted(
        (row_of[c.sequence.key, t], traffic.slot(c.sequence, state, t)) for c, t in left
    )


@settings(max_examples=60, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS, DECODE)
def test_visible_entries(seed: int, draw: random.Random, num_seqs: int, decode: bool) -> None:
    traffic = Traffic(seed, draw, num_seqs, decode=decode)
    tokens, inputs = traffic.tokens(), traffic.build().inputs
    index = index_step(inputs.tokens, inputs.tables["c4"])
    starts = [0]
    for chunk in traffic.chunks:
        starts.append(starts[-1] + chunk.end - chunk.start)
    assert list(index.query_start) == starts
    assert list(index.max_entries) == [c.end // 4 for c in traffic.chunks]
    assert index.num_entries.tolist() == [(t + 1) // 4 for _, t in tokens]
    check_rows(
        index.entry_slots,
        [[traffic.slot(c.sequence, "c4", w) for w in range(c.end // 4)] for c in traffic.chunks],
    )
    check_rows(
        complete_slots(inputs.tokens, inputs.tables["c128"], 128),
        [[traffic.slot(c.sequence, "c128", w) for w in range((t + 1) // 128)] for c, t in tokens],
    )


def check_rows(found: Tensor, wanted: list[list[int]]) -> None:
    """Each row begins as wanted and goes on with -1."""
    width = found.shape[1]
    assert width % 128 == 0 and width >= max(map(len, wanted))
    assert found.tolist() == [row + [-1] * (width - len(row)) for row in wanted]


@pytest.mark.parametrize("count", [1, 3])
def test_before_the_first_entry_no_slot_is_listed(count: int) -> None:
    """Widths are 0: no attention over nothing, whatever the batch."""
    tokens = step_tokens(((0, count),))
    entries, states = (
        PageTable(torch.tensor([[page]]).int(), torch.zeros(1).int(), 8) for page in (0, 1)
    )
    step = compress_step(tokens, states, entries, 4, 4)
    assert index_step(tokens, entries).entry_slots.shape == (1, 0)
    assert complete_slots(tokens, entries, 128).shape == (count, 0)
    assert step.entry_sources.shape == (0, 8)
    assert step.state_sources.tolist() == list(range(count))
    assert step.state_slots.tolist() == list(range(8, 8 + count))


def test_a_step_of_no_token() -> None:
    tokens: Tokens = step_tokens(())
    table = PageTable(torch.zeros(0, 1).int(), torch.zeros(0).int(), 64)
    assert write_slots(tokens, table).shape == (0,)
    assert window_slots(tokens, table, 13).shape == (0, 13)
    assert complete_slots(tokens, table, 128).shape == (0, 0)
    assert index_step(tokens, table).entry_slots.shape == (0, 0)
    assert compress_step(tokens, table, table, 4, 4).entry_sources.shape == (0, 8)


@given(st.lists(st.integers(0, 5), max_size=12))
def test_token_groups(lengths: list[int]) -> None:
    """Every token once, in order, with its sequence: decodes together, every chunk alone."""
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    covered: list[tuple[int, int]] = []
    for tokens, sequences in token_groups(tuple(starts)):
        count = tokens.stop - tokens.start
        owners = list(range(sequences.start, sequences.stop))
        assert count and len(owners) in (1, count)
        own = owners if len(owners) == count else owners * count
        covered += zip(range(tokens.start, tokens.stop), own, strict=True)
    wanted = [b for b, length in enumerate(lengths) for _ in range(length)]
    assert covered == list(enumerate(wanted))
