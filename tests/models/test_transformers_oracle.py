"""Finwhale, transformers and the transcription of the formulas give the same numbers.

Thirteen random configurations, prompts shorter and longer than every window, in float32 with exact
activations. The seeds are those of 0..19 in which no expert, no entry and no next token is decided
by less than what float32 resolves; test_transcription checks that.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.testing.stepping import Stepper
from finwhale.testing.tiny import random_weights, tiny_config, write_plain_checkpoint

from . import transcription
from .oracle import Oracle, relative_error, single_threaded

SEEDS = (0, 1, 2, 3, 7, 8, 9, 13, 14, 15, 16, 17, 19)
# One token; less than a window of 4; more; more than the smallest sliding windows; more than one
# and two windows of 128, and a length that is no multiple of anything.
LENGTHS = (1, 3, 5, 17, 130, 261, 300)
STEPS = 64
# Every pair of implementations differs by 1e-6 to 3e-6 (the order of float32 sums).
TOLERANCE = 1e-5
GREEDY = SamplingParams(max_tokens=STEPS, temperature=0, ignore_eos=True)


@dataclass
class Case:
    """One configuration, its checkpoint, and what the oracle says.

    texts are the prompts with their greedy continuations; logits [T,V] those of each whole text.
    """

    path: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    prompts: list[list[int]]
    continuations: list[list[int]]
    decode_logits: list[Tensor]
    logits: list[Tensor]

    @property
    def texts(self) -> list[list[int]]:
        return [p + c for p, c in zip(self.prompts, self.continuations, strict=True)]

    def llm(self, **options: Any) -> LLM:
        return LLM(self.path, device="cpu", dtype="float32", activations="exact", **options)


@pytest.fixture(scope="module", params=SEEDS)
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
        decoded = [oracle.greedy(prompt, STEPS) for prompt in prompts]
        texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, decoded, strict=True)]
        yield Case(
            path=path,
            config=config,
            weights=weights,
            prompts=prompts,
            continuations=[tokens for tokens, _ in decoded],
            decode_logits=[rows for _, rows in decoded],
            logits=[oracle.logits(text) for text in texts],
        )


def test_transcription(case: Case) -> None:
    """The formulas in float64 against transformers, with and without its cache."""
    double = {k: v.double() if v.is_floating_point() else v for k, v in case.weights.items()}
    for i, text in enumerate(case.texts):
        margins = transcription.Margins()
        wanted, _ = transcription.forward(double, case.config, text, margins)
        assert relative_error(case.logits[i], wanted) < TOLERANCE
        chosen_by = wanted[LENGTHS[i] - 1 : -1]
        assert relative_error(case.decode_logits[i], chosen_by) < TOLERANCE
        best = chosen_by.topk(2).values
        gap = float((best[:, 0] - best[:, 1]).min() / wanted.abs().max())
        reason = f"seed without room for rounding: choose another ({margins.smallest()}, {gap})"
        assert margins.smallest() > 5e-6 and gap > 1e-5, reason


def test_logits(case: Case) -> None:
    stepper = Stepper(case.llm().engine)
    for text, wanted in zip(case.texts, case.logits, strict=True):
        assert relative_error(stepper.logits(stepper.read(text)), wanted) < TOLERANCE


def test_greedy_of_a_ragged_batch(case: Case) -> None:
    outputs = case.llm().generate(case.prompts, GREEDY)
    assert [out.outputs[0].token_ids for out in outputs] == case.continuations


def test_greedy_while_prompts_are_still_read(case: Case) -> None:
    """Few sequences and few tokens a step: chunks of prompts beside decodes, and waiting."""
    llm = case.llm(max_num_seqs=3, max_num_batched_tokens=50)
    outputs = llm.generate(case.prompts, GREEDY)
    assert [out.outputs[0].token_ids for out in outputs] == case.continuations
    llm.engine.scheduler.check_integrity()


def test_checkpoint_that_transformers_wrote(tmp_path: Path) -> None:
    """save_pretrained's names, stacked experts and nested configuration give the same model."""
    config = tiny_config(SEEDS[0])
    write_plain_checkpoint(tmp_path / "official", config, random_weights(config, SEEDS[0]))
    oracle = Oracle(tmp_path / "official")
    oracle.model.save_pretrained(tmp_path / "saved")
    prompt = [5, 3, 8, 100, 2, 44, 1, 0, 7]
    with single_threaded():
        llm = LLM(tmp_path / "saved", device="cpu", dtype="float32", activations="exact")
        stepper = Stepper(llm.engine)
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
