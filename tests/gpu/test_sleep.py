"""Sleep and new weights on a GPU: addresses stay, so captured graphs remain valid."""

import gc
from collections.abc import Iterator

import pytest
import torch
from tests.support.tensors import read_tensor
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.checkpoint.reader import Checkpoint
from finwhale.config import EngineConfig
from finwhale.demo import DEMO_PATH
from finwhale.engine.loop import control
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.loop.weight_updates import WeightUpdates
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.registry import architecture_of
from finwhale.models.weight_sources import Weights
from finwhale.weights.dummy import DummySource
from finwhale.weights.tree import tensors_of

pytestmark = pytest.mark.alone
CACHE_BYTES = 2**30
PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=3)
PROMPTS = [[0, *range(20, 320)], [0, 21, 22]]


@pytest.fixture(scope="module", params=["demo", "flash"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The embedded model, and four layers of Flash with random weights."""
    options = {
        "max_num_seqs": 4,
        "max_model_len": 2048,
        "batch_invariant": True,
        "cache_memory_bytes": CACHE_BYTES,
        "enable_sleep_mode": True,
    }
    if request.param == "demo":
        yield LLM(device="cuda", **options)._engine
        return
    model = published("flash").without_draft_head().with_layers(4)
    yield start_engine(EngineConfig(device="cuda", **options), model, Weights(model), None)


def outputs(engine: Engine) -> list[object]:
    results = [engine.add_request(str(i), ids, PARAMS) for i, ids in enumerate(PROMPTS)]
    while not all(result.finished for result in results):
        engine.step()
    return [
        (o.token_ids, [{i: p.logprob for i, p in table.items()} for table in o.logprobs or []])
        for result in results
        for o in result.outputs
    ]


def weights_of(engine: Engine) -> list[Tensor]:
    return tensors_of(first_rank(engine.executor).runner.model.weights)


def random_tensors(engine: Engine, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights as the engine makes them; with seed 0 the same."""
    specs = architecture_of(engine.model_config).weight_specs(engine.model_config)
    for spec, stored in DummySource(specs, "cuda", seed=seed):
        yield spec.name, stored.data
        if stored.scale is not None:
            yield spec.scale_name, stored.scale


def first_tensors(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """The weights that the engine has loaded."""
    if engine.model_config.vocab_size == 129280:
        yield from random_tensors(engine, 0)
        return
    checkpoint = Checkpoint.open(DEMO_PATH)
    ignored = tuple(architecture_of(engine.model_config).ignored_prefixes(engine.model_config))
    for name in checkpoint.tensors:
        if not name.startswith(ignored):
            yield name, read_tensor(checkpoint, name)


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_sleep_changes_nothing(engine: Engine) -> None:
    before, addresses = outputs(engine), [tensor.data_ptr() for tensor in weights_of(engine)]
    size = engine.memory.weights + engine.memory.cache
    awake = free_bytes()
    control.sleep(engine)
    assert free_bytes() - awake > 0.9 * size
    control.wake(engine)
    assert awake - free_bytes() < 2**26
    assert [tensor.data_ptr() for tensor in weights_of(engine)] == addresses
    assert outputs(engine) == before
    assert not sum(engine.metrics().late_compilations.values())


def test_updates_write_in_place(engine: Engine) -> None:
    before, addresses = outputs(engine), [tensor.data_ptr() for tensor in weights_of(engine)]
    if engine.model_config.vocab_size == 129280:
        # Without experts, which the operators have converted.
        others = ((n, t) for n, t in random_tensors(engine, 1) if ".experts." not in n)
        WeightUpdates(engine).update(others, partial=True)
        partly = outputs(engine)
        WeightUpdates(engine).update(random_tensors(engine, 1))
        assert before != partly != outputs(engine)
    control.sleep(engine, drop_weights=True)
    control.wake(engine)
    WeightUpdates(engine).update(first_tensors(engine))
    assert [tensor.data_ptr() for tensor in weights_of(engine)] == addresses
    assert outputs(engine) == before
    assert not sum(engine.metrics().late_compilations.values())
