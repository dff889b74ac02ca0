"""DeepSeek-V4.1's linear layers and shared expert as Triton kernels.

Weights are E4M3 with a scale for each block of 32x32. Kernels expand them to bfloat16 in registers
(expand_triton.py), keep rounded inputs as bfloat16, and multiply both on tensor cores, with
float32 sums over all of K. No scales follow.

1. `_row_kernel` processes one token. A program computes whole rows: it issues the loads of the
   weight, rounds the token and multiplies it by the scales while they run, and sums in float32
   without tensor cores.
2. `_tile_kernel` processes more tokens. Up to SPLIT_TOKENS, K is split into parts, which
   `_sum_kernel` adds in order. Up to ROUNDED_TOKENS, a program rounds its tokens itself; for more,
   `_round_kernel` rounds them before.

The kernels that compute gate and up apply the clamped SwiGLU. Those that see all of K and 32 rows
round the hidden values from float32, so the second layer does not round its input.

A token's bits do not depend on the other tokens, nor on their number within a class: 1; up to
SPLIT_TOKENS; more. Weights without a scale use V4's kernels (linear_triton.py).

Floors: the weight's bytes at 4.0 TB/s up to SPLIT_TOKENS tokens, such as 4 us for wq_b of one of
four ranks (15.7 MB); then 2 N M K operations at 790 TFLOP/s, such as 326 us for its 8,192 tokens.

Legend: N tokens, K input width, M output width, G groups, D hidden, I intermediate width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.deepseek_v41.expand_triton import (
    expand_e4m3,
    factor_of,
    round_columns,
)
from finwhale.ops.launch import sizes as launch_sizes
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.linear import LinearWeight, linear_triton
from finwhale.ops.linear.gemm_triton import dot_rows, load_rows
from finwhale.ops.linear.quantise_triton import clamped_swiglu, round_e4m3
from finwhale.ops.moe import ExpertWeight

GROUP = 32  # values of an input that share a scale, and the block of a weight
SPLIT_TOKENS = 64
ROUNDED_TOKENS = 16
# _row_kernel: a program holds HELD_BYTES of the weight, at least MIN_ROWS rows, in chunks of
# CHUNK columns. A weight should occupy at least MIN_PROGRAMS programs.
HELD_BYTES = 32768
MIN_ROWS = 4
CHUNK = 1024
MIN_PROGRAMS = 256
# _tile_kernel: up to SPLIT_TOKENS, a part has at least MIN_STEPS steps. Up to FEW_BLOCKS, tiles are
# smaller, so that there are more.
PROGRAMS = 2  # of a split weight, on each multiprocessor
ROUND_BLOCK = 1024
EXPAND_BLOCK = 256
BY_ROWS = True


@dataclass(frozen=True, slots=True)
class GemmOptions:
    """A table's options for the linear layers and experts.

    Attributes:
        early_launch: launch kernels early (`launch_options`).
        inline_asm: expand weights with PTX of sm90.
        num_multiprocessors: number in the GPU; work is split over its programs.
    """

    early_launch: bool = False
    inline_asm: bool = False
    num_multiprocessors: int = launch_sizes.NUM_MULTIPROCESSORS


DEFAULT = GemmOptions()


# --- Kernels --------------------------------------------------------------------------------------


@triton.jit
def _round_kernel(
    x_ptr,
    y_ptr,
    K,
    stride_x,
    limit,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[n] = x[n] rounded to E4M3 by groups of 32, as bfloat16; a program has BLOCK columns.

    GATED: round the SwiGLU of x's halves.
    """
    start_next(PDL)
    wait_for_last(PDL)
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = x_ptr + token * stride_x + k
    x = tl.load(source, mask=k < K, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + K, mask=k < K, other=0.0).to(tl.float32)
        x = clamped_swiglu(x, up, limit)
    y = round_columns(x[None, :], 1, BLOCK).to(tl.bfloat16)
    tl.store(y_ptr + token * K + k[None, :], y, mask=(k < K)[None, :])


@triton.jit
def _expand_kernel(
    weight_ptr,
    scale_ptr,
    out_ptr,
    M,
    K,
    BLOCK: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Expand 32 rows and BLOCK columns of the weight (bytes) [M, K] to bfloat16."""
    start_next(PDL)
    row = tl.program_id(1) * 32 + tl.arange(0, 32)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < M)[:, None] & (k < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    weight = tl.load(weight_ptr + at, mask=mask, other=0)
    group = tl.program_id(0) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    scales = scale_ptr + tl.program_id(1).to(tl.int64) * (K // 32) + group
    scale = tl.load(scales, mask=group * 32 < K, other=1.0)
    exponent = scale.to(tl.int32, bitcast=True) >> 23 & 0xFF
    factor = tl.broadcast_to(factor_of(exponent, 120, ASM)[:, None], [BLOCK // 32, 32])
    factor = tl.broadcast_to(tl.reshape(factor, [BLOCK])[None, :], [32, BLOCK])
    wait_for_last(PDL)
    tl.store(out_ptr + at, expand_e4m3(weight, factor, ASM), mask=mask)


@triton.jit
def _load_scales(source, K: tl.constexpr, CHUNK: tl.constexpr):
    """The scales of a row of the weight's blocks, in chunks of CHUNK columns."""
    group = tl.arange(0, CHUNK // 32)
    chunks = ()
    for i in tl.static_range((K + CHUNK - 1) // CHUNK):
        column = i * (CHUNK // 32) + group
        chunks = chunks + (tl.load(source + column, mask=column * 32 < K, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def _load_token(source, scales, K: tl.constexpr, CHUNK: tl.constexpr, ROUND: tl.constexpr):
    """A token in chunks of CHUNK values, rounded, times `scales`."""
    k = tl.arange(0, CHUNK)
    chunks = ()
    for i in tl.static_range((K + CHUNK - 1) // CHUNK):
        x = tl.load(source + i * CHUNK + k, mask=i * CHUNK + k < K, other=0.0).to(tl.float32)
        x = tl.reshape(x, [CHUNK // 32, 32])
        if ROUND:
            values, scale = round_e4m3(x, 1)
            x = values.to(tl.float32) * scale[:, None]
        chunks = chunks + (tl.reshape(x * scales[i][:, None], [CHUNK]),)  # type: ignore[assignment]  # noqa: RUF005
    return chunks


@triton.jit
def _row_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    M,
    stride_xg,
    limit,
    K: tl.constexpr,
    ROUND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[g, m] of one token for BLOCK_M rows m, which are within a block of 32.

    GATED: the SwiGLU of gate rows m and up rows M + m.
    """
    start_next(PDL)
    first = tl.program_id(0) * BLOCK_M
    g = tl.program_id(1)
    HALVES: tl.constexpr = 2 if GATED else 1
    CHUNKS: tl.constexpr = (K + CHUNK - 1) // CHUNK
    columns: tl.constexpr = K // 32
    base = weight_ptr + tl.cast(g * HALVES, tl.int64) * M * K
    row = first + tl.arange(0, BLOCK_M)
    gate = load_rows(base, row, M, K, CHUNK)
    if GATED:
        up = load_rows(base + tl.cast(M, tl.int64) * K, row, M, K, CHUNK)
    # The scales come from memory, too: later, their loads would wait behind other programs' rows.
    at = scale_ptr + (g * HALVES * (M // 32) + first // 32) * columns
    scales = _load_scales(at, K, CHUNK)
    if GATED:
        scales_up = _load_scales(at + M // 32 * columns, K, CHUNK)
    wait_for_last(PDL)
    source = x_ptr + g * stride_xg
    total = dot_rows(gate, _load_token(source, scales, K, CHUNK, ROUND), 0, CHUNKS)
    if GATED:
        tokens = _load_token(source, scales_up, K, CHUNK, ROUND)
        total = clamped_swiglu(total, dot_rows(up, tokens, 0, CHUNKS), limit)
    tl.store(out_ptr + g * M + row, total.to(out_ptr.dtype.element_ty), mask=row < M)


@triton.jit
def _load_chunk(rows, at, end, MASK: tl.constexpr, POLICY: tl.constexpr):
    """64 columns from `at` on; with MASK, 0 from `end` on."""
    k = tl.arange(0, 64)
    source = rows[:, None] + (at + k)[None, :]
    if MASK:
        return tl.load(source, mask=(at + k < end)[None, :], other=0, eviction_policy=POLICY)
    else:
        return tl.load(source, eviction_policy=POLICY)


@triton.jit
def _load_pair(scales, at, last, MASK: tl.constexpr):
    """The two scales of each row for 64 columns."""
    low, high = at // 32, at // 32 + 1
    if MASK:
        # Columns past the last group have no weights, so any scale will do.
        low, high = tl.minimum(low, last), tl.minimum(high, last)
    return tl.load(scales + low), tl.load(scales + high)


@triton.jit(do_not_specialize=["N"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    N,
    M,
    K,
    stride_xn,
    stride_xg,
    ROUND: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    HELD: tl.constexpr,
    AHEAD: tl.constexpr,
    MASK: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_M rows of the weight (bytes) with all tokens, over CHUNKS * 64 columns.

    PARTS: write float32 parts [split, G, M, BLOCK_N]; otherwise out [N, G, M]. HELD, AHEAD: chunks
    of the weight and of the tokens that are loaded ahead. MASK: the last part has less columns.

    A thread loads 16 adjacent columns of a row, four of each product of 16 columns. So the columns
    of a product are not adjacent, and the tokens' columns follow; likewise the rows of a tile.
    """
    start_next(PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Rows and tokens past the last are copies of it, which are not stored.
    used_row = tl.minimum(row, M - 1)
    part = tl.program_id(1)
    g = tl.program_id(2)
    first = part * CHUNKS * 64
    weights = weight_ptr + (g.to(tl.int64) * M + used_row) * K
    scales = scale_ptr + (g * (M // 32) + used_row // 32) * (K // 32)
    last = K // 32 - 1
    held = ()
    pairs = ()
    for i in tl.static_range(HELD):
        held = held + (_load_chunk(weights, first + i * 64, K, MASK, "evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
    for i in tl.static_range(HELD):
        pairs = pairs + (_load_pair(scales, first + i * 64, last, MASK),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_last(PDL)
    token = tl.arange(0, BLOCK_N)
    tokens = x_ptr + (tl.minimum(token, N - 1).to(tl.int64) * stride_xn + g * stride_xg)
    xs = ()
    for i in tl.static_range(AHEAD):
        xs = xs + (_load_chunk(tokens, first + i * 64, K, MASK, ""),)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.static_range(CHUNKS):
        if i + AHEAD < CHUNKS:
            xs = xs + (_load_chunk(tokens, first + (i + AHEAD) * 64, K, MASK, ""),)  # type: ignore[assignment]  # noqa: RUF005
        total = _add_product(total, held[i], pairs[i], xs[i], ROUND, ASM)
        if i + HELD < CHUNKS:
            at = first + (i + HELD) * 64
            held = held + (_load_chunk(weights, at, K, MASK, "evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
            pairs = pairs + (_load_pair(scales, at, last, MASK),)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.permute(tl.reshape(total, [BLOCK_M // 16, 2, 8, BLOCK_N]), (1, 0, 2, 3))
    total = tl.reshape(total, [BLOCK_M, BLOCK_N])
    if PARTS:
        line = ((part * tl.num_programs(2) + g).to(tl.int64) * M + row) * BLOCK_N
        tl.store(out_ptr + line[:, None] + token[None, :], total, mask=(row < M)[:, None])
    else:
        line = (token.to(tl.int64) * tl.num_programs(2) + g) * M
        mask = (row < M)[:, None] & (token < N)[None, :]
        value = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + line[None, :] + row[:, None], value, mask=mask)


@triton.jit
def _add_product(total, weight, pair, x, ROUND: tl.constexpr, ASM: tl.constexpr):
    """total [rows,tokens] + 64 columns of the weight times the tokens x [tokens,64]."""
    low, high = pair
    ROWS: tl.constexpr = total.shape[0]
    TOKENS: tl.constexpr = total.shape[1]
    if ROUND:
        x = round_columns(x.to(tl.float32), TOKENS, 64)
    x = tl.permute(tl.reshape(x.to(tl.bfloat16), [TOKENS, 4, 4, 2, 2]), (0, 2, 3, 1, 4))
    scale = tl.where((tl.arange(0, 64) < 32)[None, :], low[:, None], high[:, None])
    exponent = scale.to(tl.int32, bitcast=True) >> 23 & 0xFF
    w = expand_e4m3(weight, factor_of(exponent, 120, ASM), ASM)
    w = tl.permute(tl.reshape(w, [2, ROWS // 16, 8, 4, 4, 2, 2]), (1, 0, 2, 4, 5, 3, 6))
    return tl.dot(tl.reshape(w, [ROWS, 64]), tl.trans(tl.reshape(x, [TOKENS, 64])), total)


@triton.jit(do_not_specialize=["N"])
def _sum_kernel(
    parts_ptr,
    out_ptr,
    N,
    M,
    padded,
    size,
    limit,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add float32 parts [PARTS, M or 2M, padded], each of `size` values: 32 columns of out [N, M].

    GATED: write the rounded SwiGLU of the two halves of the rows.
    """
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0) * 32 + tl.arange(0, 32)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < M)[:, None] & (token < N)[None, :]
    source = parts_ptr + row.to(tl.int64)[:, None] * padded + token[None, :]
    total = tl.zeros([32, BLOCK_N], tl.float32)
    total_up = tl.zeros([32, BLOCK_N], tl.float32)
    up = (tl.zeros([], tl.int64) + M) * padded
    for _ in tl.static_range(PARTS):
        total += tl.load(source, mask=mask, other=0.0)
        if GATED:
            total_up += tl.load(source + up, mask=mask, other=0.0)
        source += size
    if GATED:
        values, scale = round_e4m3(clamped_swiglu(total, total_up, limit), 0)
        total = values.to(tl.float32) * scale[None, :]
    target = out_ptr + token.to(tl.int64)[None, :] * M + row[:, None]
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)


# --- Launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """out[n, g] = x[n, g] @ weight[g]^T, or the SwiGLU of its two halves if `limit` is given.

    Attributes:
        x: [N, G, K]; the values of a row are contiguous.
        weight: E4M3 [G, M, K], or [G, 2M, K] if gated, contiguous.
        scale: float32 [G, rows/32, K/32], contiguous.
        rounds: whether x is rounded here.
    """

    x: Tensor
    weight: Tensor
    scale: Tensor
    rounds: bool
    out_dtype: torch.dtype
    limit: float | None
    options: GemmOptions

    def __post_init__(self) -> None:
        groups, rows, width = self.weight.shape
        if self.weight.dtype != torch.float8_e4m3fn or not self.weight.is_contiguous():
            raise ValueError(f"the weight must be contiguous E4M3, got {self.weight.dtype}")
        if width % GROUP or (self.M % GROUP and self.limit is not None):
            raise ValueError(f"a weight has whole groups of {GROUP} columns, got {width}")
        wanted = (groups, -(-rows // GROUP), width // GROUP)
        if (
            self.scale.shape != wanted
            or not self.scale.is_contiguous()
            or (groups > 1 and rows % GROUP)
        ):
            raise ValueError(f"the scale must be contiguous {wanted}, got {self.scale.shape}")
        if self.x.stride(2) != 1 or self.x.shape[1:] != (groups, width):
            raise ValueError(
                f"an input {tuple(self.x.shape)} with strides {self.x.stride()} does not fit a "
                f"weight {tuple(self.weight.shape)}: its rows must be contiguous"
            )

    @property
    def M(self) -> int:
        rows = self.weight.shape[1]
        return rows if self.limit is None else rows // 2

    def empty(self, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate the output [N, G, M]."""
        shape = (*self.x.shape[:2], self.M)
        return torch.empty(shape, dtype=dtype or self.out_dtype, device=self.x.device)


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How `_tile_kernel` divides a weight.

    Attributes:
        block_m: rows of a program.
        chunks: chunks of 64 columns of a part of K.
        held, ahead: chunks of the weight and of the tokens that are loaded ahead.
    """

    block_m: int
    chunks: int
    held: int
    num_warps: int
    ahead: int = 2
    rounded: int = 16
    maxnreg: int | None = None

    @staticmethod
    def of(p: GemmProblem) -> "TilePlan":
        """`chunks` does not depend on the number of tokens."""
        groups, rows, width = p.weight.shape
        chunks = triton.cdiv(width, 64)
        tiles = groups * triton.cdiv(rows, 64)
        split = max(1, min(PROGRAMS * p.options.num_multiprocessors // tiles, chunks // 8))
        chunks = triton.cdiv(chunks, split)
        return TilePlan(64, chunks, min(8, chunks), 4)


def tile_tokens(num_tokens: int) -> int:
    """Number of tokens of a tile, up to SPLIT_TOKENS."""
    return min(64, max(16, triton.next_power_of_2(num_tokens)))


def launch_tokens(model: launch_sizes.ModelSizes, most: int) -> set[int]:
    """See LaunchClasses."""
    rows = {1, ROUNDED_TOKENS, SPLIT_TOKENS}
    rows |= launch_sizes.last_of_classes(tile_tokens, SPLIT_TOKENS + 1)
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
        _round_kernel[(num_tokens, triton.cdiv(width, ROUND_BLOCK))](
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
    _row_kernel[(triton.cdiv(p.M, block_m), groups)](
        *(p.x, p.weight, p.scale, out, p.M, p.x.stride(1), p.limit or 0.0),
        K=width,
        ROUND=p.rounds,
        GATED=gated,
        BLOCK_M=block_m,
        CHUNK=_chunk(width),
        num_warps=8 if block_m * width * rows // p.M >= HELD_BYTES // 2 else 4,
        **launch_options(p.options.early_launch),
    )
    return out


def _run_tiles(p: GemmProblem) -> Tensor:
    """Up to SPLIT_TOKENS tokens."""
    plan, gated, options = TilePlan.of(p), p.limit is not None, p.options
    (num_tokens, groups, width), rows = p.x.shape, p.weight.shape[1]
    if p.rounds and num_tokens > plan.rounded:
        p = replace(p, x=round_input(p.x.flatten(1), p.options).view(p.x.shape), rounds=False)
    block_n = tile_tokens(num_tokens)
    split = triton.cdiv(width, plan.chunks * 64)
    out = p.empty(torch.bfloat16 if gated else None)
    target = out
    if split > 1 or gated:
        shape = (split, groups, rows, block_n)
        target = torch.empty(shape, dtype=torch.float32, device=p.x.device)
    _tile_kernel[(triton.cdiv(rows, plan.block_m), split, groups)](
        *(p.x, p.weight.view(torch.uint8), p.scale, target, num_tokens, rows, width),
        *(p.x.stride(0), p.x.stride(1)),
        ROUND=p.rounds,
        PARTS=target is not out,
        BLOCK_M=plan.block_m,
        BLOCK_N=block_n,
        CHUNKS=plan.chunks,
        HELD=min(plan.held, plan.chunks),
        AHEAD=min(plan.ahead, plan.chunks),
        MASK=width % (plan.chunks * 64) > 0,
        ASM=options.inline_asm,
        num_warps=plan.num_warps,
        maxnreg=plan.maxnreg,
        **launch_options(options.early_launch),
    )
    if target is not out:
        columns, block_s = groups * p.M, min(16, block_n)
        _sum_kernel[(triton.cdiv(columns, 32), triton.cdiv(num_tokens, block_s))](
            *(target, out, num_tokens, columns, block_n, target[0].numel(), p.limit or 0.0),
            PARTS=split,
            GATED=gated,
            BLOCK_N=block_s,
            num_warps=4,
            **launch_options(options.early_launch),
        )
    return out


def _expand(p: GemmProblem) -> Tensor:
    """The weight in bfloat16."""
    groups, rows, width = p.weight.shape
    out = torch.empty(p.weight.shape, dtype=torch.bfloat16, device=p.x.device)
    _expand_kernel[(triton.cdiv(width, EXPAND_BLOCK), triton.cdiv(groups * rows, 32))](
        *(p.weight.view(torch.uint8), p.scale, out, groups * rows, width),
        BLOCK=EXPAND_BLOCK,
        ASM=p.options.inline_asm,
        num_warps=4,
        **launch_options(p.options.early_launch),
    )
    return out


def _run_library(p: GemmProblem) -> Tensor:
    """Many tokens: torch multiplies by the expanded weight."""
    x, weight = p.x, _expand(p)
    if p.rounds:
        x = round_input(x.flatten(1), p.options).view(x.shape)
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
    if num_tokens == 1 and BY_ROWS:
        return _run_row(p)
    return _run_tiles(p) if num_tokens <= SPLIT_TOKENS else _run_library(p)


def prepare(w: linear_triton.Weight) -> linear_triton.Weight:
    """Raise ValueError if these kernels cannot read the weight."""
    weight = w.weight if isinstance(w, LinearWeight) else w.w13
    in_blocks = weight.dtype == torch.float8_e4m3fn
    if w.input_group not in (0, GROUP) or (in_blocks and w.scale_block != GROUP):
        raise ValueError(
            f"these kernels round inputs in groups of {GROUP} and read blocks of {GROUP}, got "
            f"{w.input_group} and {w.scale_block}"
        )
    return w


def _linear(x_NGK: Tensor, w: LinearWeight, options: GemmOptions) -> Tensor:
    weight, scale = w.weight, w.scale
    if weight.dim() == 2:
        weight, scale = weight[None], None if scale is None else scale[None]
    if scale is not None:
        dtype = w.out_dtype or torch.bfloat16
        return run(GemmProblem(x_NGK, weight, scale, w.input_group > 0, dtype, None, options))
    if w.input_group:
        x_NGK = round_input(x_NGK.flatten(1), options).view(x_NGK.shape)
    how = linear_triton.LinearOptions(
        early_launch=options.early_launch, num_multiprocessors=options.num_multiprocessors
    )
    plain = LinearWeight(weight, out_dtype=w.out_dtype)
    return linear_triton.grouped_linear(x_NGK, plain, options=how)


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
        how = linear_triton.LinearOptions(early_launch=options.early_launch)
        return linear_triton.swiglu_mlp(x_ND, w, limit, options=how)
    given = w.w13[None], w.scale13[None], True, x_ND.dtype, limit, options
    hidden = run(GemmProblem(x_ND.unsqueeze(1), *given))
    # _row_kernel's hidden values are not rounded yet.
    rounds = len(x_ND) == 1 and BY_ROWS
    return run(
        GemmProblem(hidden, w.w2[None], w.scale2[None], rounds, x_ND.dtype, None, options)
    ).squeeze(1)
