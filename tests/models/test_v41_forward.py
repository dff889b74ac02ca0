"""DeepSeek-V4.1's forward against its formulas in float64: any chunks, decodes and batches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.support.op_case import step_tokens
from tests.support.tiny_v41 import compressed_ids, random_text, random_weights, tiny_config
from torch import Tensor

from finwhale.checkpoint.spec import WeightSpec
from finwhale.checkpoint.stored import StoredWeight
from finwhale.engine.start.kv_cache import allocate_cache, plan_cache
from finwhale.models.cache import CacheGroup, PagedCache
from finwhale.models.deepseek_v41.cache_spec import cache_spec
from finwhale.models.deepseek_v41.config_json import config_of
from finwhale.models.deepseek_v41.model import DeepseekV41
from finwhale.models.deepseek_v41.weights import assembler, weight_specs
from finwhale.models.step_inputs import DraftStart, Inline, StepInputs
from finwhale.ops import load_ops
from finwhale.ops.paging import PageTable
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.destinations import Destinations
from finwhale.weights.joint_ranks import JointRanks

from .oracle import in_float64
from .v41_cases import CASES, SEED, text_of
from .v41_reference import Output, Roundings, draft, forward, text_config

CPU = torch.device("cpu")
LENGTH, PAGES = 61, 40
TEXTS = [random_text(LENGTH, 1), random_text(43, 2), random_text(9, 3)]
TEXTS += [text_of(case) for case in CASES if case.roundings is Roundings.ALL]
# A difference of float32 sums.
TOLERANCE = 2e-5


@cache
def weights() -> dict[str, Tensor]:
    return random_weights(tiny_config(), SEED)


@cache
def exact_weights() -> dict[str, Tensor]:
    return in_float64(weights())


@cache
def wanted(text: int, rounds: bool) -> Output:
    config = text_config(tiny_config())
    roundings = Roundings.ALL if rounds else Roundings.NONE
    return forward(exact_weights(), config, TEXTS[text], compressed_ids(), roundings)


class Stream:
    """The weights, as a checkpoint that stores float32."""

    def __init__(self, specs: dict[str, WeightSpec]) -> None:
        self._specs = specs
        self.storages = dict.fromkeys(specs, "f32")

    def into(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight]]:
        assert self._specs.keys() == weights().keys()
        for name, spec in self._specs.items():
            yield spec, StoredWeight(weights()[name], None, "f32")


class Runner:
    """The model with pages for a few sequences."""

    def __init__(self, *, rounds: bool, reference: bool = False) -> None:
        config = config_of(tiny_config())
        ops = load_ops(Platform.cpu(), reference=reference)
        stream = Stream(dict(weight_specs(config)))
        form = WeightForm(
            ops=ops, dtype=torch.float32, round_activations=rounds, storages=stream.storages
        )
        self.model = DeepseekV41(
            *(config, ops, assembler(config, form, CPU).fill(stream)),
            torch.tensor(compressed_ids()),
            round_activations=rounds,
            max_positions=LENGTH + 8,
        )
        self.groups = cache_spec(config)
        plan = plan_cache(
            self.groups,
            itemsize=4,
            budget_bytes=2**24,
            max_num_seqs=4,
            max_step_tokens=64,
            wanted_tokens=256,
        )
        plan = replace(plan, num_pages={group.name: PAGES for group in self.groups})
        self.cache: PagedCache = allocate_cache(self.groups, plan, torch.float32, CPU)
        for pages in self.cache.pages.values():
            pages[1:] = 255  # NaN: no row is read that no step has written

    def tables(self, count: int) -> dict[str, PageTable]:
        return {group.name: self._table(group, count) for group in self.groups}

    def _table(self, group: CacheGroup, count: int) -> PageTable:
        """Pages of whole sequences, those of neighbours apart."""
        each = -(-(LENGTH + 8) // group.tokens_per_page)
        numbers = torch.arange(each)[None] * count + torch.arange(count)[:, None]
        first = torch.zeros(count, dtype=torch.int32)
        return PageTable(1 + numbers.int(), first, group.rows_per_page)

    def step(self, texts: Sequence[int], chunks: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Run one step with a chunk of every text; returns the logits of each chunk."""
        ids = [i for t, (s, e) in zip(texts, chunks, strict=True) for i in TEXTS[t][s:e]]
        inputs = StepInputs(
            token_ids=torch.tensor(ids),
            tokens=step_tokens(tuple(chunks)),
            tables=self.tables(len(texts)),
        )
        with torch.inference_mode():
            logits, _ = self.model.forward_with_logits(inputs, self.cache, Inline())
        return list(logits.split([end - start for start, end in chunks]))


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def run(
    runner: Runner, steps: Sequence[Sequence[tuple[int, int]]], texts: Sequence[int] = (0, 1, 2)
) -> list[Tensor]:
    """Run some steps, each with one chunk of every text; returns the logits of each text."""
    parts: list[list[Tensor]] = [[] for _ in steps[0]]
    for chunks in steps:
        found = runner.step(texts[: len(chunks)], chunks)
        for part, logits in zip(parts, found, strict=True):
            part.append(logits)
    return [torch.cat(part) for part in parts]


STEPS = {
    "whole": [[(0, 61)]],
    "chunks": [[(0, 7)], [(7, 20)], [(20, 21)], [(21, 50)], [(50, 61)]],
    "decodes": [[(i, i + 1)] for i in range(61)],
    "a batch": [
        [(0, 30), (0, 43), (0, 2)],
        [(30, 31), (43, 43), (2, 3)],
        [(31, 61), (43, 43), (3, 9)],
    ],
}


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "cpu"])
@pytest.mark.parametrize("steps", STEPS)
def test_logits_are_those_of_the_formulas(steps: str, reference: bool) -> None:
    runner = Runner(rounds=False, reference=reference)
    for text, logits in enumerate(run(runner, STEPS[steps])):
        exact = wanted(text, False).logits
        assert relative(logits, exact) < TOLERANCE
        assert torch.equal(logits.argmax(1), exact.argmax(1))


@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "as-trained"])
def test_bits_do_not_depend_on_the_steps(rounds: bool) -> None:
    whole = run(Runner(rounds=rounds), STEPS["whole"])[0]
    for steps in STEPS.values():
        assert torch.equal(run(Runner(rounds=rounds), steps)[0], whole)


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
