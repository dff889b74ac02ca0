"""Runs the tiny DeepSeek-V4.1 by itself, with pages for a few sequences."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

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
from finwhale.models.step_inputs import Inline, Prompts, StepInputs
from finwhale.ops import load_ops
from finwhale.ops.paging import PageTable
from finwhale.platform import Platform
from finwhale.weights.allocation import WeightForm
from finwhale.weights.destinations import Destinations
from finwhale.weights.joint_ranks import JointRanks

from .oracle import in_float64
from .v41_cases import CASES, SEED, text_of
from .v41_reference import Roundings

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


@cache
def model(rounds: bool, reference: bool) -> DeepseekV41:
    config = config_of(tiny_config())
    ops = load_ops(Platform.cpu(), reference=reference)
    stream = Stream(dict(weight_specs(config)))
    form = WeightForm(
        ops=ops, dtype=torch.float32, round_activations=rounds, storages=stream.storages
    )
    return DeepseekV41(
        *(config, ops, assembler(config, form, CPU).fill(stream)),
        torch.tensor(compressed_ids()),
        round_activations=rounds,
        max_positions=LENGTH + 8,
    )


class Runner:
    """The model with pages for a few sequences."""

    def __init__(self, *, rounds: bool, reference: bool = False) -> None:
        self.model = model(rounds, reference)
        self.groups = cache_spec(self.model.config)
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

    def step(
        self,
        texts: Sequence[int],
        chunks: Sequence[tuple[int, int]],
        bounds: Sequence[tuple[int, int]] = (),
    ) -> list[Tensor]:
        """Run one step with a chunk of every text; returns the logits of each chunk.

        Args:
            bounds: `cached` and `tail_end` of each text (Prompts); empty: the model needs none.
        """
        inputs = step_inputs(chunks, bounds)
        ids = [i for t, (s, e) in zip(texts, chunks, strict=True) for i in TEXTS[t][s:e]]
        inputs = replace(inputs, token_ids=torch.tensor(ids), tables=self.tables(len(texts)))
        with torch.inference_mode():
            logits, _ = self.model.forward_with_logits(inputs, self.cache, Inline())
        return list(logits.split([end - start for start, end in chunks]))


def step_inputs(
    chunks: Sequence[tuple[int, int]], bounds: Sequence[tuple[int, int]] = ()
) -> StepInputs:
    """A step that computes one chunk for each sequence, still without token ids and pages."""
    tokens, prompts = step_tokens(tuple(chunks)), None
    if bounds:
        cached, tail_end = torch.tensor(bounds).T
        after = [end - bound for (_, end), (_, bound) in zip(chunks, bounds, strict=True)]
        lengths = [end - start for start, end in chunks]
        prompts = Prompts(cached, tail_end, tuple(zip(lengths, after, strict=True)))
    ids = torch.zeros_like(tokens.positions)
    return StepInputs(token_ids=ids, tokens=tokens, tables={}, prompts=prompts)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())
