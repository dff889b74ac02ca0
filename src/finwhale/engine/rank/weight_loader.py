"""Loads the weights of one rank: at the start, and again for each update."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from finwhale.checkpoint.spec import Storage
from finwhale.distributed.rank import Rank
from finwhale.models.protocol import Architecture, ModelConfig
from finwhale.models.weight_protocol import WeightLoading
from finwhale.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoader:
    """The arguments with which this rank's weights are loaded.

    Attributes:
        model_config: the configuration of the whole model.
        storages: the stored format of each weight of the loaded checkpoint.
    """

    architecture: Architecture
    model_config: ModelConfig
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    rank: Rank
    round_activations: bool
    round_wo_a: bool
    storages: Mapping[str, Storage]

    def begin(self, device: torch.device) -> WeightLoading:
        """Begin to load the weights, or a copy of them, on a device."""
        return self.architecture.begin_loading(
            self.model_config,
            storages=self.storages,
            dtype=self.dtype,
            device=device,
            round_activations=self.round_activations,
            round_wo_a=self.round_wo_a,
            ops=self.ops,
            rank=self.rank,
        )
