"""Frees a rank's memory while the engine sleeps, and allocates it again."""

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from finwhale.engine.rank.weight_update import tensors_of

if TYPE_CHECKING:
    from finwhale.engine.rank.executor import LocalExecutor


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free memory.

    Attributes:
        tags: "weights", "cache" or both.
        keep: save the weights.
    """

    tags: tuple[str, ...]
    keep: bool

    def __call__(self, executor: "LocalExecutor") -> None:
        if "weights" in self.tags:
            for tensor in tensors_of(executor.runner.model.weights):
                vars(tensor).clear()  # forms that operators have derived from it
        for tag in self.tags:
            executor.arenas[tag].release(keep=self.keep and tag == "weights")
        gc.collect()
        if executor.runner.device.type == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class Wake:
    """Allocate the memory again."""

    tags: tuple[str, ...]

    def __call__(self, executor: "LocalExecutor") -> None:
        for tag in self.tags:
            executor.arenas[tag].restore()
        if "cache" in self.tags:
            for pages in executor.runner.cache.pages.values():
                pages.zero_()  # page 0, and rows that no step has written, must be finite
