"""Compilations after "ready" are counted and told."""

from collections.abc import Callable, Mapping

from finwhale import LLM, SamplingParams
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.warmup import warm_up
from finwhale.engine.ranks.ranks import first_rank
from finwhale.server.observe.metrics import engine_families


class Builds:
    """Compilers that have compiled twice since they were ready."""

    def late(self) -> Mapping[str, int]:
        return {"triton": 2, "deepgemm": 0}


def test_late_compilations_are_reported(llm: LLM) -> None:
    engine = llm._engine
    assert sum(engine.metrics().late_compilations.values()) == 0
    kept = first_rank(engine.executor).builds
    first_rank(engine.executor).builds = Builds()  # type: ignore[assignment]
    try:
        found = engine.metrics()
    finally:
        first_rank(engine.executor).builds = kept
    assert found.late_compilations == {"triton": 2, "deepgemm": 0}
    (family,) = [m for m in engine_families(found) if m.name == "finwhale_late_compilations"]
    told = {sample.labels["compiler"]: sample.value for sample in family.samples}
    assert told == {"triton": 2, "deepgemm": 0}


def text(engine: Engine, name: str) -> list[int]:
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    request = engine.add_request(name, [5, 6, 7] * 90, params)
    while engine.has_work:
        engine.step()
    return request.outputs[0].token_ids


def test_warm_up_leaves_nothing_behind(new_llm: Callable[..., LLM]) -> None:
    """Neither counters nor blocks nor other tokens."""
    engine = new_llm(max_num_seqs=4, max_num_batched_tokens=64)._engine
    before, counters = text(engine, "a"), engine.metrics()
    engine.reset()
    engine.executor.mark_ready()  # forgets the times of steps
    empty = engine.metrics()
    warm_up(engine)
    engine.executor.mark_ready()
    after = engine.metrics()
    assert after == empty
    assert counters.requests == 1 and after.requests == after.steps == after.idle_blocks == 0
    assert text(engine, "a") == before


def test_warm_up_fits_the_shortest_context(new_llm: Callable[..., LLM]) -> None:
    warm_up(new_llm(max_model_len=8, max_num_seqs=1, max_num_batched_tokens=2)._engine)
