"""batch_invariant: a token's bits whatever the batch, the chunking and the graph."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support.stepping import Stepper

from finwhale import LLM
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.opening import start_engine
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.ranks.ranks import first_rank
from finwhale.models.deepseek_v4.presets import published
from finwhale.models.weight_sources import Weights

LENGTHS = [700, 3, 129, 1, 1300, 260, 64, 1021]


@pytest.fixture(scope="module", params=["demo", "flash"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The embedded model; four layers of Flash with random weights: window, window, C4, C128."""
    options: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 4096, "batch_invariant": True}
    options |= {"device": "cuda", "cache_memory_bytes": 2**31}
    if request.param == "demo":
        yield LLM(**options)._engine
        return
    model = published("flash").without_draft_head().with_layers(4)
    config = EngineConfig(max_num_batched_tokens=4096, **options)
    yield start_engine(config, model, Weights(model), None)


def text(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(4000) for _ in range(length)]


@pytest.mark.parametrize("cuts", [[1], [2, 3, 130], [128, 256, 600], [511, 1499]], ids=str)
def test_chunks(engine: Engine, cuts: list[int]) -> None:
    stepper = Stepper(engine)
    ids = text(0, 1500)
    assert torch.equal(stepper.read(ids, cuts), stepper.read(ids))


@pytest.mark.parametrize("cut", [130, 1025])
def test_pages_moved_as_bytes(engine: Engine, cut: int) -> None:
    """The bytes of a sequence's pages, copied to other pages, are all of its state."""
    stepper, ids = Stepper(engine), text(0, 1500)
    sequence = stepper.sequence(ids)
    stepper.step([(sequence, cut)])
    sequence = stepper.moved(sequence)
    (found,) = stepper.step([(sequence, len(ids) - cut)])
    assert torch.equal(found, stepper.read(ids)[cut:])
    stepper.release(sequence)


@torch.inference_mode()
def test_batches_and_graphs(engine: Engine) -> None:
    """Decodes of 1 to 8 sequences captured, one eager, and beside a prompt that is being read."""
    stepper, graphs = Stepper(engine), first_rank(engine.executor).runner.graphs
    assert graphs is not None
    chunks = stepper.prefilled([text(seed, length) for seed, length in enumerate(LENGTHS)])
    alone = torch.cat([graphs.run(stepper.plan([chunk])).clone() for chunk in chunks])
    assert alone.isfinite().all()
    for size in (2, 3, 5, 8):
        assert torch.equal(graphs.run(stepper.plan(chunks[-size:])), alone[-size:])
    _, streams = first_rank(engine.executor).runner.forward(stepper.plan(chunks[:1]))
    assert torch.equal(first_rank(engine.executor).runner.model.compute_logits(streams), alone[:1])
    other = stepper.sequence(text(99, 900))
    stepper.pages.grow(other.tables, 0, 900)
    plan = stepper.plan([*chunks, Chunk(other, 0, 900)])
    _, streams = first_rank(engine.executor).runner.forward(plan)
    assert torch.equal(first_rank(engine.executor).runner.model.compute_logits(streams[:8]), alone)
