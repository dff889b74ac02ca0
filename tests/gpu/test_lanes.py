"""Two data-parallel ranks: four layers of Flash with random weights, beside one rank.

If there is one GPU, the ranks share it and take turns, so a step takes as long as some dozens of
turns.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.integrity import check_engine

from finwhale import RequestOutput, SamplingParams
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.ranks.ranks import Ranks
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.weight_sources import Weights

from .test_several_gpus import CLOSE, PARAMS, serve_random, text

pytestmark = pytest.mark.alone
SCORES = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
LENGTHS = (3, 700, 129, 1, 1300, 260)


def new_engine(size: int, **options: Any) -> Engine:
    model = published("flash").with_layers(4)
    shared = "cuda:0,0" if size > torch.cuda.device_count() else None
    config = EngineConfig(
        device=shared,
        data_parallel_size=size,
        max_num_seqs=8,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        cache_memory_bytes=2**31,
        **options,
    )
    return start_engine(config, model, Weights(model), None)


def close(engine: Engine) -> None:
    assert isinstance(engine.executor, Ranks)
    engine.executor.close()


def serve(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> list[RequestOutput]:
    engine.reset_prefix_cache()
    results = [
        engine.add_request(f"{i}", prompt, params[i % len(params)])
        for i, prompt in enumerate(prompts)
    ]
    while engine.has_work:
        engine.step()
    check_engine(engine)
    return results


def told(results: list[RequestOutput]) -> list[Any]:
    return [[(each.token_ids, each.logprobs) for each in one.outputs] for one in results]


PROMPTS = [text(i, length) for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def two() -> Iterator[Engine]:
    engine = new_engine(2, batch_invariant=True)
    yield engine
    close(engine)


def test_nothing_is_compiled_late(two: Engine) -> None:
    serve_random(two, 40)
    assert not any(two.metrics().late_compilations.values())
    assert all(lane.scheduler.counts.prompt_tokens for lane in two.lanes)


def test_lanes_and_batches_change_no_bit(two: Engine) -> None:
    """Each request alone, while the other rank has no tokens, and all together."""
    together = told(serve(two, PROMPTS, PARAMS))
    for i, prompt in enumerate(PROMPTS):
        assert told(serve(two, [prompt], [PARAMS[i % len(PARAMS)]])) == together[i : i + 1], i


def test_lanes_are_close_to_one_rank(two: Engine) -> None:
    one = new_engine(1, batch_invariant=True)
    prompts = PROMPTS[1:3] + PROMPTS[4:]
    both = zip(serve(two, prompts, [SCORES]), serve(one, prompts, [SCORES]), strict=True)
    for found, wanted in both:
        mine, other = scores(found), scores(wanted)
        assert (mine - other).abs().mean() < CLOSE * other.std()


def scores(result: RequestOutput) -> torch.Tensor:
    """The log-probabilities of a prompt's tokens."""
    assert result.prompt_logprobs is not None
    each = [one for one in result.prompt_logprobs if one is not None]
    return torch.tensor([next(iter(one.values())).logprob for one in each])


def test_captured_and_launched_steps(two: Engine) -> None:
    """An engine that captures no steps gives the same bits."""
    wanted = told(serve(two, PROMPTS, PARAMS))
    eager = new_engine(2, batch_invariant=True, enforce_eager=True)
    found = told(serve(eager, PROMPTS, PARAMS))
    close(eager)
    assert found == wanted


def test_drafting_changes_no_token(two: Engine) -> None:
    """The device continues with the drafts of both ranks; a request alone leaves one rank idle."""

    def token_ids(engine: Engine, prompts: list[list[int]]) -> list[list[list[int]]]:
        results = serve(engine, prompts, PARAMS)
        return [[each.token_ids for each in one.outputs] for one in results]

    wanted = [token_ids(two, prompts) for prompts in (PROMPTS, PROMPTS[:1])]
    engine = new_engine(2, batch_invariant=True, draft_tokens=2)
    found = [token_ids(engine, prompts) for prompts in (PROMPTS, PROMPTS[:1])]
    metrics = engine.metrics()
    close(engine)
    assert found == wanted
    assert sum(metrics.drafts_proposed) > 0
    assert not any(metrics.late_compilations.values())


def test_default_kernels() -> None:
    """A second run gives the same tokens, and nothing is compiled late."""
    engine = new_engine(2)
    found = [told(serve(engine, PROMPTS, PARAMS)) for _ in range(2)]
    late = engine.metrics().late_compilations
    close(engine)
    assert found[0] == found[1]
    assert not any(late.values())
