"""The tensors of a step against loops over its tokens that follow the formulas one by one."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from finwhale.engine.batch import Batch, BatchBuilder
from finwhale.engine.pages import PageManager
from finwhale.engine.scheduler import Chunk, Sequence
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.ops.compressor import CompressStep
from finwhale.request import SamplingParams
from finwhale.testing.tiny import tiny_config

PARAMS = SamplingParams()


class Traffic:
    """Sequences at random places, and the chunks of one step over them."""

    def __init__(self, seed: int, draw: random.Random, num_seqs: int) -> None:
        self.config = ModelConfig.from_dict(tiny_config(seed))
        groups = cache_spec(self.config)
        self.pages = PageManager(groups, {g.name: 2000 for g in groups})
        self.rows_per_page = {g.name: g.rows_per_page for g in groups}
        self.builder = BatchBuilder(groups, self.config.sliding_window, torch.device("cpu"))
        for pool in self.pages.pools.values():
            draw.shuffle(pool._free)
        self.chunks: list[Chunk] = []
        for i in range(num_seqs):
            start = draw.choice((0, 1, 3, 4, 5, 127, 128, 129, 255, 256, draw.randint(0, 600)))
            count = draw.choice((1, 1, 2, 3, 4, 5, 8, 127, 128, 130, draw.randint(1, 300)))
            known = start + count + draw.choice((0, 0, 1, 7))
            token_ids = [draw.randrange(self.config.vocab_size) for _ in range(known)]
            sequence = Sequence(str(i), str(i), i, token_ids, known, known + 5, PARAMS)
            sequence.tables = self.pages.new_tables()
            at = 0
            while at < start:
                end = min(start, at + draw.choice((1, 50, 200)))
                self.pages.grow(sequence.tables, at, end)
                self.pages.trim(sequence.tables, end)
                at = end
            self.pages.grow(sequence.tables, start, start + count)
            self.chunks.append(Chunk(sequence, start, start + count))

    def slot(self, sequence: Sequence, group: str, row: int) -> int:
        table, per_page = sequence.tables[group], self.rows_per_page[group]
        number = row // per_page - table.first
        assert number >= 0
        page = table.pages[number]
        assert page
        return page * per_page + row % per_page

    def tokens(self) -> list[tuple[Chunk, int]]:
        return [(chunk, t) for chunk in self.chunks for t in range(chunk.start, chunk.end)]


def build(traffic: Traffic) -> Batch:
    return traffic.builder.build(traffic.chunks)


SEEDS, NUM_SEQS = st.integers(0, 40), st.integers(1, 5)
DRAWS = st.integers(0, 2**32).map(random.Random)


@settings(max_examples=60, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS)
def test_tokens_window_and_logits_rows(seed: int, draw: random.Random, num_seqs: int) -> None:
    traffic = Traffic(seed, draw, num_seqs)
    batch, tokens = build(traffic), traffic.tokens()
    inputs, window = batch.inputs, traffic.config.sliding_window
    assert inputs.token_ids.tolist() == [c.sequence.token_ids[t] for c, t in tokens]
    assert inputs.positions.tolist() == [t for _, t in tokens]
    assert inputs.window_write_slots.tolist() == [
        traffic.slot(c.sequence, "window", t) for c, t in tokens
    ]
    wanted = [
        [
            traffic.slot(c.sequence, "window", p) if p >= 0 else -1
            for p in range(t - window + 1, t + 1)
        ]
        for c, t in tokens
    ]
    assert inputs.window_slots.tolist() == wanted
    # The last token of each chunk that reads all that is known.
    assert batch.logits_rows.tolist() == [
        i for i, (c, t) in enumerate(tokens) if t + 1 == len(c.sequence.token_ids)
    ]
    for tensor in (inputs.token_ids, inputs.positions, inputs.window_slots, batch.logits_rows):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()


@settings(max_examples=60, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS)
def test_what_compressors_read_and_write(seed: int, draw: random.Random, num_seqs: int) -> None:
    traffic = Traffic(seed, draw, num_seqs)
    inputs = build(traffic).inputs
    assert inputs.c4 is not None and inputs.c128 is not None
    check_compress(traffic, inputs.c4, "c4", 4, 8)
    check_compress(traffic, inputs.c128, "c128", 128, 128)


def check_compress(
    traffic: Traffic, step: CompressStep, group: str, ratio: int, mixed: int
) -> None:
    tokens = traffic.tokens()
    state = f"{group}_state"
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
    # Every new row that an entry after this step mixes is kept, and no other.
    left = [
        (c, t)
        for c, t in tokens
        if t >= (c.end // ratio + 1) * ratio - mixed  # the first entry still to complete
    ]
    assert step.state_sources.tolist() == [row_of[c.sequence.key, t] for c, t in left]
    assert step.state_slots.tolist() == [traffic.slot(c.sequence, state, t) for c, t in left]


@settings(max_examples=60, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS)
def test_visible_entries(seed: int, draw: random.Random, num_seqs: int) -> None:
    traffic = Traffic(seed, draw, num_seqs)
    inputs, tokens = build(traffic).inputs, traffic.tokens()
    index, c128_slots = inputs.index, inputs.c128_slots
    assert index is not None and c128_slots is not None
    starts = [0]
    for chunk in traffic.chunks:
        starts.append(starts[-1] + chunk.end - chunk.start)
    assert list(index.query_start) == starts
    assert list(index.max_entries) == [c.end // 4 for c in traffic.chunks]
    assert index.num_entries.tolist() == [(t + 1) // 4 for _, t in tokens]
    assert index.sequence.tolist() == [traffic.chunks.index(c) for c, _ in tokens]
    check_rows(
        index.entry_slots,
        [[traffic.slot(c.sequence, "c4", w) for w in range(c.end // 4)] for c in traffic.chunks],
    )
    check_rows(
        c128_slots,
        [[traffic.slot(c.sequence, "c128", w) for w in range((t + 1) // 128)] for c, t in tokens],
    )


def check_rows(found: Tensor, wanted: list[list[int]]) -> None:
    """Each row begins as wanted and goes on with -1."""
    width = found.shape[1]
    assert width % 128 == 0 and width >= max(map(len, wanted))
    assert found.tolist() == [row + [-1] * (width - len(row)) for row in wanted]


def test_a_model_of_window_layers_has_no_other_steps() -> None:
    raw = tiny_config(0)
    config = ModelConfig.from_dict(raw | {"compress_ratios": [0] * (raw["num_hidden_layers"] + 1)})
    groups = cache_spec(config)
    pages = PageManager(groups, {g.name: 9 for g in groups})
    sequence = Sequence("a", "a", 0, [1, 2, 3], 3, 9, PARAMS, tables=pages.new_tables())
    pages.grow(sequence.tables, 0, 3)
    builder = BatchBuilder(groups, config.sliding_window, torch.device("cpu"))
    inputs = builder.build([Chunk(sequence, 0, 3)]).inputs
    assert (inputs.c4, inputs.index, inputs.c128, inputs.c128_slots) == (None,) * 4


@pytest.mark.parametrize("count", [1, 3])
def test_before_the_first_entry_there_is_none(count: int) -> None:
    """Widths are 0: no attention over nothing, whatever the batch."""
    config = ModelConfig.from_dict(tiny_config(0))
    groups = cache_spec(config)
    pages = PageManager(groups, {g.name: 9 for g in groups})
    sequence = Sequence("a", "a", 0, [1, 2, 3], 3, 9, PARAMS, tables=pages.new_tables())
    pages.grow(sequence.tables, 0, count)
    builder = BatchBuilder(groups, config.sliding_window, torch.device("cpu"))
    inputs = builder.build([Chunk(sequence, 0, count)]).inputs
    assert inputs.c4 is not None and inputs.index is not None and inputs.c128_slots is not None
    assert inputs.index.entry_slots.shape == (1, 0)
    assert inputs.c128_slots.shape == (count, 0)
    assert inputs.c4.entry_sources.shape == (0, 8)
    assert inputs.c4.state_sources.tolist() == list(range(count))
