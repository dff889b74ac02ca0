"""The sources of a model's weights. Each rank opens its own stream of them.

Without `progress`, a source is plain data that can be sent to the ranks' processes.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import Progress
from finwhale.distributed.rank import Rank
from finwhale.models.protocol import ModelConfig
from finwhale.models.registry import architecture_of
from finwhale.weights.assembler import WeightStream
from finwhale.weights.dummy import DummySource
from finwhale.weights.source import WeightSource


class Weights(Protocol):
    """The weights of a model, not opened yet."""

    def open(self, device: torch.device, rank: Rank) -> WeightStream:
        """The stream of one rank's weights. Raises CheckpointError."""
        ...

    def without_progress(self) -> "Weights":
        """The same weights without progress reports, for another process."""
        ...

    def of(self, config: ModelConfig) -> "Weights":
        """The weights that another configuration of the same model needs."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointWeights:
    """The weights of a checkpoint.

    Attributes:
        progress: called with (bytes read, total bytes) while the weights load.
    """

    config: ModelConfig
    checkpoint: Checkpoint
    progress: Progress | None = None

    def open(self, device: torch.device, rank: Rank) -> WeightStream:
        architecture = architecture_of(self.config)
        return WeightSource(
            self.checkpoint,
            architecture.weight_specs(self.config, rank),
            ignored=architecture.ignored_prefixes(self.config),
            device=device,
            progress=self.progress,
        )

    def without_progress(self) -> "CheckpointWeights":
        return replace(self, progress=None)

    def of(self, config: ModelConfig) -> "CheckpointWeights":
        return replace(self, config=config)


@dataclass(frozen=True, slots=True)
class DummyWeights:
    """Random weights, generated on the device.

    Attributes:
        progress: called with (generated values, total values).
    """

    config: ModelConfig
    progress: Progress | None = None

    def open(self, device: torch.device, rank: Rank) -> WeightStream:
        specs = architecture_of(self.config).weight_specs(self.config, rank)
        return DummySource(specs, device, progress=self.progress)

    def without_progress(self) -> "DummyWeights":
        return replace(self, progress=None)

    def of(self, config: ModelConfig) -> "DummyWeights":
        return replace(self, config=config)
