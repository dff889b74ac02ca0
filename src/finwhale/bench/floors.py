"""The least time of a step: reading a rank's weights and its cache's rows, or its arithmetic."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from finwhale.checkpoint.spec import WeightSpec
from finwhale.distributed.rank import Rank
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.models.deepseek_v4.weights import weight_specs
from finwhale.ops.case import BF16_RATE, FP8_RATE, READ_RATE
from finwhale.ops.moe.cases import FP4_BYTES

FP8_BLOCK_BYTES = 4 / 128**2
# Floors do not count these tables: for each token, a step reads only one row of a table.
LOOKED_UP = ("embed.weight", "tid2eid", "markov_w1.weight")
ROW_BYTES, KEY_BYTES = 584, 68  # of a row of the cache, and of an index key, both packed


def read_ms(num_bytes: float) -> float:
    """Milliseconds in which an H200 reads bytes from its memory."""
    return round(1e3 * num_bytes / READ_RATE, 4)


def expected_experts(config: DeepseekV4Config, tokens: float) -> float:
    """How many different experts a layer uses on average, if tokens choose them evenly."""
    unused = 1 - config.num_experts_per_tok / config.n_routed_experts
    return float(config.n_routed_experts * (1 - unused**tokens))


def weights_of_step(config: DeepseekV4Config, rank: Rank) -> Mapping[str, WeightSpec]:
    """The weights that a rank reads in a step. If it holds attention whole, it reads its part, or
    computes all heads for its part of the tokens, which are as many operations.
    """
    return weight_specs(config, replace(rank, whole_attention=False))


class DecodeBytes:
    """Bytes that a rank must read in a decode step.

    Attributes:
        others: of the model's weights besides experts, without a draft head.
        expert: of one expert in every layer of the model.
    """

    def __init__(self, config: DeepseekV4Config, rank: Rank) -> None:
        self.config = config
        parts: dict[str, dict[str, WeightSpec]] = {"model": {}, "head": {}, "markov": {}}
        for name, spec in weights_of_step(config, rank).items():
            if ".markov_head." in name:
                parts["markov"][name] = spec
            elif name.startswith("mtp."):
                parts["head"][name] = spec
            else:
                parts["model"][name] = spec
        self.others, self.expert = _sums(config, parts["model"])
        self._head, self._head_expert = _sums(config, parts["head"])
        self._markov, _ = _sums(config, parts["markov"])
        self._logits, _ = _sums(config, {"head.weight": parts["model"]["head.weight"]})

    def step(self, context: int, sequences: float, experts: float) -> float:
        """Bytes that a rank reads in a step of the model, without drafts.

        Args:
            context: tokens that each sequence sees.
            sequences: of this rank, if ranks are data-parallel.
            experts: different experts that a layer uses.
        """
        c, rows = self.config, 0.0
        for ratio in c.layer_ratios:
            rows += min(context, c.sliding_window) * ROW_BYTES
            if ratio == 4:
                entries = context // 4
                rows += min(entries, c.index_topk) * ROW_BYTES
                rows += entries * KEY_BYTES * (entries > c.index_topk)
            elif ratio == 128:
                rows += context // 128 * ROW_BYTES
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
        run = self._head + self._head_expert * expected_experts(c, tokens) + self._logits
        return run + count * self._markov if c.draft_head == "dspark" else run * count


class PrefillOperations:
    """A rank's operations in a prefill, with those of attention and of the indexer."""

    def __init__(self, config: DeepseekV4Config, rank: Rank) -> None:
        self.config = config
        self._heads_divided = 1 if rank.data_parallel else rank.size
        self._fp8 = self._bf16 = 0.0
        for name, spec in weights_of_step(config.without_draft_head(), rank).items():
            if len(spec.shape) < 2 or name in ("embed.weight", "head.weight"):
                continue
            if name.endswith("tid2eid"):
                continue
            share = config.num_experts_per_tok / config.n_routed_experts
            ops = 2 * torch.Size(spec.local_shape).numel() * (share if ".experts." in name else 1)
            if spec.storage in ("fp8_block", "fp4"):
                self._fp8 += ops
            else:
                self._bf16 += ops

    def ms(self, tokens: int) -> float:
        """The floor of one prompt of this length on an H200, in milliseconds."""
        c, fp8, bf16 = self.config, self._fp8 * tokens, self._bf16 * tokens
        for ratio in c.layer_ratios:
            keys = float(c.sliding_window)
            if ratio == 4:
                keys += min(c.index_topk, tokens / 8)
                fp8 += 2 * tokens * (tokens / 8) * c.index_n_heads * c.index_head_dim
            elif ratio == 128:
                keys += tokens / 256
            bf16 += 4 * tokens * keys * c.num_attention_heads * c.head_dim / self._heads_divided
        return round(1e3 * (fp8 / FP8_RATE + bf16 / BF16_RATE), 4)


def _sums(config: DeepseekV4Config, specs: dict[str, WeightSpec]) -> tuple[float, float]:
    """Return the bytes of all weights except experts, and those of one expert of every layer."""

    def stored(spec: WeightSpec) -> float:
        if spec.storage == "fp8_block":
            return 1 + FP8_BLOCK_BYTES
        return FP4_BYTES if ".experts." in spec.name else 2 if spec.storage == "bf16" else 4

    others, experts = weight_sums(specs, stored)
    return others, experts / config.n_routed_experts


def weight_sums(
    specs: Mapping[str, WeightSpec], size: Callable[[WeightSpec], float] = lambda spec: 1.0
) -> tuple[float, float]:
    """The sizes of a rank's weights: of all that a step reads except experts, and of experts.
    `size` is the size of one value of a weight; by default, values are counted.
    """
    sums = {True: 0.0, False: 0.0}
    for name, spec in specs.items():
        if not name.endswith(LOOKED_UP):
            numel = torch.Size(spec.local_shape).numel()
            sums[".experts." in name] += numel * size(spec)
    return sums[False], sums[True]
