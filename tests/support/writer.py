"""The writer of unquantised weights, which is part of examples/train_demo."""

import sys
from pathlib import Path

EXAMPLE = str(Path(__file__).parents[2] / "examples/train_demo")
sys.path.append(EXAMPLE)

from checkpoint_writer import write_checkpoint  # noqa: E402

sys.path.remove(EXAMPLE)

__all__ = ["write_checkpoint"]
