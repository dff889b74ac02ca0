"""Launches of the kernels with which the embedded model is trained (examples/train_demo)."""

import sys
from pathlib import Path

import torch

from .sm90_compile import meta

sys.path.append(str(Path(__file__).parents[2] / "examples/train_demo"))

import sinkhorn


def call_sinkhorn() -> None:
    x = meta(65536, 4, 4, dtype=torch.float32)
    sinkhorn._forward_kernel[(512,)](x, x, 65536, 39, 1e-6, BLOCK=128)
    sinkhorn._backward_kernel[(512,)](x, x, x, 65536, 39, 1e-6, BLOCK=128)


CALLS = {"sinkhorn": call_sinkhorn}
