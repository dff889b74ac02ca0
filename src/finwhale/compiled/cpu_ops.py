"""The operators that are traced on a CPU: their definitions, whose loops inductor fuses.

A small GEMM becomes a sum of products: torch would divide even a small GEMM between threads, and
wait for them. GEMMs with packed weights stay custom operators.

Legend as in the operator families' packages.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from finwhale.ops import Ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe.ref import clamped_swiglu
from finwhale.ops.rounding import round_e4m3
from finwhale.ops.tables.reference import OPS as DEFINITIONS

FUSED = ("mhc_pre", "mhc_post_pre", "prepare_qkv", "route_by_score", "route_by_hash")


def traced(registered: Ops) -> Ops:
    """The operator table for tracing on a CPU.

    Args:
        registered: the CPU's table, with custom operators.
    """

    def rounded(x: Tensor, w: LinearWeight | ExpertWeight) -> Tensor:
        return round_e4m3(x, w.input_group) if w.input_group else x

    def linear(x_NK: Tensor, w: LinearWeight) -> Tensor:
        return registered.linear(rounded(x_NK, w), replace(w, input_group=0))

    def grouped_linear(x_NGK: Tensor, w: LinearWeight, scales_NS: Tensor | None = None) -> Tensor:
        assert scales_NS is None, "a graph's input is not rounded"
        return registered.grouped_linear(rounded(x_NGK, w), replace(w, input_group=0))

    def swiglu_mlp(x_ND: Tensor, w: ExpertWeight, limit: float) -> Tensor:
        gate_up = registered.linear(rounded(x_ND, w), LinearWeight(w.w13))
        return registered.linear(rounded(clamped_swiglu(gate_up, limit), w), LinearWeight(w.w2))

    fused: dict[str, Any] = {name: _with_sums(getattr(DEFINITIONS, name)) for name in FUSED}
    return replace(
        registered, linear=linear, grouped_linear=grouped_linear, swiglu_mlp=swiglu_mlp, **fused
    )


def _with_sums(definition: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(definition)
    def run(*args: Any, **named: Any) -> Any:
        with _Sums():
            return definition(*args, **named)

    return run


class _Sums(TorchFunctionMode):
    """Within it, a GEMM is a sum of products."""

    def __torch_function__(
        self, fn: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return SUMS.get(fn, fn)(*args, **(kwargs or {}))


def _bmm(x_BNK: Tensor, y_BKM: Tensor) -> Tensor:
    return (x_BNK[..., None] * y_BKM[:, None]).sum(2)


def _baddbmm(z_BNM: Tensor, x_BNK: Tensor, y_BKM: Tensor, *, beta: float) -> Tensor:
    return beta * z_BNM + _bmm(x_BNK, y_BKM)


def _linear(x_NK: Tensor, weight_MK: Tensor) -> Tensor:
    return (x_NK[:, None] * weight_MK).sum(-1)


SUMS: dict[Any, Callable[..., Any]] = {torch.bmm: _bmm, torch.baddbmm: _baddbmm, F.linear: _linear}
