"""The inputs of captured steps at fixed addresses against those that are built anew, on the CPU."""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.traffic import Traffic

from finwhale.config import EngineConfig
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_plan import PENDING, LargestLane, StepPlan
from finwhale.engine.plan.step_planner import StepPlanner
from finwhale.engine.plan.step_sizes import (
    LANE_MIXED_STEP,
    LANE_STEP,
    LARGE_MIXED_STEP,
    LARGE_STEP,
    StepSizes,
)
from finwhale.engine.steps.graphs import Captured, Graphs
from finwhale.engine.steps.inputs import NO_STEP, StaticInputs, with_bounds
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.engine.steps.step_limits import StepLimits, decode_sizes, prefill_sizes, step_limits
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.step_inputs import StepInputs

SEEDS, NUM_SEQS = st.integers(0, 40), st.integers(1, 5)
DRAWS = st.integers(0, 2**32).map(random.Random)
MAX_LEN = 1024
CPU = torch.device("cpu")


def assert_same(found: StepInputs, traffic: Traffic, chunks: list[Chunk], size: int) -> None:
    """The chunks' tokens and pages, then padding."""
    traffic.chunks = chunks
    wanted = traffic.build().inputs
    count = len(wanted.token_ids)
    assert torch.equal(found.token_ids[:count], wanted.token_ids)
    assert torch.equal(found.tokens.positions[:count], wanted.tokens.positions)
    assert found.tokens.positions[count:].tolist() == [-1] * (size - count)
    assert torch.equal(found.tokens.sequence[:count], wanted.tokens.sequence)
    starts = wanted.tokens.query_start
    assert torch.equal(found.tokens.query_start[: len(starts)], starts)
    assert set(found.tokens.query_start[len(starts) :].tolist()) <= {count}
    for name, table in wanted.tables.items():
        rows, width = table.pages.shape
        static = found.tables[name]
        assert static.rows_per_page == table.rows_per_page
        assert torch.equal(static.first[:rows], table.first)
        for row in range(rows):
            held = len(chunks[row].sequence.tables[name].pages)
            assert held <= width
            assert torch.equal(static.pages[row, :held], table.pages[row, :held])


class Filled:
    """Buffers, and what a rank knows of the steps in them."""

    def __init__(self, traffic: Traffic, num_tokens: int, num_seqs: int) -> None:
        self.planner = StepPlanner(vocab_size=0)
        self.tables = SlotTables([group.name for group in traffic.groups])
        self.static = StaticInputs(num_tokens, num_seqs, traffic.groups, self.tables, MAX_LEN, CPU)

    def plan(self, chunks: list[Chunk]) -> StepPlan:
        plan = self.planner.plan(chunks)
        self.tables.apply(plan)
        return plan


def filled(buffers: Filled, chunks: list[Chunk], size: int, decode: bool) -> StepInputs:
    """What a graph of `size` tokens reads once it has put the ids in their place."""
    static, plan = buffers.static, buffers.plan(chunks)
    static.fill(plan, decode=decode)
    static.gather_ids(size)
    inputs = static.inputs(size, size, 1) if decode else static.inputs(size, static.num_seqs, size)
    assert (inputs.token_ids >= 0).all()  # padding, too, is looked up in the embedding
    return inputs if decode else with_bounds(inputs, plan)


@settings(max_examples=150, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS)
def test_decodes(seed: int, draw: random.Random, num_seqs: int) -> None:
    """Many steps in the same buffers: tokens go on, sequences come, go and change places.

    Some of the tokens are pending: their ids stand among those sampled last, anywhere.
    """
    traffic = Traffic(seed, draw, num_seqs, decode=True)
    buffers = Filled(traffic, 9, 6)
    static = buffers.static
    chunks = everyone = traffic.chunks
    for _ in range(16):
        rows = draw.sample(range(6), len(chunks))
        hidden = [draw.random() < 0.5 for _ in chunks]
        known = [chunk.sequence.token_ids[chunk.start] for chunk in chunks]
        static.sampled.fill_(399)
        for chunk, row, hide, token in zip(chunks, rows, hidden, known, strict=True):
            if hide:
                chunk.sequence.token_ids[chunk.start] = PENDING
                chunk.sequence.sampled_row = row
                static.sampled[row] = token
        size = draw.randint(len(chunks), 6)
        found = filled(buffers, chunks, size, decode=True)
        for chunk, token in zip(chunks, known, strict=True):
            chunk.sequence.token_ids[chunk.start] = token
        assert_same(found, traffic, chunks, size)
        assert found.tokens.max_query == 1 and found.tokens.max_len == MAX_LEN
        chunks = draw.sample(everyone, draw.randint(1, len(everyone)))
        for index, chunk in enumerate(chunks):
            sequence = chunk.sequence
            end = sequence.num_computed = max(sequence.num_computed, chunk.end)
            while len(sequence.token_ids) <= end:
                sequence.token_ids.append(draw.randrange(100))
            traffic.pages.trim(sequence.tables, end)
            traffic.pages.grow(sequence.tables, end, end + 1)
            sequence.num_computed += 1
            chunks[index] = Chunk(sequence, end, end + 1)


@settings(max_examples=60, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS)
def test_prefills(seed: int, draw: random.Random, num_seqs: int) -> None:
    traffic = Traffic(seed, draw, num_seqs)
    chunks = traffic.chunks
    count = sum(c.end - c.start for c in chunks)
    buffers = Filled(traffic, count + 3, 5)
    for some in (chunks, chunks[:1], chunks):
        inputs = filled(buffers, some, count + 3, decode=False)
        assert_same(inputs, traffic, some, count + 3)
        assert inputs.tokens.max_len == max(c.end for c in some)
        assert inputs.tokens.max_query == max(c.end - c.start for c in some)


def test_sizes() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(5) == [1, 2, 4, 5]
    sizes = decode_sizes(300)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 300
    for batch in range(1, 301):
        size = next(s for s in sizes if s >= batch)
        assert size - batch < max(8, batch // 2)


def test_sizes_of_prefills_reach_the_largest_step_unless_it_is_large() -> None:
    assert prefill_sizes(1) == prefill_sizes(15) == []
    assert prefill_sizes(16) == [16]
    assert prefill_sizes(60) == [16, 32, 60]
    assert prefill_sizes(1500)[-2:] == [1280, 1500]
    assert prefill_sizes(2048)[-1] == prefill_sizes(8192)[-1] == 2048
    assert prefill_sizes(2048, 4) == prefill_sizes(2048)
    assert prefill_sizes(16384, 2)[-1] == 8192
    assert prefill_sizes(8192, lanes=True)[-1] == 4096
    assert prefill_sizes(5000, 4)[-2:] == [4096, 5000]
    assert prefill_sizes(8192, 4)[-2:] == [7168, 8192]
    # A full step beside decodes is captured wherever the engine chooses the sizes.
    assert LARGE_MIXED_STEP in prefill_sizes(LARGE_STEP, 2)
    for most, ranks in (2048, 1), (8192, 2), (8192, 8), (16384, 8):
        sizes = [0, *prefill_sizes(most, ranks)]
        for smaller, size in pairwise(sizes):
            assert size - smaller <= max(16, 0.5 * size if size <= 512 else 0.21 * size)


def test_a_full_step_beside_decodes_of_a_data_parallel_rank_is_captured() -> None:
    config, sizes = EngineConfig(data_parallel_size=2), StepSizes(64, LANE_STEP, LANE_MIXED_STEP)
    limits = step_limits(config, sizes, published("flash"), True, 4096)
    assert LANE_MIXED_STEP in limits.prefill_graphs and limits.prefill_graphs[-1] == 4096


def test_a_rank_without_tokens_replays_the_step_of_the_largest_rank() -> None:
    ran: list[object] = []
    graphs = object.__new__(Graphs)
    graphs.sizes, graphs.decode = [4, 8], True
    graphs.static = cast(Any, SimpleNamespace(fill=lambda plan, decode: ran.append(plan)))
    inputs = cast(Any, SimpleNamespace(bounded=lambda *bounds: bounds))
    graphs._captured = {
        size: cast(
            Any,
            SimpleNamespace(replay=lambda change, size=size: ran.extend((size, change(inputs)))),
        )
        for size in graphs.sizes
    }
    assert graphs.run_padding(LargestLane(3, 3, True)) and ran == [NO_STEP, 4, (1, 1)]
    ran.clear()
    for largest in LargestLane(9, 9, True), LargestLane(3, 3, False):
        assert not graphs.run_padding(largest) and not ran
    graphs.hold_memory(300)
    assert ran == [NO_STEP, 8, (300, 1), NO_STEP, 8, (300, 8)]
    graphs.hold_memory(6)
    assert ran[-1] == (6, 6)


def test_which_steps_have_a_graph() -> None:
    sizes = prefill_sizes(16384, 2)
    graphs = object.__new__(Graphs)
    graphs.sizes, graphs.decode = sizes, False
    graphs.static = cast("Any", SimpleNamespace(num_seqs=8))

    def size(num_tokens: int, num_seqs: int = 1, *, decodes: bool = False) -> int | None:
        return graphs.size(LargestLane(num_tokens, num_seqs, decodes))

    for found, most in (sizes, 8192), ([], 0):
        limits = StepLimits(num_tokens=9, num_seqs=1, max_len=9, prefill_graphs=tuple(found))
        assert limits.always_captured == most
    assert [size(n) for n in (3, 1281, 2049, 8192)] == [16, 1536, 2304, 8192]
    assert size(8193) is size(16384) is size(2048, 9) is None
    graphs.sizes, graphs.decode = [1, 4, 8], True
    assert size(3, 3) is size(9, 9, decodes=True) is None and size(5, 5, decodes=True) == 8
    # A data-parallel rank takes the size of the largest.
    plan = StepPlan((0,), (5,), (1,), (7,), (1,), decodes=True)
    assert graphs.size(plan) == 1
    assert graphs.size(plan._replace(largest=LargestLane(3, 3, True))) == 4
    assert graphs.size(plan._replace(largest=LargestLane(3, 3, False))) is None


def test_a_replay_bounds_every_input_that_was_recorded() -> None:
    """A model whose ranks divide the tokens records inputs of its own, for all its layers."""
    traffic = Traffic(0, random.Random(0), 2)
    inputs = traffic.build().inputs
    divided = replace(inputs, local_tokens=inputs.tokens.part(slice(0, 1)))
    seen: list[Any] = []
    recorded = (divided, divided, inputs)
    parts: list[Any] = [(lambda *args: seen.append(args), (arg, 3), {}) for arg in recorded]
    Captured(inputs, torch.empty(0), parts).replay(lambda inputs: inputs.bounded(70, 5))
    assert seen[0][0] is seen[1][0]  # layers share the results of a step
    for (found, other), own in zip(seen, recorded, strict=True):
        assert other == 3 and found.token_ids is own.token_ids and found.tables is own.tables
        assert (found.tokens.max_len, found.tokens.max_query) == (70, 5)
        assert found.tokens.positions is own.tokens.positions
    local_tokens = seen[0][0].local_tokens
    assert local_tokens is not None and divided.local_tokens is not None
    assert (local_tokens.max_len, local_tokens.max_query) == (70, 5)
    assert local_tokens.positions is divided.local_tokens.positions
    assert seen[2][0].local_tokens is None
