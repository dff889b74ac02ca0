"""DeepSeek-V4.1's forward against its formulas in float64: any chunks, decodes and batches."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from tests.support.op_case import step_tokens
from tests.support.tiny_v41 import compressed_ids, tiny_config
from torch import Tensor

from finwhale.models.step_inputs import DraftStart, Inline

from .v41_reference import Output, Roundings, draft, forward, text_config
from .v41_runner import TEXTS, TOLERANCE, Runner, exact_weights, relative


@cache
def wanted(text: int, rounds: bool) -> Output:
    config = text_config(tiny_config())
    roundings = Roundings.ALL if rounds else Roundings.NONE
    return forward(exact_weights(), config, TEXTS[text], compressed_ids(), roundings)


def run(
    runner: Runner, steps: Sequence[Sequence[tuple[int, int]]], texts: Sequence[int] = (0, 1, 2)
) -> list[Tensor]:
    """Run steps that each have one chunk of every text. Returns the logits of each text."""
    parts: list[list[Tensor]] = [[] for _ in steps[0]]
    for chunks in steps:
        found = runner.step(texts[: len(chunks)], chunks)
        for part, logits in zip(parts, found, strict=True):
            part.append(logits)
    return [torch.cat(part) for part in parts]


@cache
def logits(steps: str, rounds: bool, reference: bool = False) -> list[Tensor]:
    return run(Runner(rounds=rounds, reference=reference), STEPS[steps])


LAST = range(52, 61)
STEPS = {
    "whole": [[(0, 61)]],
    "chunks": [[(0, 7)], [(7, 20)], [(20, 21)], [(21, 50)], [(50, 61)]],
    "decodes": [[(i, i + 1)] for i in range(24)]
    + [[(24, 52)]]
    + [[(i, i + 1)] for i in range(52, 61)],
    "a batch": [
        [(0, 30), (0, 43), (0, 2)],
        [(30, 31), (43, 43), (2, 3)],
        [(31, 61), (43, 43), (3, 9)],
    ],
}


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "cpu"])
@pytest.mark.parametrize("steps", STEPS)
def test_logits_are_those_of_the_formulas(steps: str, reference: bool) -> None:
    for text, found in enumerate(logits(steps, False, reference)):
        exact = wanted(text, False).logits
        assert relative(found, exact) < TOLERANCE
        assert torch.equal(found.argmax(1), exact.argmax(1))


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "as-trained"])
def test_bits_do_not_depend_on_the_steps(rounds: bool) -> None:
    for steps in STEPS:
        assert torch.equal(logits(steps, rounds)[0], logits("whole", rounds)[0])


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "cpu"])
def test_as_trained(reference: bool) -> None:
    """In these texts, the order of sums decides no rounding (v41_cases.py)."""
    runner, texts = Runner(rounds=True, reference=reference), (3, 4)
    found = run(runner, [[(0, 9), (0, 1)], [(9, 14), (1, 14)]], texts)
    for text, logits in zip(texts, found, strict=True):
        exact = wanted(text, True).logits
        assert relative(logits, exact) < TOLERANCE
        assert torch.equal(logits.argmax(1), exact.argmax(1))


@pytest.mark.parametrize("anchors", [(30, 5), (3, 20)])
def test_drafts_are_those_of_the_formulas(anchors: tuple[int, int]) -> None:
    """Two sequences of different lengths; every draft is a given one."""
    runner, count = Runner(rounds=False), 4
    runner.step((0, 1), [(0, anchor) for anchor in anchors])
    newest = torch.tensor([TEXTS[i][anchor] for i, anchor in enumerate(anchors)])
    given = torch.tensor([TEXTS[i][a + 1 : a + 1 + count] for i, a in enumerate(anchors)])
    last = step_tokens(tuple((anchor - 1, anchor) for anchor in anchors))
    start = DraftStart(
        hidden=torch.empty(2, 0), newest_ids=newest, tokens=last, tables=runner.tables(2)
    )
    logits: list[Tensor] = []

    def choose(own: Tensor, k: int) -> Tensor:
        logits.append(own)
        return given[:, k]

    assert runner.model.draft_head is not None
    with torch.inference_mode():
        drafts = runner.model.draft_head.draft(start, count, runner.cache, Inline(), choose)
    assert torch.equal(drafts.ids, given.T) and drafts.confidences is not None
    config = text_config(tiny_config())
    for i, anchor in enumerate(anchors):
        features = wanted(i, False).features[:anchor]
        block = draft(exact_weights(), config, features, int(newest[i]), given[i].tolist())
        assert relative(torch.stack(logits)[:, i], block.logits) < TOLERANCE
        assert relative(drafts.confidences[:, i], block.confidences.sigmoid()) < TOLERANCE
