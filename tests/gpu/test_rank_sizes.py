"""Attention with the heads of one of several ranks: 8 to 64, against the reference."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.support import operator_checks as checks
from tests.support.op_case import CONFIGS, ModelDraw

from finwhale.ops import load_ops
from finwhale.platform import Platform


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("config, size", [("flash", 2), ("flash", 4), ("flash", 8), ("pro", 4)])
def test_attention_of_a_rank(config: str, size: int, invariant: bool) -> None:
    """Kernels of Hopper; decodes, chunks, padding and far pages, plain and rounded output."""
    platform = Platform("nvidia", "sm90")
    ops = load_ops(platform, batch_invariant=invariant)
    reference = load_ops(Platform.detect(), reference=True)
    sizes = CONFIGS[config].of_rank(size)
    for at_step in checks.at_steps(sizes, ModelDraw("cuda"), "sparse_attention"):
        for verdict in checks.check_model_case(at_step, ops, reference, invariant=invariant):
            assert verdict.fault is None, verdict


@pytest.mark.parametrize("heads", [3, 8, 12, 16, 32])
def test_few_heads_are_some_of_64(heads: int) -> None:
    """The first heads of a token, alone and among 64, differ by the order of sums only."""
    ops, draw = load_ops(Platform("nvidia", "sm90")), ModelDraw("cuda")
    for kind in ("window", "C4", "C128"):
        for count in (1, 2, 17, 300):
            case = checks.model_case(
                CONFIGS["flash"], draw, "sparse_attention", kind, checks.mixed_step(count)
            )
            args: Any = case.args()
            out = args[8]
            ops.sparse_attention(*args)
            few = torch.full_like(out[:, :heads], torch.nan)
            few_args: Any = (args[0][:, :heads], *args[1:6], args[6][:heads], args[7], few)
            ops.sparse_attention(*few_args)
            wanted = out[:, :heads].float()
            assert (few.float() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
