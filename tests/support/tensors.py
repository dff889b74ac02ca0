"""The tensors of a small checkpoint, all at once."""

from pathlib import Path

from torch import Tensor

from finwhale.checkpoint.reader import Checkpoint


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor by official name, memory-mapped; writes to a tensor stay private."""
    checkpoint = Checkpoint.open(path)
    with checkpoint.reader() as reader:
        return {name: reader.read(name) for name in checkpoint.tensors}
