"""The source of a model's weights. Each rank opens its own stream of them."""

from dataclasses import dataclass

import torch

from finwhale.checkpoint.reader import Checkpoint
from finwhale.checkpoint.spec import Progress
from finwhale.distributed.rank import Rank
from finwhale.models.protocol import ModelConfig
from finwhale.models.registry import architecture_of
from finwhale.weights.assembler import WeightStream
from finwhale.weights.dummy import DummySource
from finwhale.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights, not opened yet.

    Without `progress`, they are plain data that can be sent to the ranks' processes.

    Attributes:
        checkpoint: the files; None: random weights, generated on the device.
        progress: called with (bytes read, total bytes) while the weights load; for random weights,
            with (generated values, total values).
    """

    config: ModelConfig
    checkpoint: Checkpoint | None = None
    progress: Progress | None = None

    def open(self, device: torch.device, rank: Rank) -> WeightStream:
        """The stream of one rank's weights. Raises CheckpointError."""
        architecture = architecture_of(self.config)
        specs = architecture.weight_specs(self.config, rank)
        if self.checkpoint is None:
            return DummySource(specs, device, progress=self.progress)
        ignored = architecture.ignored_prefixes(self.config)
        return WeightSource(
            self.checkpoint, specs, ignored=ignored, device=device, progress=self.progress
        )
