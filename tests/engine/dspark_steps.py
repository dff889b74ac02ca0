"""What tests of DSpark on a CPU and on a GPU share: a model, steps that run twice, noted drafts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.support.integrity import check_engine
from tests.support.stepping import Stepper
from tests.support.tiny import random_weights, with_dspark, write_quantised_checkpoint
from torch import Tensor

from finwhale import RequestOutput, SamplingParams
from finwhale.checkpoint.config_files import read_config
from finwhale.checkpoint.reader import Checkpoint
from finwhale.demo import DEMO_PATH
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.step_plan import DraftPlan, SamplingSettings, StepPlan
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps.draft_decode import VerificationSteps
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.models.step_inputs import Inline
from finwhale.weights.source import WeightSource

from ..conftest import write_tokenizer  # noqa: TID252
from ..models.dspark_transcription import context_rows, draft, main_of  # noqa: TID252
from .plans import planned

BLOCK_SIZE = 5
# Prompts around the ends of pages, windows, compressed entries and blocks of the cache.
PROMPT_LENGTHS = (3, 127, 128, 260, 61, 1, 254)
# Greedy requests and others, with several continuations and with penalties.
FREE: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
PARAMS = (
    SamplingParams(temperature=0, **FREE),
    SamplingParams(temperature=0.9, seed=4, logprobs=2, **FREE),
    SamplingParams(temperature=0.9, seed=5, top_p=0.9, n=2, **FREE),
    SamplingParams(temperature=0, **FREE),
    SamplingParams(temperature=0.7, seed=6, **FREE),
)
# The host must know all tokens before it can choose the next one.
HISTORIC = (
    SamplingParams(temperature=0.9, seed=4, presence_penalty=0.4, **FREE),
    SamplingParams(temperature=0, **FREE),
)


def small_config() -> dict[str, Any]:
    """A narrow model with Flash's heads, so that all kernels of GPUs run, and with a DSpark head.

    Two ranks can divide it.
    """
    config = read_config(DEMO_PATH) | {
        "vocab_size": 1024,
        "num_attention_heads": 64,
        "head_dim": 512,
        "num_hidden_layers": 4,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 128, 4, 0],
        "moe_intermediate_size": 256,
        "max_position_embeddings": 2048,
    }
    return with_dspark(
        config, dspark_block_size=BLOCK_SIZE, dspark_markov_rank=256, dspark_target_layer_ids=[1, 3]
    )


def write_model(path: Path) -> dict[str, Any]:
    """Write a model of random weights with a tokenizer; returns its configuration."""
    config = small_config()
    weights = random_weights(config, seed=3)
    for name, weight in weights.items():
        # The stages' experts matter less than in other random models, because rounding changes the
        # choice of experts. Their attention matters more, so that a wrong row of the context shows.
        if name.startswith("mtp."):
            weight *= {"w2": 1 / 6, "wo_b": 2.5}.get(name.split(".")[-2], 1.0)
    write_quantised_checkpoint(path, config, weights)
    write_tokenizer(path, config["vocab_size"])
    return config


def demo_with_dspark() -> Path | None:
    """The embedded model with a DSpark head; None: the package has none."""
    for file in sorted(DEMO_PATH.parent.glob("demo*/**/config.json")):
        if "dspark_block_size" in json.loads(file.read_text(encoding="utf-8")):
            return file.parent
    return None


def prompts(vocab_size: int) -> list[list[int]]:
    return [[7 + (3 + n) * i % (vocab_size - 9) for i in range(n)] for n in PROMPT_LENGTHS]


def generate(
    engine: Engine, texts: Sequence[Sequence[int]], params: Sequence[SamplingParams] = PARAMS
) -> list[RequestOutput]:
    """The results of all texts, which arrive in two groups."""
    engine.reset_prefix_cache()
    results = []
    for i, text in enumerate(texts):
        results.append(engine.add_request(str(i), list(text), params[i % len(params)]))
        if 2 * i == len(texts):
            for _ in range(20):
                engine.step()
    while engine.has_work:
        engine.step()
    check_engine(engine)
    return results


def token_ids(results: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for result in results for output in result.outputs]


class RunTwice:
    """Runs every step that verifies, and every draft pass, again: kernel by kernel from the same
    state. Everything that they leave must have the same bits.

    Attributes:
        steps: (sequences, width, lengths) of the steps that have run twice.
    """

    def __init__(self, engine: Engine, steps: VerificationSteps) -> None:
        self.cache = first_rank(engine.executor).runner.cache
        self.verifications = steps
        self.steps: list[tuple[int, int, tuple[int, ...]]] = []
        self.num_drafts: set[int] = set()
        self._verify, self._draft = steps.verify, steps.draft
        steps.verify = self.verify  # type: ignore[method-assign]
        steps.draft = self.draft  # type: ignore[method-assign]

    def pages(self) -> dict[str, Tensor]:
        # No sequence uses page 0.
        return {name: pages[1:].clone() for name, pages in self.cache.pages.items()}

    def restore(self, pages: Mapping[str, Tensor]) -> None:
        for name, kept in pages.items():
            self.cache.pages[name][1:] = kept

    @torch.inference_mode()
    def verify(self, plan: StepPlan, settings: Mapping[int, SamplingSettings]) -> Tensor:
        before = self.pages()
        logits = self._verify(plan, settings)
        step, after = self.verifications.step, self.pages()
        assert step is not None
        count = len(logits)
        found = [logits.clone(), step.out[1][:count].clone()]
        found += [step.inputs.token_ids.clone(), step.inputs.tokens.positions.clone()]
        self.restore(before)
        assert plan.draft is not None
        again, streams = self.verifications._verify(step.inputs, Inline())
        others = [again[:count], streams[:count]]
        others += [step.inputs.token_ids, step.inputs.tokens.positions]
        for one, other in zip(found, others, strict=True):
            assert torch.equal(one, other)
        assert found[0].isfinite().all() and found[1].isfinite().all()
        same_pages(after, self.pages())
        size = len(step.inputs.tokens.query_start) - 1
        self.steps.append((size, len(step.inputs.token_ids) // size, plan.lengths))
        return logits

    @torch.inference_mode()
    def draft(self, chosen: Tensor, plan: DraftPlan) -> Tensor:
        steps = self.verifications
        state = (steps._carried, steps.advanced, steps._confidences)
        before, kept = self.pages(), [part.clone() for part in state]
        drafts = self._draft(chosen, plan)
        after, found = self.pages(), [part.clone() for part in state]
        self.restore(before)
        for part, values in zip(state, kept, strict=True):
            part.copy_(values)
        assert steps.step is not None
        steps._draft(steps.step, plan.propose[0], Inline())
        count, num_drafts = drafts.shape
        for one, other in zip(found[:2], state[:2], strict=True):
            assert torch.equal(one[:count], other[:count])
        assert torch.equal(found[2][:count, :num_drafts], state[2][:count, :num_drafts])
        assert torch.equal(drafts, steps._carried[:count, 1 : 1 + num_drafts])
        same_pages(after, self.pages())
        self.num_drafts.add(num_drafts)
        return drafts


def same_pages(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name, pages in found.items():
        assert torch.equal(pages.view(torch.uint8), wanted[name].view(torch.uint8)), name


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the head drafted for a sequence that had `length` tokens.

    Attributes:
        greedy: each draft is the likeliest token.
    """

    key: str
    length: int
    drafts: list[int]
    confidences: list[float]
    greedy: bool


class Proposals:
    """Notes the drafts of a captured engine. It waits for each step's drafts."""

    def __init__(self, engine: Engine, steps: VerificationSteps) -> None:
        self.found: list[Proposal] = []
        self._engine, self._steps = engine, steps
        self._verify, self._draft = steps.verify, steps.draft
        steps.verify = self.verify  # type: ignore[method-assign]
        steps.draft = self.draft  # type: ignore[method-assign]

    def verify(self, plan: StepPlan, settings: Mapping[int, SamplingSettings]) -> Tensor:
        self._sequences = planned(self._engine, plan)
        self._greedy = [settings[slot].greedy for slot in plan.slots]
        return self._verify(plan, settings)

    @torch.inference_mode()
    def draft(self, chosen: Tensor, plan: DraftPlan) -> Tensor:
        drafts, steps = self._draft(chosen, plan), self._steps
        assert steps.step is not None
        count = len(drafts)
        known = steps.step.inputs.tokens.positions.index_select(0, steps.first[:count])
        lengths = (known + steps.advanced[:count, 0] + 2).tolist()
        confidences = [part.tolist() for part in steps.confidences]
        for row, (sequence, length) in enumerate(zip(self._sequences, lengths, strict=True)):
            given = confidences[0][row] if confidences else []
            made = Proposal(sequence.key, length, drafts[row].tolist(), given, self._greedy[row])
            self.found.append(made)
        return drafts


def stored_weights(path: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors by official name, as float32 numbers."""
    checkpoint = Checkpoint.open(path)
    specs = weight_specs(config_of(checkpoint.config))
    source = WeightSource(checkpoint, specs)
    return {spec.name: stored.dequantise(torch.float32) for spec, stored in source}


@torch.inference_mode()
def features_of(stepper: Stepper, text: Sequence[int]) -> Tensor:
    """The head's features [T, F*D] of a text as the engine computes them, float32 on the CPU."""
    model = stepper.runner.model
    assert isinstance(model, DeepseekV4) and model.draft_context is not None
    context, found = model.draft_context, []
    write = context.write

    def noted(features: Any, *args: Any) -> None:
        found.append(features.values.float().cpu())
        write(features, *args)

    context.write = noted  # type: ignore[method-assign, assignment]
    try:
        stepper.read(text)
    finally:
        context.write = write  # type: ignore[method-assign]
    return torch.cat(found)


@dataclass
class Agreement:
    """How the greedy drafts of one position compare with the formulas.

    Attributes:
        compared: drafts where the formulas' choice is no near tie.
        equal: of these, those that are the formulas' choice.
        worst: how far any draft's logit lies below the best, over the largest magnitude.
        confidence: the largest difference of a confidence.
        mean_confidence: the mean of these differences.
    """

    num_drafts: int = 0
    compared: int = 0
    equal: int = 0
    worst: float = 0.0
    confidence: float = 0.0
    mean_confidence: float = 0.0

    def add(self, logits: Tensor, chosen: int, near_tie: float) -> None:
        largest = logits.abs().max()
        first, second = logits.topk(2).values
        self.worst = max(self.worst, float((first - logits[chosen]) / largest))
        self.num_drafts += 1
        if first - second >= near_tie * largest:
            self.compared += 1
            self.equal += int(logits.argmax() == chosen)

    def add_confidence(self, difference: float) -> None:
        self.confidence = max(self.confidence, difference)
        self.mean_confidence += (difference - self.mean_confidence) / self.num_drafts


@torch.inference_mode()
def compare(
    engine: Engine,
    path: Path,
    texts: Mapping[str, Sequence[int]],
    proposals: Sequence[Proposal],
    *,
    near_tie: float,
    as_trained: bool = True,
) -> list[Agreement]:
    """Compare greedy drafts with the formulas, which begin from the engine's own features and get
    the drafts before each draft.

    Args:
        engine: idle.
        texts: each sequence's whole text by its key.
        as_trained: the engine rounds activations.
    """
    weights, config = stored_weights(path), read_config(path) | {"as_trained": as_trained}
    stepper = Stepper(engine)
    rows = {
        key: context_rows(
            weights, config, main_of(weights, config, features_of(stepper, texts[key]))
        )
        for key in {one.key for one in proposals}
    }
    agreements = [Agreement() for _ in range(max(len(one.drafts) for one in proposals))]
    for one in proposals:
        text = texts[one.key][: one.length]
        if len(text) < one.length or not one.greedy:
            continue  # The sequence ended before.
        before = [stage[: one.length - 1] for stage in rows[one.key]]
        block = draft(weights, config, before, text[-1], one.drafts)
        for k, chosen in enumerate(one.drafts):
            agreements[k].add(block.logits[k], chosen, near_tie)
            if one.confidences:
                agreements[k].add_confidence(abs(float(block.confidences[k]) - one.confidences[k]))
    return agreements


def texts_of(results: Sequence[RequestOutput]) -> dict[str, list[int]]:
    """Each sequence's whole text by its key."""
    return {
        f"{result.request_id}/{output.index}": [*result.prompt_token_ids, *output.token_ids]
        for result in results
        for output in result.outputs
    }


def forced_drafts(engine: Engine, prefixes: Iterable[tuple[Sequence[int], int]]) -> list[list[int]]:
    """The drafts after text[: n + 1], from a prefill of text[:n], for each pair of a text and an n.

    Text[n] is the newest token, whatever the engine samples.
    """
    drafter, found = first_rank(engine.executor).runner.drafter, []
    assert drafter is not None
    propose = drafter.propose
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for text, length in prefixes:
        drafts: list[list[int]] = []

        def forced(forward: Any, plan: Any, chosen: Any, settings: Any) -> Tensor | None:
            out = propose(forward, plan, chosen.fill_(text[length]), settings)  # noqa: B023
            assert out is not None
            drafts.append(out[:, 0].tolist())  # noqa: B023
            return out

        drafter.propose = forced  # type: ignore[method-assign, assignment]
        try:
            engine.reset_prefix_cache()
            engine.add_request("forced", list(text[:length]), params)
            while not drafts:
                engine.step()
        finally:
            drafter.propose = propose  # type: ignore[method-assign]
        engine.abort("forced")
        while engine.has_work:
            engine.step()
        found += drafts
    return found


def share_accepted(
    prefixes: Iterable[tuple[Sequence[int], int]], drafts: Sequence[Sequence[int]]
) -> float:
    """The share of drafts that a text confirms, each with all drafts before it."""
    accepted = total = 0
    for (text, length), ids in zip(prefixes, drafts, strict=True):
        right = list(text[length + 1 : length + 1 + len(ids)])
        total += len(right)
        accepted += next(
            (i for i, (a, b) in enumerate(zip(ids, right, strict=False)) if a != b), len(right)
        )
    return accepted / total
