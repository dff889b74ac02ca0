"""DeepSeek-V4.1's routed experts as Triton kernels: FP4 weights, inputs rounded by groups of 32.

`dispatch` orders the pairs as V4's does (ops/moe/dispatch_triton.py), and V4's `combine` adds them.
`compute` rounds x once a token, and has two GEMMs. Both expand weights to bfloat16 in registers
(expand_triton.py) and multiply them on tensor cores, with float32 sums over all of K. Their order
follows from K and a plan's columns, so a token's bits do not depend on N up to 20 pairs per expert,
and from there on. Gate and up gathers its tokens by the pairs' order, applies the clamped SwiGLU
and the routing weight, and rounds the hidden values by groups of 32. A program computes some rows
of the weights for one block of an expert's pairs, so each block reads the expert's weights once.
Blocks without pairs return at once, so the host need not know each expert's tokens.

Layout of the weights after `finish_experts`, in place. A tile has 64 rows: of w2, or 32 of w1 and
32 of w3, eight by eight. It is contiguous: for each group of 32 columns, 16 bytes for each row.
Word i of a group has the codes of columns 4 i to 4 i + 3 and 16 + 4 i to 16 + 4 i + 3, their bits
where the decoder needs them. So a program reads memory in order, a thread 16 bytes of one group,
and inputs keep their order: one product takes the first halves of the groups, and another the
second halves. Four exponents of a row are a word, and a tile has the words of its rows for each
four groups. If groups are left, the tile ends with their exponents, row by row. Tensor cores take
any exponent, but the decoder needs a scale of at most 2. An expert with a larger one keeps
exponents relative to it, and has a factor in `expert_scale`.

Floors: 3 I D 17/32 bytes for each expert that is hit, at 4.0 TB/s, such as 7 us for one token on
one of four ranks (I 576); then 6 I D operations a pair at 790 TFLOP/s, such as 1.1 ms for 8,192
tokens there.

Legend: N tokens, K experts per token, P rows in order of the experts, E experts, D hidden, I
intermediate width.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.deepseek_v41.expand_triton import (
    expand_e2m1,
    factor_of,
    swiglu_rows,
)
from finwhale.ops.deepseek_v41.gemm_triton import (
    DEFAULT,
    GROUP,
    SPLIT_TOKENS,
    GemmOptions,
    round_input,
)
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import LaunchClasses, ModelSizes, last_of_classes
from finwhale.ops.moe import Dispatched, ExpertWeight
from finwhale.ops.moe.dispatch_triton import OrderedPairs, launch_class, order_pairs

TILE = 64  # rows
AT_ONCE = 2**25  # values that `finish_experts` converts
MAX_EXPONENT = 128  # E8M0: the scale 2


# --- Weights --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupedExperts(ExpertWeight):
    """FP4 weights in the layout of this file.

    Attributes:
        expert_scale: float32 [E, 2]: factors of the results of w13 and of w2. They are 1 unless a
            weight has scales above 2.
    """

    expert_scale: Tensor | None = None


def finish_experts(w: ExpertWeight) -> GroupedExperts:
    """Convert the checkpoint's layout to that of this file, in place.

    Takes w13 uint8 [E,2I,D/2], scale13 uint8 [E,2I,D/32], w2 [E,D,I/2], scale2 [E,D,I/32], all
    contiguous, D a multiple of 64 and I of 32. The shapes do not change, and every value stays
    exact. (With scales above 2, those below the expert's largest by 2^128 are raised to that.)
    """
    matrices = (w.w13, w.scale13, True), (w.w2, w.scale2, False)
    factors = [_regroup(*matrix) for matrix in matrices]
    fields = w.w13, w.w2, w.input_group, w.scale13, w.scale2, w.scale_block
    return GroupedExperts(*fields, torch.stack(factors, 1))


def _regroup(w: Tensor, scale: Tensor | None, paired: bool) -> Tensor:
    """Convert one matrix of each expert. Returns their factors, float32 [E]."""
    rows, row_bytes = w.shape[1:]
    if w.dtype != torch.uint8 or scale is None or scale.dtype != torch.uint8:
        raise ValueError(f"weights must be FP4 with E8M0 scales, both as uint8, got {w.dtype}")
    if not (w.is_contiguous() and scale.is_contiguous()) or row_bytes % 16 or rows % TILE:
        raise ValueError(
            f"weights must be contiguous, with rows in whole tiles of {TILE} and columns in whole "
            f"groups of {GROUP}, got {tuple(w.shape)}"
        )
    if w.is_meta:
        return torch.empty(len(w), device=w.device)
    factors, groups = [], row_bytes // 16
    some = max(1, AT_ONCE // (rows * row_bytes * 2))
    for codes, exponents in zip(w.split(some), scale.split(some), strict=True):
        tiles = _tiles(codes, paired).unflatten(-1, (groups, 16))
        codes.copy_(_packed(tiles).transpose(2, 3).reshape(codes.shape))
        largest = exponents.flatten(1).amax(1)
        above = (largest.clamp(min=MAX_EXPONENT) - MAX_EXPONENT)[:, None, None]
        tiles = _tiles(exponents.clamp(min=above) - above, paired)
        whole = groups // 4 * 4
        quads = tiles[..., :whole].unflatten(-1, (-1, 4)).transpose(2, 3).flatten(2)
        parts = quads, tiles[..., whole:].flatten(2)
        exponents.copy_(torch.cat(parts, -1).view(exponents.shape))
        factor = torch.exp2(above.flatten().float())
        factors.append(factor.masked_fill_(largest == 255, torch.nan))  # as E8M0 defines it
    return torch.cat(factors)


def _packed(group: Tensor) -> Tensor:
    """Groups of 32 codes, uint8 [..,16], in the order of `expand_e2m1`; the same shape."""
    values = torch.stack((group & 15, group >> 4), -1).flatten(-2).to(torch.int16)
    # (half of the group, word, pair, half of the word)
    first, second = values.unflatten(-1, (2, 4, 2, 2)).unbind(-4)
    (a, b), (c, d) = first.unbind(-2), second.unbind(-2)
    word = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3 | (c & 8) << 6 | c & 7
    word |= (d & 6) << 12 | (d & 1) << 11 | (d & 8) << 7
    return word.flatten(-2).view(torch.uint8)


def _tiles(rows: Tensor, paired: bool) -> Tensor:
    """[E,R,X] -> [E,tiles,64,X]; of w13, eight rows of w1 and eight of w3 in turn."""
    if not paired:
        return rows.unflatten(1, (-1, TILE))
    halves = rows.unflatten(1, (2, -1, TILE // 16, 8))
    return halves.permute(0, 2, 3, 1, 4, 5).flatten(2, 4)


@triton.jit
def _exponents(words, c, QUADS: tl.constexpr):
    """The exponents [rows,c] of QUADS words, each of four groups of 16 columns of c."""
    chosen = words[0][:, None]
    for q in tl.static_range(1, QUADS):
        chosen = tl.where((c // 64 == q)[None, :], words[q][:, None], chosen)
    return (chosen >> (c // 16 % 4 * 8)[None, :]) & 0xFF


@triton.jit
def _product(
    rows,
    w,
    tile,
    last_tile,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """BLOCK_M rows of the weights, from `tile` on, times the rows of x: float32 [BLOCK_M,COLUMNS].

    Rows of a tile after the last are those of the last.

    rows: pointers to rows of x; w: pointers to the codes and exponents, uint8.
    """
    w_ptr, scale_ptr = w
    QUADS: tl.constexpr = BLOCK_K // 128
    GROUPS: tl.constexpr = K // 32
    TAIL: tl.constexpr = GROUPS % (BLOCK_K // 32)
    r = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_K // 2)
    first_group = tl.minimum(tile + r // 64, last_tile).to(tl.int64) * GROUPS
    r = r % 64
    w_ptrs = w_ptr + (first_group * 1024 + r * 16)[:, None] + (c // 16 * 1024 + c % 16)[None, :]
    scale_ptrs = scale_ptr + first_group * 64
    x_ptrs = rows[:, None] + (c // 16 * 32 + c % 16)[None, :]
    total = tl.zeros([BLOCK_M, rows.shape[0]], tl.float32)
    if TAIL:
        # Load the last columns before the loop, because nothing after it hides the time.
        tl.static_assert(BLOCK_K == 128)
        steps: tl.constexpr = GROUPS // 4
        in_tail = (c // 16 < TAIL)[None, :]
        tail_codes = tl.load(w_ptrs + steps * 4096, mask=in_tail, other=0)
        tail_x0 = tl.load(x_ptrs + steps * 128, mask=in_tail, other=0.0)
        tail_x1 = tl.load(x_ptrs + steps * 128 + 16, mask=in_tail, other=0.0)
        tail_word = tl.zeros([BLOCK_M], tl.int32)
        for j in tl.static_range(TAIL):
            byte = tl.load(scale_ptrs + steps * 256 + r * TAIL + j)
            tail_word |= byte.to(tl.int32) << 8 * j
    word_ptrs = (scale_ptrs + r * 4).to(tl.pointer_type(tl.int32))
    for step in tl.range(0, K // BLOCK_K, num_stages=STAGES):
        codes = tl.load(w_ptrs + step * (BLOCK_K * 32))
        words = ()
        for q in tl.static_range(QUADS):
            words = words + (tl.load(word_ptrs + (step * QUADS + q) * 64),)  # type: ignore[assignment]  # noqa: RUF005
        factor = factor_of(_exponents(words, c, QUADS), 126, ASM)
        low, high = expand_e2m1(codes, factor, BLOCK_M, BLOCK_K // 2, ASM)
        x0 = tl.load(x_ptrs + step * BLOCK_K)
        x1 = tl.load(x_ptrs + step * BLOCK_K + 16)
        total = tl.dot(low, tl.trans(x0), total)
        total = tl.dot(high, tl.trans(x1), total)
    if TAIL:
        factor = factor_of(_exponents((tail_word,), c, 1), 126, ASM)
        low, high = expand_e2m1(tail_codes, factor, BLOCK_M, 64, ASM)
        total = tl.dot(low, tl.trans(tail_x0), total)
        total = tl.dot(high, tl.trans(tail_x1), total)
    return total


# --- Kernels --------------------------------------------------------------------------------------


@triton.jit
def _gate_up_kernel(
    x_ptr,
    order_ptr,
    blocks_ptr,
    w_ptr,
    scale_ptr,
    expert_scale_ptr,
    weights_ptr,
    hidden_ptr,
    limit,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    TOPK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """hidden[pair_row] = the rounded weight * clamped SwiGLU of BLOCK_M / 2 rows of w1 and of w3,
    for a block of pairs.
    """
    start_next(PDL)
    wait_for_last(PDL)
    entry = blocks_ptr + tl.program_id(1) * 3
    expert = tl.load(entry)
    if expert >= 0:
        pair_row = tl.load(entry + 1) + tl.arange(0, BLOCK_N)
        end = tl.load(entry + 2)
        pair = tl.load(order_ptr + tl.minimum(pair_row, end - 1))
        rows = x_ptr + (pair // TOPK).to(tl.int64) * D
        tile = expert * (I // 32) + tl.program_id(0) * (BLOCK_M // 64)
        last_tile = (expert + 1) * (I // 32) - 1
        w = w_ptr, scale_ptr
        total = _product(rows, w, tile, last_tile, D, BLOCK_M, BLOCK_K, STAGES, ASM)
        total *= tl.load(expert_scale_ptr + expert * 2)
        weight = tl.load(weights_ptr + pair)
        hidden = tl.trans(swiglu_rows(total, weight, limit, BLOCK_M // 2, BLOCK_N))
        i = tl.program_id(0) * (BLOCK_M // 2) + tl.arange(0, BLOCK_M // 2)
        target = hidden_ptr + pair_row.to(tl.int64)[:, None] * I + i[None, :]
        tl.store(target, hidden, mask=(pair_row < end)[:, None] & (i < I)[None, :])


@triton.jit
def _down_kernel(
    hidden_ptr,
    order_ptr,
    blocks_ptr,
    w_ptr,
    scale_ptr,
    expert_scale_ptr,
    out_ptr,
    D: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[pair] = w2 hidden, BLOCK_M rows for a block of pairs."""
    start_next(PDL)
    wait_for_last(PDL)
    entry = blocks_ptr + tl.program_id(1) * 3
    expert = tl.load(entry)
    if expert >= 0:
        pair_row = tl.load(entry + 1) + tl.arange(0, BLOCK_N)
        end = tl.load(entry + 2)
        used_row = tl.minimum(pair_row, end - 1)
        rows = hidden_ptr + used_row.to(tl.int64) * I
        tile = expert * (D // 64) + tl.program_id(0) * (BLOCK_M // 64)
        last_tile = (expert + 1) * (D // 64) - 1
        w = w_ptr, scale_ptr
        total = _product(rows, w, tile, last_tile, I, BLOCK_M, BLOCK_K, STAGES, ASM)
        total *= tl.load(expert_scale_ptr + expert * 2 + 1)
        pair = tl.load(order_ptr + used_row).to(tl.int64)
        d = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        target = out_ptr + pair[:, None] * D + d[None, :]
        value = tl.trans(total.to(tl.bfloat16))
        tl.store(target, value, mask=(pair_row < end)[:, None] & (d < D)[None, :])


# --- Launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Tile sizes of one launch.

    Attributes:
        block_rows: most (token, expert) pairs that a program computes, all of one expert.
        gate_up, down: rows of the weights in a program, columns of a step, pipeline stages, warps.
    """

    block_rows: int
    gate_up: tuple[int, int, int, int] = (128, 128, 3, 8)
    down: tuple[int, int, int, int] = (128, 128, 3, 8)


# (largest average number of pairs per expert, plan)
PLANS = (
    (6, ExpertsPlan(16, (64, 256, 3, 4), (64, 128, 5, 4))),
    (20, ExpertsPlan(32, (64, 256, 3, 4), (64, 128, 5, 4))),
    (64, ExpertsPlan(64)),
    (math.inf, ExpertsPlan(128)),
)


def plan(num_pairs: int, num_experts: int) -> ExpertsPlan:
    return next(plan for most, plan in PLANS if num_pairs <= most * num_experts)


def launch_tokens(model: ModelSizes, most: int) -> set[int]:
    """See LaunchClasses."""

    def class_of(num_tokens: int) -> object:
        pairs, experts = num_tokens * model.experts_per_token, model.num_experts
        chosen = plan(pairs, experts)
        order = launch_class(pairs, experts, chosen.block_rows)
        return chosen, order, num_tokens <= SPLIT_TOKENS

    return last_of_classes(class_of, most)


LAUNCH_CLASSES = LaunchClasses(tokens=launch_tokens)


def dispatch(ids_NK: Tensor, num_experts: int, *, options: GemmOptions = DEFAULT) -> OrderedPairs:
    """ids int32 or int64, contiguous."""
    block_rows = plan(ids_NK.numel(), num_experts).block_rows
    return order_pairs(ids_NK, num_experts, block_rows, options.early_launch)


def compute(
    x_ND: Tensor,
    weights_NK: Tensor,
    pairs: Dispatched,
    w: ExpertWeight,
    limit: float,
    *,
    options: GemmOptions = DEFAULT,
) -> Tensor:
    """x bfloat16 with strided rows. Returns bfloat16 [N,K,D]."""
    if not isinstance(w, GroupedExperts) or w.input_group != GROUP:
        raise ValueError("these kernels read FP4 weights in the layout of `finish_experts`")
    assert isinstance(pairs, OrderedPairs)
    if w.w2.shape[1] != x_ND.shape[1] or x_ND.stride(1) != 1:
        raise ValueError(
            f"x {tuple(x_ND.shape)} with strides {x_ND.stride()} does not fit w2 "
            f"{tuple(w.w2.shape)}: its rows must be contiguous"
        )
    if not (pairs.ids.is_contiguous() and weights_NK.is_contiguous()):
        raise ValueError("ids and weights must be contiguous")
    each = torch.empty((*pairs.ids.shape, x_ND.shape[1]), dtype=torch.bfloat16, device=x_ND.device)
    if len(x_ND):
        chosen = plan(pairs.ids.numel(), len(w.w2))
        launch(x_ND, weights_NK, pairs, w, limit, chosen, each, options)
    return each


def launch(
    x_ND: Tensor,
    weights_NK: Tensor,
    pairs: OrderedPairs,
    w: GroupedExperts,
    limit: float,
    plan: ExpertsPlan,
    each_NKD: Tensor,
    options: GemmOptions,
) -> None:
    """`compute` with a given plan; `dispatch` must have used its block_rows."""
    x = round_input(x_ND, options)
    width, inner = x.shape[1], w.w2.shape[2] * 2
    hidden = torch.empty((len(pairs.order), inner), dtype=torch.bfloat16, device=x.device)
    how = launch_options(options.early_launch)
    constants = {"BLOCK_N": plan.block_rows, "ASM": options.inline_asm}
    rows, most, stages, warps = plan.gate_up
    columns = most if width % most == 0 else 128
    _gate_up_kernel[(triton.cdiv(2 * inner, rows), len(pairs.blocks))](
        *(x, pairs.order, pairs.blocks, w.w13, w.scale13, w.expert_scale),
        *(weights_NK, hidden, limit),
        D=width,
        I=inner,
        TOPK=pairs.ids.shape[1],
        BLOCK_M=rows,
        BLOCK_K=columns,
        STAGES=stages,
        num_warps=warps,
        **constants,
        **how,
    )
    rows, columns, stages, warps = plan.down
    _down_kernel[(triton.cdiv(width, rows), len(pairs.blocks))](
        *(hidden, pairs.order, pairs.blocks, w.w2, w.scale2, w.expert_scale),
        each_NKD,
        D=width,
        I=inner,
        BLOCK_M=rows,
        BLOCK_K=columns,
        STAGES=stages,
        num_warps=warps,
        **constants,
        **how,
    )
