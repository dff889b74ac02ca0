"""The least time of a step: reading a rank's weights and its cache's rows, or its arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from finwhale.checkpoint.spec import FP8_BLOCKS, WeightSpec
from finwhale.distributed.rank import Rank
from finwhale.models.registry import architecture_of

# Measured on an H200.
READ_RATE = 4.39e12  # bytes per second
FP8_RATE, BF16_RATE = 1.42e15, 0.79e15  # operations per second; a multiply-add is two operations
FP4_BYTES = 0.5 + 1 / 32  # of a value, with its part of a scale
# Floors do not count these tables: for each token, a step reads only a few rows of a table.
LOOKED_UP = ("embed.weight", "tid2eid", "markov_w1.weight")


def read_ms(num_bytes: float) -> float:
    """Milliseconds in which an H200 reads bytes from its memory."""
    return round(1e3 * num_bytes / READ_RATE, 4)


def expected_experts(config: Any, tokens: float) -> float:
    """How many different experts a layer uses on average, if tokens choose them evenly."""
    return _expected(config.num_experts_per_tok, config.n_routed_experts, tokens)


def _expected(each: int, experts: int, tokens: float) -> float:
    return float(experts * (1 - (1 - each / experts) ** tokens))


def weights_of_step(config: Any, rank: Rank) -> Mapping[str, WeightSpec]:
    """The weights that a rank reads in a step. If it holds attention whole, it reads its part, or
    computes all heads for its part of the tokens, which are as many operations.
    """
    rank = replace(rank, whole_attention=False)
    specs: Mapping[str, WeightSpec] = architecture_of(config).weight_specs(config, rank)
    return specs


class DecodeBytes:
    """Bytes that a rank must read in a decode step.

    Attributes:
        others: of the model's weights besides experts, without a draft head.
        expert: of one expert in every layer of the model.
    """

    def __init__(self, config: Any, rank: Rank) -> None:
        self.config = config
        parts: dict[str, dict[str, WeightSpec]] = {"model": {}, "head": {}, "markov": {}}
        for name, spec in weights_of_step(config, rank).items():
            if ".markov_head." in name:
                parts["markov"][name] = spec
            elif name.startswith("mtp."):
                parts["head"][name] = spec
            else:
                parts["model"][name] = spec
        own = config.num_experts_per_tok, config.n_routed_experts
        self._of_head: tuple[int, int] = own
        if config.dspark is not None:
            self._of_head = config.dspark.experts_or(*own)
        self.others, self.expert = _sums(own[1], parts["model"])
        self._head, self._head_expert = _sums(self._of_head[1], parts["head"])
        self._markov, _ = _sums(1, parts["markov"])
        self._logits, _ = _sums(1, {"head.weight": parts["model"]["head.weight"]})

    def step(self, context: int, sequences: float, experts: float) -> float:
        """Bytes that a rank reads in a step of the model, without drafts.

        Args:
            context: tokens that each sequence sees.
            sequences: of this rank, if ranks are data-parallel.
            experts: different experts that a layer uses.
        """
        rows: float = architecture_of(self.config).cache_bytes_read(self.config, context)
        return self.others + experts * self.expert + sequences * rows

    def drafts(self, count: float, sequences: int) -> float:
        """Bytes of weights that a rank reads to draft `count` tokens for each sequence.

        The MTP layer runs once for each draft. The layers of DSpark run once for a whole block, and
        then each draft reads the Markov head.
        """
        c = self.config
        if not count or c.draft_head is None:
            return 0.0
        tokens = sequences * max(1, c.draft_block_tokens)
        run = self._head + self._head_expert * _expected(*self._of_head, tokens) + self._logits
        return run + count * self._markov if c.draft_head == "dspark" else run * count


class PrefillOperations:
    """A rank's operations in a prefill, with those of attention and of the indexer."""

    def __init__(self, config: Any, rank: Rank) -> None:
        self.config, architecture = config, architecture_of(config)
        self._heads_divided = 1 if rank.data_parallel else rank.size
        # Operations for a token: in FP8, in bfloat16, and in bfloat16 at the end of a prompt alone.
        self._fp8 = self._bf16 = self._tail = 0.0
        for name, spec in weights_of_step(config.without_draft_head(), rank).items():
            if len(spec.shape) < 2 or name == "head.weight" or _is_looked_up(spec):
                continue
            share = config.num_experts_per_tok / config.n_routed_experts
            ops = 2 * torch.Size(spec.local_shape).numel() * (share if ".experts." in name else 1)
            if architecture.is_of_tail(config, name):
                self._tail += ops
            elif spec.storage in ("fp8_block", "fp4") and architecture.FP8_PRODUCTS:
                self._fp8 += ops
            else:
                self._bf16 += ops

    def ms(self, tokens: int) -> float:
        """The floor of one prompt of this length on an H200, in milliseconds."""
        operations = architecture_of(self.config).attention_operations
        fp8, bf16 = operations(self.config, tokens, self._heads_divided)
        fp8, bf16 = fp8 + self._fp8 * tokens, bf16 + self._bf16 * tokens
        bf16 += self._tail * min(tokens, self.config.sliding_window)
        return round(float(1e3 * (fp8 / FP8_RATE + bf16 / BF16_RATE)), 4)


def _sums(num_experts: int, specs: dict[str, WeightSpec]) -> tuple[float, float]:
    """Return the bytes of all weights except experts, and those of one expert of every layer."""

    def stored(spec: WeightSpec) -> float:
        if spec.storage in FP8_BLOCKS:
            return 1 + 4 / FP8_BLOCKS[spec.storage] ** 2
        return FP4_BYTES if ".experts." in spec.name else 2 if spec.storage == "bf16" else 4

    others, experts = weight_sums(specs, stored)
    return others, experts / num_experts


def _is_looked_up(spec: WeightSpec) -> bool:
    return spec.lookup or spec.name.endswith(LOOKED_UP)


def weight_sums(
    specs: Mapping[str, WeightSpec], size: Callable[[WeightSpec], float] = lambda spec: 1.0
) -> tuple[float, float]:
    """The sizes of a rank's weights: of all that a step reads except experts, and of experts.
    `size` is the size of one value of a weight; by default, values are counted.
    """
    sums = {True: 0.0, False: 0.0}
    for name, spec in specs.items():
        if not _is_looked_up(spec):
            numel = torch.Size(spec.local_shape).numel()
            sums[".experts." in name] += numel * size(spec)
    return sums[False], sums[True]
