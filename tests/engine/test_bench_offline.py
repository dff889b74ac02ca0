"""How `finwhale bench offline` brings its requests to their decodes, with a stub of the model."""

from types import ModuleType

import pytest
from tools.overhead import stub_engine

from finwhale.bench import offline, start, throughput
from finwhale.bench.engine import begin_decodes
from finwhale.bench.floors import DecodeBytes, expected_experts, read_ms
from finwhale.bench.offline import WARM_UP, Bench, Shape, _room
from finwhale.config import EngineConfig
from finwhale.distributed.rank import Rank
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v4.presets import published

STEPS, STEP_TOKENS = 30, 2048


def new_bench(shape: Shape, *, prefix_caching: bool = True) -> Bench:
    config = EngineConfig(
        # The stub has pages for this many sequences, and admission keeps some of them free.
        max_num_seqs=shape.batch + 1,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=_room(shape, STEPS, STEP_TOKENS) + 8,
        enable_prefix_caching=prefix_caching,
    )
    return Bench(stub_engine(config, published("flash")), STEPS)


def begin(bench: Bench, shape: Shape) -> None:
    length = shape.tokens - STEPS // 2
    prompts = [bench.prompt(length) for _ in range(shape.batch)]
    begin_decodes(bench.engine, prompts, _room(shape, STEPS, STEP_TOKENS) - length)


@pytest.mark.parametrize("shape", [Shape(1, 16384), Shape(32, 16384), Shape(128, 1024)], ids=str)
def test_every_request_decodes_during_the_timed_steps(shape: Shape) -> None:
    bench = new_bench(shape)
    begin(bench, shape)
    running = bench.engine.scheduler.running
    # No sequence has generated many tokens while the others were prefilled.
    assert max(len(s.token_ids) for s in running) <= shape.tokens + shape.batch
    for _ in range(STEPS + 2 * WARM_UP):
        bench.engine.step()
    assert len(running) == shape.batch
    assert all(len(s.token_ids) - s.num_computed == 1 for s in running)
    assert bench.engine.scheduler.counts.preemptions == 0


def test_a_batch_of_data_parallel_ranks() -> None:
    """Each rank has its share of the sequences, and reads their rows and all of attention."""
    shape = Shape(8, 1024)
    config = EngineConfig(data_parallel_size=2, max_num_seqs=10, max_model_len=4096)
    bench = Bench(stub_engine(config, published("flash")), STEPS)
    bench.bytes = DecodeBytes(bench.config, Rank(0, 2, data_parallel=True))
    found = bench.decode(shape)
    assert found["graph_ms"] is None and found["experts_hit"] == 44.2  # 256 * (1 - (250 / 256)**8)
    hit = expected_experts(bench.config, 8)
    assert found["floor_ms"] == read_ms(bench.bytes.step(1024, 4, hit))
    divided = DecodeBytes(bench.config, Rank(0, 2))
    assert found["floor_ms"] > read_ms(divided.step(1024, 8, hit))
    assert not bench.engine.has_work


def test_a_request_that_ends_too_early_is_an_error() -> None:
    """Without the prefix cache, the first requests end while the last prompts are prefilled."""
    shape = Shape(32, 16384)
    with pytest.raises(FinwhaleError, match="a request ended before 32 prompts"):
        begin(new_bench(shape, prefix_caching=False), shape)


@pytest.mark.parametrize("benchmark", [offline, start, throughput], ids=lambda one: one.__name__)
def test_an_option_without_effect_is_refused(
    benchmark: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """No benchmark sends tools, so none takes an option for their calls."""
    with pytest.raises(SystemExit):
        benchmark.main(["--dummy", "--tool-grammar", "auto"])
    assert "unrecognized arguments: --tool-grammar" in capsys.readouterr().err
