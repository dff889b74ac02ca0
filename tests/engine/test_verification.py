"""Drafting steps on the device, ahead of the host: run uncaptured on the CPU, no token changes."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.integrity import check_engine
from torch import Tensor
from torch.overrides import TorchFunctionMode

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.bench import drafting as bench_drafting
from finwhale.bench.drafting import ForcedAcceptance
from finwhale.bench.engine import draft_on_device
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.executor import DeviceDrafts
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_plan import DraftPlan, StepPlan
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps.draft_decode import VerificationSteps
from finwhale.engine.steps.inputs import NO_STEP
from finwhale.engine.steps.step_limits import step_limits, verification_sizes
from finwhale.models.deepseek_v4.layer import DecoderLayer
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.streams import PRIORITIES, SideStreams
from finwhale.models.protocol import Drafts
from finwhale.ops.sampling import SampledTokens, SamplingBatch

from ..models.drafts import RandomDrafts  # noqa: TID252
from .plans import planned
from .test_async import play, slow
from .test_drafting import generate_two, synthetic_times, two_rows_pay

OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 300}


def on_the_device(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> VerificationSteps:
    """As on a GPU, but for the capture: one step ahead, and nothing is there before it is due."""
    steps = draft_on_device(engine.executor, engine.config)
    engine.steps_ahead = 1
    slow(engine, monkeypatch)
    return steps


class Oracle:
    """In place of the layer's guesses on the device: what will come, or anything."""

    def __init__(
        self,
        engine: Engine,
        steps: VerificationSteps,
        results: Sequence[RequestOutput],
        right: float | Callable[[str], float],
    ) -> None:
        self.engine, self.steps = engine, steps
        self.right = right if callable(right) else lambda _: right
        self.vocab = engine.model_config.vocab_size
        self.draw = random.Random(1)
        self.real = steps.draft
        self.ahead = self.count = 0
        self.texts = [
            [*result.prompt_token_ids, *output.token_ids]
            for result in results
            for output in result.outputs
        ]
        steps.draft = self.draft  # type: ignore[method-assign]
        self.fill = steps._static.fill
        steps._static.fill = self.watch  # type: ignore[method-assign]

    def watch(self, plan: StepPlan, *, decode: bool) -> None:
        assert plan.draft is not None
        self.keys = planned(self.engine, plan)
        self.count += 1
        self.ahead += plan.draft.previous_rows is not None
        self.fill(plan, decode=decode)

    @torch.inference_mode()
    def draft(self, chosen: Tensor, plan: DraftPlan) -> Tensor:
        drafts = self.real(chosen, plan)
        steps, count, width = self.steps, *drafts.shape
        assert steps.step is not None
        positions = steps.step.inputs.tokens.positions
        for row in range(count):
            index = int(positions[steps.first[row]] + steps.advanced[row, 0]) + 2
            prompt = self.keys[row].token_ids[: self.keys[row].num_prompt]
            texts = [text for text in self.texts if text[: len(prompt)] == prompt]
            for k in range(width):
                if self.draw.random() < self.right(self.keys[row].key) and texts:
                    text = texts[self.keys[row].index % len(texts)]
                    if index + k < len(text):
                        drafts[row, k] = text[index + k]
                elif self.draw.random() < 0.7:
                    drafts[row, k] = self.draw.randrange(self.vocab)
        steps._carried[:count, 1 : 1 + width] = drafts
        return drafts


@pytest.mark.parametrize(
    "draft_tokens", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 3, "auto"]
)
def test_no_token_changes(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, draft_tokens: Any
) -> None:
    """Every way to choose and to end, n, penalties, grammars, logprobs: equal to the last field."""
    seed = 13
    wanted = play(new_llm(**OPTIONS)._engine, seed)
    engine = new_llm(**OPTIONS, draft_tokens=draft_tokens)._engine
    if draft_tokens == "auto":
        # Its own choices depend on the machine's speed.
        engine.scheduler.drafting.chooser = RandomDrafts(3, seed)
    steps = on_the_device(engine, monkeypatch)
    oracle = Oracle(engine, steps, wanted, 0.8)
    assert play(engine, seed) == wanted
    # Most steps read some prompt besides: those do not run ahead.
    assert oracle.count >= 10 and oracle.ahead > 0
    assert engine.metrics().drafts_accepted[0] > (3 if draft_tokens == "auto" else 10)


@pytest.mark.parametrize(
    "draft_tokens, right",
    [*(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 1.0), (2, 0.6))), (3, 0.9)],
)
def test_over_edges_of_pages_and_blocks(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, draft_tokens: int, right: float
) -> None:
    """Long texts that draw, ahead of the host nearly always; to the model's last token."""
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 400, "max_model_len": 300}
    base = SamplingParams(temperature=0.8, seed=2, ignore_eos=True, max_tokens=None)
    prompts = [[7 + i % 50 for i in range(n)] for n in (100, 118, 230)]
    params = [base, replace(base, temperature=0), replace(base, logprobs=2)]

    def whole(engine: Engine) -> list[RequestOutput]:
        results = [
            engine.add_request(str(i), prompt, one)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        while engine.has_work:
            engine.step()
            check_engine(engine)
        return results

    wanted = whole(new_llm(**options)._engine)
    engine = new_llm(**options, draft_tokens=draft_tokens)._engine
    oracle = Oracle(engine, on_the_device(engine, monkeypatch), wanted, right)
    assert whole(engine) == wanted
    # The last tokens before the end of the context have no room for drafts.
    assert oracle.ahead > 0.7 * oracle.count
    assert engine.metrics().time_of_draft.count > 0.8 * oracle.count


def test_auto_gives_rows_to_the_request_whose_drafts_are_right(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over the host; and steps run ahead although the numbers of drafts change."""
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 40, "max_model_len": 300}
    wanted = generate_two(new_llm(**options)._engine, {}, 130)
    engine = new_llm(**options, draft_tokens="auto")._engine
    synthetic_times(engine, two_rows_pay)
    steps = on_the_device(engine, monkeypatch)
    oracle = Oracle(engine, steps, wanted, lambda key: float(key == "0/0"))
    seen: dict[str, list[int]] = {}
    assert generate_two(engine, seen, 130) == wanted
    first, second = seen["0/0"][50:], seen["1/0"][50 : len(seen["0/0"])]
    assert first.count(2) > 0.7 * len(first) and second.count(0) > 0.7 * len(second)
    assert oracle.ahead > 0.9 * oracle.count > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["over-the-host", "on-the-device"])
def test_confidences_reach_the_policy(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """In steps that run ahead, they are those of the drafts before."""
    engine = new_llm(**OPTIONS, draft_tokens=3)._engine
    if ahead:
        on_the_device(engine, monkeypatch)
    head: Any = first_rank(engine.executor).runner.model.draft_head
    draft = head.draft

    def confident(*args: Any) -> Drafts:
        drafts: Drafts = draft(*args)
        values = [(ids % 8 + 1) / 16 for ids in drafts.ids]
        return replace(drafts, confidences=torch.stack(values))

    monkeypatch.setattr(head, "draft", confident)
    verified, found = engine.scheduler.record_verified, []
    last: dict[str, tuple[int, ...]] = {}

    def noted(chunk: Chunk, num_accepted: int) -> None:
        if chunk.drafts:
            key = chunk.sequence.key
            drafts = last[key] if chunk.stale_confidences else chunk.drafts
            expected = [(token % 8 + 1) / 16 for token in drafts]
            assert list(chunk.confidences[: len(drafts)]) == expected
            found.append(chunk.stale_confidences)
            last[key] = chunk.drafts
        verified(chunk, num_accepted)

    engine.scheduler.record_verified = noted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for i in range(2):
        engine.add_request(str(i), [9 + i, 8], params)
    while engine.has_work:
        engine.step()
    assert len(found) > 20 and sum(found) > (0.8 * len(found) if ahead else -1)
    assert ahead or not any(found)


@pytest.mark.parametrize("lengths", [(3, 1, 2), (2, 2, 2), (1, 1, 1)])
def test_the_layout_of_a_padded_step(new_llm: Callable[..., LLM], lengths: tuple[int, ...]) -> None:
    """Rows and tokens of padding change nothing, and no wrong draft counts as accepted."""
    engine = new_llm(**OPTIONS, draft_tokens="auto")._engine
    steps = draft_on_device(first_rank(engine.executor), engine.config)
    count, width = sum(lengths), 3
    steps._send_layout(lengths, (2, 0, 1), 4, 4 * width)
    steps._chosen.copy_(torch.arange(len(steps._chosen)))
    inputs = steps._inputs(4, 4 * width, 300)
    # Every token is the one that was sampled after the token before it, also in another sequence.
    inputs.token_ids.copy_(torch.arange(4 * width) - 1)
    last, _ = steps._accept(inputs)
    accepted = [*[length - 1 for length in lengths], 0]
    assert steps.advanced[:4].tolist() == [[number] * steps._longest for number in accepted]
    assert last.tolist() == [*np.cumsum(lengths) - 1, 4 * width - 1]
    assert torch.equal(steps._carried[:4, 0], last)
    assert steps.first[3] == 4 * width - 1
    sources = [
        (row, k) for row, length in zip((2, 0, 1), lengths, strict=True) for k in range(length)
    ]
    found = steps._sources[: 4 * width]
    assert [divmod(s, steps._longest) for s in found[:count].tolist()] == sources
    assert (found[count:] >= steps._no_row * steps._longest).all()


@pytest.mark.parametrize(
    "ahead",
    [
        pytest.param(False, marks=pytest.mark.long, id="over-the-host"),
        pytest.param(True, id="on-the-device"),
    ],
)
def test_any_numbers_of_drafts_change_no_token(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=75, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.7, seed=4, max_tokens=90, ignore_eos=True, n=2),
    ]
    prompts = [[9, 8, 7], [5, 6], [11, *range(20, 50)]]
    wanted = new_llm(**OPTIONS).generate(prompts, params)
    llm = new_llm(**OPTIONS, draft_tokens="auto")
    chooser = llm._engine.scheduler.drafting.chooser = RandomDrafts(3, 1)
    if ahead:
        steps = on_the_device(llm._engine, monkeypatch)
        oracle = Oracle(llm._engine, steps, wanted, 0.7)
    found = llm.generate(prompts, params)
    assert [result.outputs for result in found] == [result.outputs for result in wanted]
    check_engine(llm._engine)
    assert len(chooser.seen) > 10
    if ahead:
        assert oracle.ahead > 0.8 * oracle.count
        assert llm._engine.metrics().acceptance[0] > 0.6


def test_aborts_ahead(new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is left has the tokens that it has without the others."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    wanted = new_llm(**OPTIONS).generate([[9, 8, 7], [5, 6], [11]], params)
    engine = new_llm(**OPTIONS, draft_tokens=2)._engine
    Oracle(engine, on_the_device(engine, monkeypatch), wanted, 0.9)
    results = [
        engine.add_request(str(i), result.prompt_token_ids, params)
        for i, result in enumerate(wanted)
    ]
    for _ in range(5):
        engine.step()
    engine.abort("1")
    check_engine(engine)
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert results[0].outputs == wanted[0].outputs and results[2].outputs == wanted[2].outputs
    assert not engine._loop.in_flight
    for pool in engine.scheduler.pages.pools.values():
        engine.reset_prefix_cache()
        assert pool.num_free == pool.num_pages - 1


@pytest.mark.parametrize("name", ["verify", "tokens_ahead", "draft"])
def test_a_step_that_breaks_off_loses_nothing(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    params = SamplingParams(temperature=0.9, seed=2, max_tokens=40, ignore_eos=True)
    wanted = new_llm(**OPTIONS).generate([[9, 8, 7], [5, 6]], params)
    engine = new_llm(**OPTIONS, draft_tokens=2)._engine
    steps = on_the_device(engine, monkeypatch)
    Oracle(engine, steps, wanted, 0.8)
    run, count = getattr(steps, name), 0

    def breaking(*args: Any) -> Any:
        nonlocal count
        count += 1
        result = run(*args)
        if count % 3 == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(steps, name, breaking)
    results = [
        engine.add_request(str(i), result.prompt_token_ids, params)
        for i, result in enumerate(wanted)
    ]
    while engine.has_work:
        try:
            engine.step()
        except KeyboardInterrupt:
            check_engine(engine)
    assert [r.outputs for r in results] == [w.outputs for w in wanted]
    assert count > 5


@pytest.mark.parametrize("rate", [0, 0.5, 1])
def test_forced_acceptance(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    """What `finwhale bench offline --accept` measures has the acceptance that it says."""
    engine = new_llm(**OPTIONS, draft_tokens=1)._engine
    on_the_device(engine, monkeypatch)
    first_rank(engine.executor).sampler.sample_logits = ForcedAcceptance(engine.executor, rate)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    results = [engine.add_request(str(i), [9 + i, 8], params) for i in range(2)]
    while engine.has_work:
        engine.step()
        check_engine(engine)
    assert all(len(result.outputs[0].token_ids) == 60 for result in results)
    found = engine.metrics()
    assert found.drafts_accepted[0] == pytest.approx(rate * found.drafts_proposed[0], abs=4)


OF_THE_TEST = ("randint", "clone", "ones", "tolist")


class Launches(TorchFunctionMode):
    """Counts calls of torch that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in ("__getitem__", "__len__", "__get__"):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("vocab_size", [50, 51])
def test_forced_acceptance_in_few_launches(
    monkeypatch: pytest.MonkeyPatch, varied: bool, vocab_size: int
) -> None:
    """Which drafts are right, one by one; and it does not distort what it measures."""
    monkeypatch.setattr(bench_drafting, "NUMBERS", 16)
    rate, spread = 0.6, 0.2 if varied else 0.0
    draw = torch.Generator().manual_seed(0)
    sampled: list[Tensor] = []

    def sample(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
        ids = torch.randint(0, vocab_size, (len(logits),), generator=draw)
        sampled.append(ids.clone())
        return SampledTokens(ids_S=ids, valid_S=torch.ones(len(ids), dtype=torch.bool))

    steps = SimpleNamespace(step=None, lengths=())
    runner = SimpleNamespace(
        verification_steps=steps,
        model=SimpleNamespace(sample=sample, config=SimpleNamespace(vocab_size=vocab_size)),
        device=torch.device("cpu"),
        max_model_len=300,
    )
    forced: Any = ForcedAcceptance(SimpleNamespace(runner=runner), rate, varied=varied)  # type: ignore[arg-type]
    number, rights = 0, []
    for lengths in (*[(3, 3)] * 3, (8, 1, 2, 5), (3, 3), *[(4, 2, 6)] * 4):
        starts = [0, *np.cumsum(lengths)]
        ids = torch.randint(0, vocab_size, (starts[-1],), generator=draw)
        ids[::4] = vocab_size - 1
        positions = torch.cat([torch.arange(n) + 290 - 17 * b for b, n in enumerate(lengths)])
        inputs = SimpleNamespace(token_ids=ids, tokens=SimpleNamespace(positions=positions))
        steps.step, steps.lengths = SimpleNamespace(inputs=inputs), lengths
        logits, known = torch.empty(len(ids), 1), forced._layout.lengths == lengths
        with Launches() as launches:
            found = forced(logits, SamplingBatch()).ids_S.tolist()
        if known:
            own = [name for name in launches.names if name not in OF_THE_TEST]
            assert len(own) == (6 if varied else 3) + vocab_size % 2, own
        wanted, number = sampled[-1].tolist(), 0 if number + len(lengths) > 16 else number
        for b, length in enumerate(lengths):
            for k in range(length - 1):
                at = starts[b] + k
                of_position = int(positions[at + 1]) * bench_drafting.GOLDEN % 1
                chance = rate + spread * ((b + 0.5) / len(lengths) + of_position - 1)
                right = (number + b) * bench_drafting.ROOTS[k] % 1 < chance
                rights.append(right)
                draft = int(ids[at + 1])
                wanted[at] = draft if right else (draft ^ 1) % vocab_size
        assert found == wanted
        number += len(lengths)
    assert 0.4 < sum(rights) / len(rights) < 0.8


def test_one_set_of_side_streams(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MTP layer runs on the model's streams: none are made for it, none by drafting."""
    made: list[SideStreams] = []
    begin = SideStreams.__init__

    def counting(self: SideStreams, device: torch.device, wanted: bool = True) -> None:
        made.append(self)
        begin(self, device, wanted)

    monkeypatch.setattr(SideStreams, "__init__", counting)
    engine = new_llm(**OPTIONS, draft_tokens=3)._engine
    on_the_device(engine, monkeypatch)
    model = first_rank(engine.executor).runner.model
    assert isinstance(model, DeepseekV4)
    assert made == [model.side_streams] and len(PRIORITIES) == 3
    assert model.draft_head is not None
    for layer in (*model.layers, *model.draft_head.layers):
        assert isinstance(layer, DecoderLayer)
        assert layer.attn.side_streams is made[0] and layer.ffn.side_streams is made[0]


def test_padding_stands_nowhere(new_llm: Callable[..., LLM]) -> None:
    """Rows behind a step's sequences have no position, whatever earlier steps left."""
    engine = new_llm(**OPTIONS, draft_tokens=2)._engine
    steps = draft_on_device(first_rank(engine.executor), engine.config)
    steps._static.fill(NO_STEP, decode=True)
    steps.advanced[:-1] = 2
    steps._send_layout((2, 3, 1), (0, 1, 2), 4, 12)
    steps._send_layout((), None, 4, 12)
    inputs = steps._inputs(4, 12, 300)
    steps._take_over(inputs)
    assert (inputs.tokens.positions == -1).all()


@pytest.mark.parametrize("draft_tokens", [0, "auto", 2])
def test_a_prefill_server_captures_no_decodes(llm: LLM, draft_tokens: Any) -> None:
    config = replace(llm._engine.config, draft_tokens=draft_tokens, prefix_store="/somewhere")
    sizes, model_config = StepSizes.given(100, 2048), llm._engine.model_config
    both, prefill = (
        step_limits(replace(config, role=role), sizes, model_config, True, 300)
        for role in ("both", "prefill")
    )
    assert both.captures_decodes and not prefill.captures_decodes
    assert prefill == replace(both, decode_graphs=(), verify_graphs=())


def test_sizes() -> None:
    for most in (1, 3, 64, 100, 1024):
        sizes = verification_sizes(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most
    assert torch.tensor(verification_sizes(128)).sum() < 4 * 128


@pytest.mark.parametrize("graph_sizes", [None, (1, 5, 12)], ids=["default", "given"])
def test_steps_without_drafts_have_the_sizes_of_a_plain_engine(
    llm: LLM, graph_sizes: tuple[int, ...] | None
) -> None:
    """Every step, with any number of drafts, finds a captured graph with enough tokens."""
    config = replace(llm._engine.config, max_num_seqs=100, graph_sizes=graph_sizes)
    sizes, model_config = StepSizes.given(100, 2048), llm._engine.model_config
    plain, auto, fixed = (
        step_limits(replace(config, draft_tokens=drafts), sizes, model_config, True, 300)
        for drafts in (0, "auto", 2)
    )
    assert auto.decode_graphs == plain.decode_graphs and not plain.verify_graphs
    assert auto.verify_graphs == fixed.verify_graphs and not fixed.decode_graphs
    for largest in (auto, fixed):
        steps = DeviceDrafts(
            max_seqs=largest.verify_graphs[-1],
            sizes=largest.verify_graphs,
            plain_sizes=largest.decode_graphs,
            kinds=largest.draft_kinds,
        )
        captured = steps.captured()
        tokens = [size * width for size, width in captured]
        assert tokens == sorted(tokens, reverse=True)
        widths = [width for width, _ in steps.kinds]
        drafting = sum(widths.count(width) for _, width in captured)
        assert largest.num_graphs == len(captured) + drafting + len(largest.prefill_graphs)
        for count in range(1, steps.max_seqs + 1):
            for width, drafts in steps.kinds:
                for num_tokens in {count, count * width - 1, count * width} - {count - 1}:
                    found = steps.width(count, num_tokens, drafts)
                    if found is None:
                        assert num_tokens < count * width and drafts == 0
                        continue
                    size = steps.padded(count, found)
                    assert (size, found) in captured and found <= width
                    assert num_tokens + (count < size) <= size * found
                    if found == 1:
                        assert size == min(n for n in plain.decode_graphs if n >= count)
