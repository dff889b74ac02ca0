"""What the models of DeepSeek-V4 and V4.1 have in common."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from finwhale.distributed.collectives import Alone, Collectives
from finwhale.models.deepseek_config import DeepseekConfig
from finwhale.models.deepseek_v4.kernel_sizes import launch_sizes
from finwhale.models.deepseek_v4.streams import SideStreams
from finwhale.models.deepseek_v4.tensor_parallel import TensorParallel, vocabulary
from finwhale.models.rope import RotaryTables
from finwhale.models.sharding import rank_config
from finwhale.ops import Ops
from finwhale.ops.launch.sizes import ModelSizes

ALONE = Alone()


class DeepseekModel:
    """One rank of a model, on one device (protocol.Model has the contract).

    Args:
        config: the configuration of the whole model.
        weights: this rank's part of the weights.
        round_activations: round activations, cached kv and indexer inputs as the model was trained.
        max_positions: length of the longest sequence and of the rotary tables.
        collectives: adds and gathers the ranks' partial results.

    Attributes:
        part: the sizes of this rank's part.
        vocab_part: the token ids whose rows of the LM head this rank holds.
        sample: samples from the ranks' logits [M,X].
    """

    config: DeepseekConfig
    part: DeepseekConfig
    weights: Any

    def __init__(
        self,
        config: DeepseekConfig,
        ops: Ops,
        weights: Any,
        *,
        round_activations: bool,
        max_positions: int,
        collectives: Collectives = ALONE,
    ) -> None:
        self.config, self.ops, self.weights = config, ops, weights
        rank, device = collectives.rank, weights.embed.device
        self.part = rank_config(config, rank, round_activations=round_activations)
        self.ranks = TensorParallel(collectives, ops.mhc_of_terms)
        self.vocab_part, self.sample = vocabulary(ops, self.ranks, config.vocab_size)
        thetas = config.rope_theta, config.compress_rope_theta
        rope = config.qk_rope_head_dim, thetas, config.rope_scaling
        self.tables = RotaryTables(*rope, max_positions, device)
        self.side_streams = SideStreams(device, ops.capabilities.side_streams)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.weights.embed.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.weights.embed.dtype
        return dtype

    @property
    def launch_sizes(self) -> ModelSizes:
        """The sizes that this rank's launch signatures depend on."""
        sizes, rank = launch_sizes(self.part), self.ranks.rank
        if rank.data_parallel:
            return replace(sizes, num_lanes=rank.size)
        return replace(sizes, num_ranks=rank.size)

    def limit_positions(self, max_positions: int) -> None:
        self.tables.limit(max_positions)

    def without_collectives(self) -> AbstractContextManager[None]:
        return self.ranks.without_collectives()
