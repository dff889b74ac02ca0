"""Linear layers on Hopper: DeepGEMM for E4M3 weights with rounded inputs, otherwise our kernels.

Up to ROUNDED_TOKENS tokens, the kernels of `linear_triton.py` run: DeepGEMM does not split K, so a
weight with few rows would occupy only a part of the GPU. For more tokens, our kernel rounds the
input in DeepGEMM's layout. A token's bits do not depend on the other tokens. They depend on the
number of tokens only by its class: one (or two with an unscaled weight), up to ROUNDED_TOKENS, or
more.

With `LinearOptions.invariant`, the bits do not depend on the number of tokens at all: one token is
computed as two, and DeepGEMM runs every number of tokens. Up to ROUNDED_TOKENS rows, a short K uses
our tiles instead, without a split, which gives the same bits.

If `grouped_form` returns a RoundedInput, attention rounds the input of the grouped GEMM.

DeepGEMM compiles a kernel with nvcc at the first call of a shape, which takes 1 to 3 s.
"""

from functools import cache

import torch
from torch import Tensor

from finwhale.extras import named_extras
from finwhale.ops.launch.sizes import LaunchClasses, ModelSizes, last_of_classes
from finwhale.ops.linear import KERNEL_GROUP, LinearWeight, RoundedInput
from finwhale.ops.linear import linear_triton as kernels
from finwhale.ops.linear.linear_triton import DEFAULT, LinearOptions
from finwhale.ops.linear.quantise_triton import empty_quantised, quantise, swiglu_quantise
from finwhale.ops.moe import ExpertWeight

with named_extras():
    import deep_gemm  # type: ignore[import-not-found,unused-ignore]

MANY_TOKENS = 256
LARGE_TOKENS, LARGE_ROWS = 2048, 256


@cache
def _enable_early_launch() -> None:
    """Let DeepGEMM's kernels start before the previous kernel ends, which saves 1 us each.

    The first call creates a context of the GPU, so it must not run before the first GEMM.
    """
    deep_gemm.set_pdl(True)


def _supports(p: kernels.LinearProblem) -> bool:
    """Whether DeepGEMM supports a weight: scales, a rounded input, bfloat16 rows of 16 bytes."""
    even = p.weight.shape[1] % 8 == 0 and p.out_dtype == torch.bfloat16
    return p.scale is not None and p.round_input and even


def _runs_deepgemm(p: kernels.LinearProblem) -> bool:
    """Whether DeepGEMM runs a GEMM: with many tokens, or `invariant`, and a supported weight."""
    return (p.options.invariant or len(p.x) > kernels.ROUNDED_TOKENS) and _supports(p)


def rows_of(num_tokens: int) -> int:
    """Number of rows to pad to.

    With few rows, DeepGEMM is up to 40% slower with other numbers. With more than LARGE_TOKENS, it
    would need a kernel for every 64 rows. Captured steps of such sizes need no padding.
    """
    if num_tokens > LARGE_TOKENS:
        return -(-num_tokens // LARGE_ROWS) * LARGE_ROWS
    if num_tokens > MANY_TOKENS:
        return num_tokens
    return min(max(8, 1 << (num_tokens - 1).bit_length()), -(-num_tokens // 64) * 64)


def launch_tokens(model: ModelSizes, most: int) -> set[int]:
    """See LaunchClasses."""
    found = last_of_classes(rows_of, min(most, MANY_TOKENS + 1))
    return found | kernels.launch_tokens(model, most)


LAUNCH_CLASSES = LaunchClasses(tokens=launch_tokens)


def _gemm(
    x: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor, num_tokens: int, options: LinearOptions
) -> Tensor:
    """Run DeepGEMM on x [rows, K] and scales from `quantise`; bfloat16 [num_tokens, M]."""
    rows, width = x[0].shape
    if rows <= kernels.ROUNDED_TOKENS and width <= kernels.SHORT_STEPS * KERNEL_GROUP:
        return kernels.unsplit((x[0][:num_tokens], x[1][:num_tokens]), weight, scale, options)
    out = torch.empty((rows, weight.shape[0]), dtype=torch.bfloat16, device=weight.device)
    _enable_early_launch()
    deep_gemm.fp8_gemm_nt(x, (weight, scale), out, disable_ue8m0_cast=True)
    return out[:num_tokens]


def linear(x_NK: Tensor, w: LinearWeight, *, options: LinearOptions = DEFAULT) -> Tensor:
    num_tokens = x_NK.shape[0]
    if options.invariant and w.scale is not None and w.input_group:
        x_NK = kernels.two_or_more(x_NK)
    p = kernels.LinearProblem.of(x_NK.unsqueeze(1), w, options)
    if w.scale is None or not _runs_deepgemm(p):
        return kernels.run(p).squeeze(1)[:num_tokens]
    x = quantise(x_NK, num_rows=rows_of(len(x_NK)), early_launch=options.early_launch)
    return _gemm(x, w.weight, w.scale, len(x_NK), options)[:num_tokens]


def grouped_form(
    w: LinearWeight, head_dim: int, *, min_tokens: int = kernels.ROUNDED_TOKENS + 1
) -> RoundedInput | None:
    """The input is rounded if DeepGEMM supports the weight and a head is whole groups."""
    groups, rows, width = w.weight.shape
    even = rows % 8 == 0 and w.out_dtype in (None, torch.bfloat16)
    if w.scale is None or not w.input_group or not even or head_dim % KERNEL_GROUP:
        return None

    def empty(num_tokens: int) -> tuple[Tensor, Tensor]:
        """Allocate the tokens, followed by the GEMM's padding rows."""
        x, scales = empty_quantised(rows_of(num_tokens), groups, width, w.weight)
        return x[:num_tokens], scales.flatten(1)[:num_tokens]

    return RoundedInput(min_tokens, empty)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """x with the padding rows that `RoundedInput.empty` allocated after it."""
    return x.as_strided((rows, *x.shape[1:]), x.stride())


def grouped_linear(
    x_NGK: Tensor,
    w: LinearWeight,
    scales_NS: Tensor | None = None,
    *,
    options: LinearOptions = DEFAULT,
) -> Tensor:
    num_tokens, groups, _ = x_NGK.shape
    if options.invariant and w.scale is not None and w.input_group and scales_NS is None:
        x_NGK = kernels.two_or_more(x_NGK)
    p = kernels.LinearProblem.of(x_NGK, w, options)
    if w.scale is None or (scales_NS is None and not _runs_deepgemm(p)):
        return kernels.run(p)[:num_tokens]
    rows = rows_of(len(x_NGK))
    shape = (rows, groups, w.weight.shape[1])
    out = torch.empty(shape, dtype=torch.bfloat16, device=x_NGK.device)
    if scales_NS is None:
        x = quantise(x_NGK, num_rows=rows, early_launch=options.early_launch)
    else:
        x = _with_rows(x_NGK, rows), _with_rows(scales_NS, rows).unflatten(1, (groups, -1))
    _enable_early_launch()
    deep_gemm.fp8_einsum("bhr,hdr->bhd", x, (w.weight, w.scale), out)
    return out[:num_tokens]


def swiglu_mlp(
    x_ND: Tensor, w: ExpertWeight, limit: float, *, options: LinearOptions = DEFAULT
) -> Tensor:
    """Like linear_triton.swiglu_mlp, but rounds gate and up to bfloat16 if DeepGEMM runs."""
    num_tokens = x_ND.shape[0]
    if options.invariant and w.scale13 is not None and w.input_group:
        x_ND = kernels.two_or_more(x_ND)
    p = kernels.LinearProblem.gated(x_ND, w, limit, options)
    if w.scale13 is None or w.scale2 is None or not _runs_deepgemm(p):
        return kernels.swiglu_mlp(x_ND, w, limit, options=options)[:num_tokens]
    rows = rows_of(len(x_ND))
    early = options.early_launch
    rounded = quantise(x_ND, num_rows=rows, early_launch=early)
    gate_up = _gemm(rounded, w.w13, w.scale13, rows, options)
    hidden = swiglu_quantise(gate_up, limit, early_launch=early)
    return _gemm(hidden, w.w2, w.scale2, len(x_ND), options)[:num_tokens]
