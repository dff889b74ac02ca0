"""The tensors of a small checkpoint: all at once, or one."""

from pathlib import Path

from torch import Tensor

from finwhale.checkpoint.reader import Checkpoint


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor by official name, memory-mapped; writes to a tensor stay private."""
    checkpoint = Checkpoint.open(path)
    with checkpoint.reader() as reader:
        return {name: reader.read(name) for name in checkpoint.tensors}


def read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor by its official name, memory-mapped (copy on write)."""
    with checkpoint.reader() as reader:
        return reader.read(name)
