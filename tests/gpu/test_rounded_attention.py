"""Attention that rounds its output for the grouped projection: bits of rounding it afterwards."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from tests.support import operator_checks as checks
from tests.support.op_case import CONFIGS, Chunks, ModelDraw
from tests.support.packing import padded
from tools.operators import ready
from torch import Tensor

from finwhale.ops import Ops, load_ops
from finwhale.ops.linear.quantise_triton import quantise
from finwhale.platform import Platform
from tools import operators as bench

pytest.importorskip("deep_gemm", reason="without DeepGEMM attention rounds nothing")


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def steps(count: int) -> list[Chunks]:
    """Decodes, or a prompt; for some numbers a mixed step too."""
    alone = bench.step(count, 8192) if count <= 128 else ((0, count),)
    return [alone, checks.mixed_step(count)] if count in (17, 1500) else [alone]


def check(ops: Ops, args: Any, w: Any) -> None:
    q, out = args[0], args[8]
    ops.sparse_attention(*args[:9])
    x_NGK = out.view(len(out), len(w.weight), -1)
    values, scales = quantise(x_NGK)
    wanted = ops.grouped_linear(x_NGK, w)
    form = ops.grouped_form(w, q.shape[2])
    assert form is not None and len(q) >= form.min_tokens
    rounded, rounded_scales = form.empty(len(q))
    rounded_args: Any = (*args[:8], rounded.view(q.shape), rounded_scales)
    ops.sparse_attention(*rounded_args)
    assert wanted.isfinite().all()
    assert same(rounded, values) and same(rounded_scales, scales.flatten(1))
    assert same(ops.grouped_linear(rounded, w, rounded_scales), wanted)


@pytest.mark.parametrize("kind", ["window", "C4", "C128"])
@pytest.mark.parametrize("config, ranks", [("flash", 1), ("flash", 2), ("flash", 8), ("pro", 1)])
@pytest.mark.parametrize("invariant", [False, True])
def test_rounding_in_attention_is_rounding_afterwards(
    config: str, ranks: int, kind: str, invariant: bool
) -> None:
    ops, draw = load_ops(Platform("nvidia", "sm90"), batch_invariant=invariant), ModelDraw("cuda")
    case = partial(checks.model_case, CONFIGS[config].of_rank(ranks), draw)
    grouped = case("grouped_linear", "wo_a", ())
    assert grouped.weight is not None
    w = ready(ops, grouped.weight())
    for count in (1, 17, 1500) if invariant else (17, 40, 128, 300, 1500):
        for chunks in steps(count):
            args = case("sparse_attention", kind, chunks).args()
            # Behind a decode, tokens that are none.
            check(
                ops, padded(args, checks.PAGED["sparse_attention"], 3) if count == 17 else args, w
            )
