"""Finwhale, transformers and the transcription of the formulas give the same numbers.

Thirteen random configurations, eight of them marked long; prompts shorter and longer than every
window, in float32 with exact activations. In none of the seeds is an expert, an entry or a next
token decided by less than what float32 resolves; test_transcription checks that.

A greedy continuation is checked with one forward of the oracle over the whole text: it is the
oracle's own, token for token, if each is the most likely after those before it.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.integrity import check_scheduler
from tests.support.stepping import Stepper
from tests.support.tiny import random_weights, tiny_config, write_plain_checkpoint
from torch import Tensor

from finwhale import LLM, SamplingParams

from . import transcription
from .oracle import Oracle, relative_error, single_threaded

SEEDS = (0, 1, 2, 3, 7, 8, 9, 13, 14, 15, 16, 17, 18)
# The others have each of their windows, ratios, numbers of entries and kinds of layers.
LONG_SEEDS = (2, 3, 8, 13, 14, 15, 16, 17)
# One token; less than a window of 4; more; more than the smallest sliding windows; more than one
# and two windows of 128, and a length that is no multiple of anything.
LENGTHS = (1, 3, 5, 17, 130, 261, 300)
STEPS = 32
# Every pair of implementations differs by 1e-6 to 3e-6 (the order of float32 sums).
TOLERANCE = 1e-5
GREEDY = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True)


@dataclass
class Case:
    """One configuration and its checkpoint.

    continuations are Finwhale's, greedy, of all prompts in one batch; logits [T,V] are the
    oracle's of each prompt with its continuation.
    """

    path: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    oracle: Oracle
    prompts: list[list[int]]
    continuations: list[list[int]]
    logits: list[Tensor]

    @property
    def texts(self) -> list[list[int]]:
        return [p + c for p, c in zip(self.prompts, self.continuations, strict=True)]

    def deciding(self, logits: list[Tensor]) -> list[Tensor]:
        """The rows [STEPS,V] that choose the continuations."""
        return [rows[n - 1 : -1] for rows, n in zip(logits, LENGTHS, strict=True)]


def load(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", dtype="float32", activations="exact", **options)


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY)]


def _param(seed: int) -> Any:
    return pytest.param(seed, marks=[pytest.mark.long] if seed in LONG_SEEDS else [])


@pytest.fixture(scope="module", params=[_param(seed) for seed in SEEDS])
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    seed: int = request.param
    config = tiny_config(seed)
    weights = random_weights(config, seed)
    path = tmp_path_factory.mktemp("tiny") / str(seed)
    write_plain_checkpoint(path, config, weights)
    draw = random.Random(seed)
    prompts = [[draw.randrange(config["vocab_size"]) for _ in range(n)] for n in LENGTHS]
    with single_threaded():
        oracle = Oracle(path)
        continuations = greedy(load(path), prompts)
        texts = [prompt + tokens for prompt, tokens in zip(prompts, continuations, strict=True)]
        logits = [oracle.logits(text) for text in texts]
        yield Case(path, config, weights, oracle, prompts, continuations, logits)


def test_transcription(case: Case) -> None:
    """The formulas in float64 against transformers."""
    double = {k: v.double() if v.is_floating_point() else v for k, v in case.weights.items()}
    margins, wanted = transcription.Margins(), []
    for text, logits in zip(case.texts, case.logits, strict=True):
        wanted.append(transcription.forward(double, case.config, text, margins)[0])
        assert relative_error(logits, wanted[-1]) < TOLERANCE
    best = torch.cat(case.deciding(wanted)).topk(2).values
    gap = float((best[:, 0] - best[:, 1]).min() / torch.cat(wanted).abs().max())
    reason = f"seed without room for rounding: choose another ({margins.smallest()}, {gap})"
    assert margins.smallest() > 5e-6 and gap > 1e-5, reason


@pytest.mark.parametrize("reference", [False, True], ids=["cpu", "reference"])
def test_logits(case: Case, reference: bool) -> None:
    stepper = Stepper(load(case.path, reference=reference)._engine)
    for text, wanted in zip(case.texts, case.logits, strict=True):
        assert relative_error(stepper.logits(stepper.read(text)), wanted) < TOLERANCE


def test_greedy_of_a_ragged_batch(case: Case) -> None:
    chosen = [rows.argmax(1).tolist() for rows in case.deciding(case.logits)]
    assert case.continuations == chosen


def test_greedy_beside_the_oracles_cache(case: Case) -> None:
    """The oracle decoding with its own cache, token by token."""
    tokens, rows = case.oracle.greedy(case.prompts[-2], STEPS)
    assert case.continuations[-2] == tokens
    assert relative_error(rows, case.deciding(case.logits)[-2]) < TOLERANCE


def test_greedy_while_prompts_are_still_read(case: Case) -> None:
    """Few sequences and few tokens a step: chunks of prompts beside decodes, and waiting."""
    llm = load(case.path, max_num_seqs=3, max_num_batched_tokens=50)
    assert greedy(llm, case.prompts) == case.continuations
    check_scheduler(llm._engine.scheduler)


def test_checkpoint_that_transformers_wrote(tmp_path: Path) -> None:
    """save_pretrained's names, stacked experts and nested configuration give the same model."""
    config = tiny_config(SEEDS[0])
    write_plain_checkpoint(tmp_path / "official", config, random_weights(config, SEEDS[0]))
    oracle = Oracle(tmp_path / "official")
    oracle.model.save_pretrained(tmp_path / "saved")
    prompt = [5, 3, 8, 100, 2, 44, 1, 0, 7]
    with single_threaded():
        stepper = Stepper(load(tmp_path / "saved")._engine)
        found = stepper.logits(stepper.read(prompt))
        assert relative_error(found, oracle.logits(prompt)) < TOLERANCE


def test_oracle_can_fail(tmp_path: Path) -> None:
    """A wrong sign in one head's sink is far outside the tolerance."""
    config = tiny_config(SEEDS[0])
    weights = random_weights(config, SEEDS[0])
    write_plain_checkpoint(tmp_path, config, weights)
    wanted = Oracle(tmp_path).logits([1, 2, 3])
    weights["layers.0.attn.attn_sink"][0] *= -1
    found, _ = transcription.forward(weights, config, [1, 2, 3])
    assert not torch.isnan(found).any()
    assert relative_error(found, wanted) > 10 * TOLERANCE
