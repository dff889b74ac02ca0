"""Routed experts of every token, against those of the formulas, over schedules of all kinds."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tiny import random_weights, with_dspark, write_plain_checkpoint

from finwhale import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.pages import PageManager, windowed_pages
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import SequenceState
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.ranks.ranks import first_rank
from finwhale.errors import FinwhaleError
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.request import ExpertIds

from ..conftest import engine_config  # noqa: TID252
from ..models import transcription  # noqa: TID252
from ..models.drafts import RandomDrafts  # noqa: TID252
from .arrivals import random_arrivals
from .running import run_until_idle
from .test_async import play, slow
from .test_drafting import Oracle
from .test_verification import Oracle as DeviceOracle
from .test_verification import on_the_device

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 300}
ROUTED = {"enable_return_routed_experts": True}
BLOCK = 256
SEED = 13
# The choice of an expert counts as a tie below this difference of scores, where float32 decides.
NEAR_TIE = 1e-4


class Formulas:
    """The experts that the transcription chooses for texts."""

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        self.config, self.weights = config, weights
        self.compared = self.ties = 0

    @torch.inference_mode()
    def check(self, results: Sequence[RequestOutput]) -> None:
        """Compare the arrays of results. Near ties are left out."""
        for result in results:
            prompt = result.prompt_token_ids
            for output in result.outputs:
                if output.routed_experts is None:
                    assert result.prompt_routed_experts is None
                    continue
                assert result.prompt_routed_experts is not None
                assert len(result.prompt_routed_experts) == len(prompt)
                assert len(output.routed_experts) == max(0, len(output.token_ids) - 1)
                whole = np.concatenate([result.prompt_routed_experts, output.routed_experts])
                self._compare([*prompt, *output.token_ids][: len(whole)], whole)

    def _compare(self, text: list[int], found: ExpertIds) -> None:
        config = self.config
        shape = len(text), config["num_hidden_layers"], config["num_experts_per_tok"]
        assert found.shape == shape and found.dtype == np.uint8
        margins = transcription.Margins()
        transcription.after_layers(self.weights, config, text, margins)
        gaps = iter(torch.tensor(margins.experts).split(len(text)))
        tie = torch.zeros(len(text), dtype=torch.bool)
        for layer, wanted in enumerate(margins.chosen):
            if layer >= config["num_hash_layers"]:
                tie |= next(gaps) < NEAR_TIE
            ids = torch.from_numpy(found[:, layer].astype(np.int64)).sort(1).values
            assert torch.equal(ids[~tie], wanted.sort(1).values[~tie]), layer
            self.compared += int((~tie).sum())
        self.ties += int(tie.sum())


@pytest.fixture(scope="module")
def formulas() -> Formulas:
    """Those of the tiny checkpoint."""
    config = engine_config()
    return Formulas(config, random_weights(config, seed=3))


@pytest.fixture(scope="module")
def known(tiny_path: Path, formulas: Formulas) -> list[RequestOutput]:
    """What a synchronous engine gives for `play`, where every request wants its experts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = LLM(tiny_path, device="cpu", activations="exact", **OPTIONS, **ROUTED)._engine
    want(engine, 1.0)
    results = play(engine, SEED)
    formulas.check(results[::2])
    assert formulas.compared > 500 and formulas.ties < 0.02 * formulas.compared
    torch.set_num_threads(threads)
    return results


def want(engine: Engine, share: float = 0.7) -> None:
    """Let this share of an engine's requests want their experts."""
    add, draw = engine.add_request, random.Random(1)

    def added(name: str, prompt: list[int], params: SamplingParams, **more: Any) -> RequestOutput:
        wants = draw.random() < share
        return add(name, prompt, replace(params, return_routed_experts=wants), **more)

    engine.add_request = added  # type: ignore[method-assign,assignment]


def assert_equal(results: Sequence[RequestOutput], known: Sequence[RequestOutput]) -> None:
    """The same tokens, and the same experts where they were wanted."""
    assert results == known
    wanted = 0
    for result, other in zip(results, known, strict=True):
        if result.prompt_routed_experts is None:
            assert all(output.routed_experts is None for output in result.outputs)
            continue
        wanted += 1
        assert np.array_equal(result.prompt_routed_experts, other.prompt_routed_experts)
        for output, same in zip(result.outputs, other.outputs, strict=True):
            assert np.array_equal(output.routed_experts, same.routed_experts)
    assert 0 < wanted < len(results)


def test_a_step_ahead(
    new_llm: Callable[..., LLM], known: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, n, every way to end. An engine without the option gives the same tokens."""
    assert play(new_llm(**OPTIONS)._engine, SEED) == known
    engine = new_llm(**OPTIONS, **ROUTED)._engine
    want(engine)
    engine.steps_ahead = 1
    slow(engine, monkeypatch)
    assert_equal(play(engine, SEED), known)


@pytest.mark.parametrize("ahead", [False, True], ids=["over-the-host", "on-the-device"])
def test_rejected_drafts_leave_nothing(
    new_llm: Callable[..., LLM],
    known: list[RequestOutput],
    monkeypatch: pytest.MonkeyPatch,
    ahead: bool,
) -> None:
    engine = new_llm(**OPTIONS, **ROUTED, draft_tokens="auto" if ahead else 3)._engine
    if ahead:
        engine.scheduler.drafting.chooser = RandomDrafts(3, SEED)
        DeviceOracle(engine, on_the_device(engine, monkeypatch), known, 0.8)
    else:
        Oracle(engine, right=0.7, seed=SEED).learn(known)
    want(engine)
    assert_equal(play(engine, SEED), known)
    metrics = engine.metrics()
    assert 0 < metrics.drafts_accepted[0] < metrics.drafts_proposed[0]


def test_with_dspark(
    new_llm: Callable[..., LLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The layers of the draft head are not among those that are returned."""
    config = with_dspark(engine_config())
    weights = random_weights(config, seed=3)
    write_plain_checkpoint(tmp_path / "model", config, weights)
    engine = new_llm(tmp_path / "model", **OPTIONS, **ROUTED, draft_tokens=5)._engine
    on_the_device(engine, monkeypatch)
    want(engine, 1.0)
    draw = random.Random(0)
    params, results = SamplingParams(max_tokens=9, seed=1), []
    for number, length in enumerate((1, 30, 70, 3)):
        prompt = [draw.randrange(7, 400) for _ in range(length)]
        results.append(engine.add_request(str(number), prompt, params))
    while engine.has_work:
        engine.step()
    assert all(result.prompt_routed_experts is not None for result in results)
    Formulas(config, weights).check(results)


def test_preemption_and_aborts(new_llm: Callable[..., LLM], formulas: Formulas) -> None:
    engine = new_llm(
        max_num_seqs=4, max_num_batched_tokens=150, max_model_len=512, **ROUTED
    )._engine
    groups = first_rank(engine.executor).runner.groups
    num_pages = {}
    for group in groups:
        num_pages[group.name] = 1 + 4 * (BLOCK // group.tokens_per_page)
        if group.keep is not None:
            num_pages[group.name] = windowed_pages(group, 4, 150, True) + 20
    engine.begin(Scheduler(PageManager(groups, num_pages), sizes=StepSizes.given(4, 150)))
    engine.steps_ahead = 1
    want(engine, 0.9)
    preempted, preempt = set(), engine.scheduler._preempt

    def noted(sequence: SequenceState) -> None:
        preempted.add(sequence.request_id)
        preempt(sequence)

    engine.scheduler._preempt = noted  # type: ignore[method-assign]

    def text(length: int, salt: object) -> list[int]:
        draw = random.Random(f"{length} {salt}")
        return [draw.randrange(2, 400) for _ in range(length)]

    results = random_arrivals(
        engine, random.Random(8), text, 5, 330, crowded=True, chance=random.Random(3)
    )
    found = [result for result in results if result.request_id in preempted]
    assert found and found[0].prompt_routed_experts is not None
    formulas.check(found[:1])


def test_prefix_hits(new_llm: Callable[..., LLM], formulas: Formulas) -> None:
    """A request that wants experts reads its whole prompt, which then serves the others. After
    preemption it goes on where its experts end, although the cache has more of the prompt.
    """
    engine = new_llm(max_num_seqs=4, max_num_batched_tokens=150, **ROUTED)._engine
    prompt = [i % 390 + 5 for i in range(300)]
    plain = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    wanting, counts = replace(plain, return_routed_experts=True), engine.scheduler.counts

    result = engine.add_request("preempted", prompt, wanting)
    engine.step()
    engine.scheduler.preempt_all()
    engine.add_request("before it", prompt, plain, priority=-1)
    run_until_idle(engine)
    assert result.prompt_routed_experts is not None
    formulas.check([result])
    hit = engine.add_request("hit", prompt, plain)
    whole = engine.add_request("whole", prompt, replace(wanting, n=2))
    run_until_idle(engine)
    assert (hit.num_cached_tokens, whole.num_cached_tokens) == (BLOCK, 0)
    # The other continuation does not return the experts of the prompt.
    assert counts.cached_tokens == 2 * BLOCK
    for output in whole.outputs:
        assert np.array_equal(output.routed_experts, result.outputs[0].routed_experts)
    assert np.array_equal(whole.prompt_routed_experts, result.prompt_routed_experts)


def test_references_and_the_shortest_outputs(
    new_llm: Callable[..., LLM], formulas: Formulas
) -> None:
    llm = new_llm(**OPTIONS, **ROUTED, reference=True)
    params = SamplingParams(n=2, max_tokens=1, return_routed_experts=True)
    longer = replace(params, max_tokens=5, ignore_eos=True)
    results = llm.generate([[5, 6, 7] * 20, [9], [8, 9]], [params, params, longer])
    formulas.check(results)
    lengths = [
        len(output.routed_experts)
        for result in results
        for output in result.outputs
        if output.routed_experts is not None
    ]
    assert lengths == [0, 0, 0, 0, 4, 4]
    assert "routed_experts=<4>" in repr(results[2])


def test_coroutines(tiny_path: Path, formulas: Formulas, one_thread: None) -> None:
    llm = AsyncLLM(tiny_path, device="cpu", activations="exact", **ROUTED)  # type: ignore[arg-type]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, n=2)
    params = replace(params, return_routed_experts=True)

    async def both() -> list[RequestOutput]:
        results = await llm.generate([5, 6, 7], params)
        return [*results, [one async for one in llm.stream([5, 6, 7], params)][-1]]

    results = asyncio.run(both())
    formulas.check(results)
    assert all(o.routed_experts is not None for result in results for o in result.outputs)
    asyncio.run(llm.aclose())


def test_nothing_is_recorded_unless_the_engine_is_told(llm: LLM) -> None:
    runner = first_rank(llm._engine.executor).runner
    assert isinstance(runner.model, DeepseekV4)
    assert runner.routed is None and llm._engine.executor.description.routed_experts is None
    assert all(layer.ffn.routed is None for layer in runner.model.layers)  # type: ignore[attr-defined]
    (result,) = llm.generate([[1, 2]], SamplingParams(return_routed_experts=True))
    assert result.error is not None and "--enable-return-routed-experts" in result.error
    # Of two mistakes, the one in the prompt comes first.
    (result,) = llm.generate([[]], SamplingParams(return_routed_experts=True))
    assert result.error is not None and "the prompt is empty" in result.error
    with pytest.raises(RequestError, match="must be True or False"):
        SamplingParams(return_routed_experts=1)  # type: ignore[arg-type]
    with pytest.raises(FinwhaleError, match="compiled mode cannot return routed experts"):
        EngineConfig(compile=True, **ROUTED)


def test_ids_beyond_a_byte(formulas: Formulas) -> None:
    """Models of more than 256 experts, such as Pro, get int16."""
    model = object.__new__(DeepseekV4)
    model.config = replace(config_of(formulas.config), n_routed_experts=384)
    model.layers, model.weights = [], random_embedding()
    assert model.record_routed_experts(7).dtype == torch.int16


def random_embedding() -> Any:
    class Weights:
        embed = torch.zeros(1)

    return Weights()
