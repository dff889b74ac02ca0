"""The sizes of steps that the engine chooses, and those that options give."""

import pytest

from finwhale.config import EngineConfig
from finwhale.engine.plan.step_sizes import (
    CACHE_FOR_LARGE_STEPS,
    LANE_MIXED_STEP,
    LANE_STEP,
    LARGE_MIXED_STEP,
    LARGE_STEP,
    ROOM_FOR_LARGE_STEPS,
    StepSizes,
    choose_step_sizes,
)
from finwhale.errors import FinwhaleError

ROOMY, TIGHT = ROOM_FOR_LARGE_STEPS, ROOM_FOR_LARGE_STEPS - 1


@pytest.mark.parametrize(
    ("ranks", "room", "wanted"),
    [
        (1, None, StepSizes(64, 2048, 1536)),
        (2, None, StepSizes(64, 2048, 1536)),
        (2, TIGHT, StepSizes(64, 2048, 1536)),
        (1, ROOMY, StepSizes(64, LARGE_STEP, LARGE_MIXED_STEP)),
        (2, ROOMY, StepSizes(128, LARGE_STEP, LARGE_MIXED_STEP)),
        (4, ROOMY, StepSizes(256, LARGE_STEP, LARGE_MIXED_STEP)),
        (8, ROOMY, StepSizes(256, LARGE_STEP, LARGE_MIXED_STEP)),
    ],
)
def test_open_options(ranks: int, room: int | None, wanted: StepSizes) -> None:
    assert choose_step_sizes(EngineConfig(), ranks, room) == wanted


def test_data_parallel_ranks() -> None:
    config = EngineConfig(data_parallel_size=2)
    assert choose_step_sizes(config, 2, ROOMY) == StepSizes(128, LANE_STEP, LANE_MIXED_STEP)
    assert choose_step_sizes(config, 2, None) == StepSizes(64, 2048, 1536)


def test_a_small_cache_has_small_steps() -> None:
    for cache, num_tokens in (CACHE_FOR_LARGE_STEPS - 1, 2048), (CACHE_FOR_LARGE_STEPS, 8192):
        found = choose_step_sizes(EngineConfig(cache_memory_bytes=cache), 2, ROOMY)
        assert found.num_tokens == num_tokens


@pytest.mark.parametrize("room", [None, TIGHT, ROOMY])
def test_given_options_come_first(room: int | None) -> None:
    both = EngineConfig(max_num_seqs=3, max_num_batched_tokens=100)
    assert choose_step_sizes(both, 2, room) == StepSizes(3, 100, 75)
    smallest = EngineConfig(max_num_seqs=1, max_num_batched_tokens=1)
    assert choose_step_sizes(smallest, 2, room) == StepSizes(1, 1, 1)
    tokens = EngineConfig(max_num_batched_tokens=16384)
    assert choose_step_sizes(tokens, 1, room) == StepSizes(64, 16384, 12288)
    seqs = choose_step_sizes(EngineConfig(max_num_seqs=500), 2, room)
    assert seqs.num_seqs == 500 and seqs.num_tokens == (LARGE_STEP if room == ROOMY else 2048)
    graphs = EngineConfig(graph_sizes=(1, 300))
    assert choose_step_sizes(graphs, 1, room).num_seqs == 300


@pytest.mark.parametrize(
    ("graph_sizes", "max_num_seqs", "wanted"),
    [
        ((0,), None, r"graph_sizes must lie in 1\.\.max_num_seqs, got \(0,\)"),
        ((1, 9), 8, r"graph_sizes must lie in 1\.\.max_num_seqs \(8\), got \(1, 9\)"),
    ],
)
def test_graph_sizes_out_of_range(
    graph_sizes: tuple[int, ...], max_num_seqs: int | None, wanted: str
) -> None:
    with pytest.raises(FinwhaleError, match=f"^{wanted}$"):
        EngineConfig(graph_sizes=graph_sizes, max_num_seqs=max_num_seqs)
