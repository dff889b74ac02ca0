"""DeepSeek-V4.1's linear layers and shared expert as Triton kernels.

Weights are E4M3 with a scale for each block of 32x32. Kernels expand them to bfloat16
(expand_triton.py), keep rounded inputs as bfloat16, and multiply both with float32 sums over all of
K. Both are exact in bfloat16, and no scales follow.

1. V4's `row_kernel` processes one token. A program computes whole rows: it issues the loads of the
   weight, rounds the token and multiplies it by the scales while they run, and sums in float32
   without tensor cores.
2. Up to SPLIT_TOKENS, `round_kernel` rounds the tokens, `tile_kernel` multiplies parts of K, and
   `sum_kernel` adds the parts in order. A program loads most of its part of the weight into
   registers before it waits for the tokens.
3. With more tokens, `expand_kernel` writes the weight in bfloat16, and cuBLAS multiplies.

The kernels that compute or add gate and up apply the clamped SwiGLU. For more than one token, they
round the hidden values from float32, so the second layer does not round its input.

A token's bits do not depend on the other tokens, nor on their number within a class: 1; up to
SPLIT_TOKENS. With more tokens, cuBLAS chooses the order of a sum by their number. Weights without a
scale use V4's kernels (linear_triton.py).

Floors: the weight's bytes at 4.4 TB/s up to SPLIT_TOKENS tokens, such as 3.6 us for wq_b of one of
four ranks (15.7 MB); then 2 N M K operations at 790 TFLOP/s, such as 326 us for its 8,192 tokens.

Legend: N tokens, K input width, M output width, G groups, D hidden, I intermediate width.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from finwhale.ops.deepseek_v41.gemm_kernels_triton import (
    expand_kernel,
    round_kernel,
    sum_kernel,
    tile_kernel,
)
from finwhale.ops.launch import sizes as launch_sizes
from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.linear import LinearWeight, linear_triton
from finwhale.ops.linear.gemm_triton import row_kernel
from finwhale.ops.moe import ExpertWeight

GROUP = 32  # values of an input that share a scale, and the block of a weight
SPLIT_TOKENS = 64
# row_kernel: a program holds HELD_BYTES of the weight, at least MIN_ROWS rows, in chunks of
# CHUNK columns. A weight should occupy at least MIN_PROGRAMS programs.
HELD_BYTES = 32768
MIN_ROWS = 4
CHUNK = 1024
MIN_PROGRAMS = 384
# tile_kernel divides K into parts of chunks. A part has the first of these numbers that divides the
# number of chunks of K, or the first number if none divides it.
# K is not split if it has at most UNSPLIT_CHUNKS, and the weight at least MANY_ROWS.
PART_CHUNKS = (8, 9, 10)
UNSPLIT_CHUNKS = 20
MANY_ROWS = 12288
# Columns of a program.
ROUND_BLOCK = 1024
EXPAND_BLOCK = 256


@dataclass(frozen=True, slots=True)
class GemmOptions(linear_triton.LinearOptions):
    """A table's options for the linear layers and experts. V4's kernels read the other ones.

    Attributes:
        early_launch, num_multiprocessors: see LinearOptions.
        inline_asm: expand weights with PTX of sm90.
    """

    inline_asm: bool = False


DEFAULT = GemmOptions()


@dataclass(frozen=True, slots=True)
class GemmProblem(linear_triton.LinearProblem):
    """A LinearProblem whose weight is E4M3, with scales [G, rows/32, K/32]."""

    scale: Tensor
    options: GemmOptions = DEFAULT

    def __post_init__(self) -> None:
        groups, rows, width = self.weight.shape
        if self.weight.dtype != torch.float8_e4m3fn or not self.weight.is_contiguous():
            raise ValueError(f"the weight must be contiguous E4M3, got {self.weight.dtype}")
        if width % GROUP or (self.M % GROUP and self.limit is not None):
            raise ValueError(f"a weight has whole groups of {GROUP} columns, got {width}")
        wanted, whole = (groups, -(-rows // GROUP), width // GROUP), groups == 1 or not rows % GROUP
        if self.scale.shape != wanted or not self.scale.is_contiguous() or not whole:
            raise ValueError(f"the scale must be contiguous {wanted}, got {self.scale.shape}")
        if self.x.stride(2) != 1 or self.x.shape[1:] != (groups, width):
            raise ValueError(
                f"an input {tuple(self.x.shape)} with strides {self.x.stride()} does not fit a "
                f"weight {tuple(self.weight.shape)}: its rows must be contiguous"
            )


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How `tile_kernel` divides a weight.

    Attributes:
        block_m: rows of a program.
        chunks: chunks of 64 columns of a part of K.
        held, ahead: chunks of the weight and of the tokens that are loaded ahead.
    """

    block_m: int
    chunks: int
    held: int
    ahead: int
    num_warps: int

    @staticmethod
    def of(p: GemmProblem) -> "TilePlan":
        """`chunks` does not depend on the number of tokens."""
        groups, rows, width = p.weight.shape
        all_chunks = triton.cdiv(width, 64)
        if groups * rows >= MANY_ROWS and all_chunks <= UNSPLIT_CHUNKS:
            return TilePlan(128, all_chunks, min(8, all_chunks), min(2, all_chunks), 8)
        even = (number for number in PART_CHUNKS if all_chunks % number == 0)
        chunks = next(even, min(PART_CHUNKS[0], all_chunks))
        held = 5 if p.x.shape[0] > 32 else 8  # three programs share a multiprocessor
        return TilePlan(64, chunks, min(held, chunks), min(2, chunks), 4)


def launch_tokens(model: launch_sizes.ModelSizes, most: int) -> set[int]:
    """See LaunchClasses."""
    rows = {1, SPLIT_TOKENS}
    rows |= launch_sizes.last_of_classes(linear_triton.tile_tokens, SPLIT_TOKENS + 1)
    found = {row // per_token for row in rows for per_token, _, _ in model.linears}
    # Weights without a scale use V4's kernels.
    return launch_sizes.up_to(most, found) | linear_triton.launch_tokens(model, most)


LAUNCH_CLASSES = launch_sizes.LaunchClasses(tokens=launch_tokens)


def round_input(x_NK: Tensor, options: GemmOptions = DEFAULT) -> Tensor:
    """x [N, K] of any float dtype with strided rows, rounded by groups of 32; bfloat16."""
    return _round(x_NK, None, options)


def _round(x: Tensor, limit: float | None, options: GemmOptions) -> Tensor:
    """Round x [N, K], or the SwiGLU of the halves of x [N, 2K] if `limit` is given."""
    num_tokens, width = x.shape
    if limit is not None:
        width //= 2
    y = torch.empty((num_tokens, width), dtype=torch.bfloat16, device=x.device)
    if num_tokens:
        # With many tokens, a next kernel that starts early only takes resources from this one.
        early = options.early_launch and num_tokens <= SPLIT_TOKENS
        round_kernel[(num_tokens, triton.cdiv(width, ROUND_BLOCK))](
            *(x, y, width, x.stride(0), limit or 0.0),
            GATED=limit is not None,
            BLOCK=ROUND_BLOCK,
            num_warps=4,
            **launch_options(early),
        )
    return y


def _chunk(width: int) -> int:
    """Columns of a chunk: chunks without a rest, if they are not too small."""
    divisor = width & -width
    return min(CHUNK, divisor if divisor >= CHUNK // 4 else triton.next_power_of_2(width))


def _run_row(p: GemmProblem) -> Tensor:
    """One token. Hidden values are float32, so that the next layer rounds them from there."""
    groups, rows, width = p.weight.shape
    gated = p.limit is not None
    out = p.empty(torch.float32 if gated else None)
    block_m = max(MIN_ROWS, HELD_BYTES // (width * rows // p.M))
    block_m = min(GROUP, 1 << block_m.bit_length() - 1)
    while block_m > 1 and groups * triton.cdiv(p.M, block_m) < MIN_PROGRAMS:
        block_m //= 2
    row_kernel[(triton.cdiv(p.M, block_m), groups)](
        *(p.x, p.weight, p.scale, out, p.M, 0, p.x.stride(1), p.limit or 0.0),
        K=width,
        TOKENS=1,
        SCALED=True,
        ROUND=p.round_input,
        GATED=gated,
        BLOCKS=1,
        BLOCK_M=block_m,
        BLOCK_K=_chunk(width),
        GROUP=GROUP,
        num_warps=4,
        **launch_options(p.options.early_launch),
    )
    return out


def _run_tiles(p: GemmProblem) -> Tensor:
    """Up to SPLIT_TOKENS tokens."""
    plan, gated, options = TilePlan.of(p), p.limit is not None, p.options
    (num_tokens, groups, width), rows = p.x.shape, p.weight.shape[1]
    x = _rounded(p)
    block_n = linear_triton.tile_tokens(num_tokens)
    split = triton.cdiv(width, plan.chunks * 64)
    out = p.empty(torch.bfloat16 if gated else None)
    target = out
    if split > 1 or gated:
        shape = (split, groups, rows, block_n)
        target = torch.empty(shape, dtype=torch.float32, device=p.x.device)
    tile_kernel[(triton.cdiv(rows, plan.block_m), split, groups)](
        *(x, p.weight.view(torch.uint8), p.scale, target, num_tokens, rows, width),
        *(x.stride(0), x.stride(1)),
        PARTS=target is not out,
        BLOCK_M=plan.block_m,
        BLOCK_N=block_n,
        CHUNKS=plan.chunks,
        HELD=plan.held,
        AHEAD=plan.ahead,
        MASK=width % (plan.chunks * 64) > 0,
        ASM=options.inline_asm,
        num_warps=plan.num_warps,
        **launch_options(options.early_launch),
    )
    if target is not out:
        columns, block_s = groups * p.M, min(16, block_n)
        sum_kernel[(triton.cdiv(columns, 32), triton.cdiv(num_tokens, block_s))](
            *(target, out, num_tokens, columns, block_n, target[0].numel(), p.limit or 0.0),
            PARTS=split,
            GATED=gated,
            BLOCK_N=block_s,
            num_warps=4,
            **launch_options(options.early_launch),
        )
    return out


def _rounded(p: GemmProblem) -> Tensor:
    return round_input(p.x.flatten(1), p.options).view(p.x.shape) if p.round_input else p.x


def _expand(p: GemmProblem) -> Tensor:
    """The weight in bfloat16."""
    groups, rows, width = p.weight.shape
    out = torch.empty(p.weight.shape, dtype=torch.bfloat16, device=p.x.device)
    expand_kernel[(triton.cdiv(width, EXPAND_BLOCK), triton.cdiv(groups * rows, 32))](
        *(p.weight.view(torch.uint8), p.scale, out, groups * rows, width),
        BLOCK=EXPAND_BLOCK,
        ASM=p.options.inline_asm,
        num_warps=4,
        **launch_options(p.options.early_launch),
    )
    return out


def _run_library(p: GemmProblem) -> Tensor:
    """Many tokens: torch multiplies by the expanded weight."""
    x, weight = _rounded(p).to(torch.bfloat16), _expand(p)
    (num_tokens, groups, _), rows = x.shape, weight.shape[1]
    dtype = p.out_dtype if p.limit is None else torch.float32
    out = torch.empty((num_tokens, groups, rows), dtype=dtype, device=x.device)
    for g in range(groups):
        _multiply(x[:, g], weight[g].T, out[:, g])
    return out if p.limit is None else _round(out.flatten(1), p.limit, p.options).unsqueeze(1)


def _multiply(x_NK: Tensor, weight_KM: Tensor, out_NM: Tensor) -> None:
    """bfloat16 factors; float32 sums, whatever dtype `out_NM` has."""
    if out_NM.dtype == torch.bfloat16:
        torch.mm(x_NK, weight_KM, out=out_NM)
    elif x_NK.device.type == "cuda":
        torch.mm(x_NK, weight_KM, out_dtype=out_NM.dtype, out=out_NM)
    else:
        torch.mm(x_NK.float(), weight_KM.float(), out=out_NM)


def run(p: GemmProblem) -> Tensor:
    """Run the kernels for this number of tokens; returns [N, G, M]."""
    num_tokens = p.x.shape[0]
    if num_tokens == 0:
        return p.empty()
    if num_tokens == 1:
        return _run_row(p)
    return _run_tiles(p) if num_tokens <= SPLIT_TOKENS else _run_library(p)


def prepare(w: linear_triton.Weight) -> linear_triton.Weight:
    """Raise ValueError if these kernels cannot read the weight."""
    return linear_triton.prepare(w, group=GROUP)


def _linear(x_NGK: Tensor, w: LinearWeight, options: GemmOptions) -> Tensor:
    if w.scale is not None:
        return run(GemmProblem.of(x_NGK, w, options))
    if w.input_group:
        x_NGK = round_input(x_NGK.flatten(1), options).view(x_NGK.shape)
    plain = LinearWeight(w.weight, out_dtype=w.out_dtype)
    return linear_triton.grouped_linear(x_NGK, plain, options=options)


def linear(x_NK: Tensor, w: LinearWeight, *, options: GemmOptions = DEFAULT) -> Tensor:
    """x [N, K] with strided rows -> [N, M]."""
    return _linear(x_NK.unsqueeze(1), w, options).squeeze(1)


def grouped_linear(
    x_NGK: Tensor,
    w: LinearWeight,
    scales_NS: Tensor | None = None,
    *,
    options: GemmOptions = DEFAULT,
) -> Tensor:
    """x [N, G, K] with strided tokens and groups, weight [G, M, K] -> [N, G, M]."""
    assert scales_NS is None, "this table's input is not rounded"
    return _linear(x_NGK, w, options)


def swiglu_mlp(
    x_ND: Tensor, w: ExpertWeight, limit: float, *, options: GemmOptions = DEFAULT
) -> Tensor:
    """x [N, D], w13 [2I, D], w2 [D, I], E4M3 with rounded inputs, or neither; returns [N, D]."""
    if w.scale13 is None or w.scale2 is None or not w.input_group:
        if w.scale13 is not None or w.input_group:
            raise ValueError("a shared expert has E4M3 weights and rounded inputs, or neither")
        return linear_triton.swiglu_mlp(x_ND, w, limit, options=options)
    hidden = run(GemmProblem.gated(x_ND, w, limit, options))
    # The hidden values of one token are not rounded yet.
    group = GROUP if len(x_ND) == 1 else 0
    return _linear(hidden, LinearWeight(w.w2, group, w.scale2, x_ND.dtype), options).squeeze(1)
