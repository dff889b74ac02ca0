"""The routed experts as Triton kernels: FP4 weights, E4M3 activations, FP8 tensor cores.

Legend: N tokens, K experts a token, P = N K pairs, E experts, D hidden, I intermediate width.

Launches: `order_pairs` sorts the pairs by expert (triton_order.py); one token needs no order, and
on Hopper has kernels of its own (hopper_one.py).
`_round_rows_kernel` rounds x; `_gate_up_kernel` multiplies w1 and w3 of an expert with its tokens,
applies the clamped SwiGLU and the routing weights, and rounds; `_down_kernel` multiplies w2;
`_sum_kernel` adds a token's pairs in order of k. An expert's weights are read once for a block of
tokens, whatever their number up to the block's size. Nothing depends on the host knowing how the
tokens spread: blocks without tokens return at once.

A weight enters the tensor cores as E4M3, exactly (triton_fold.py): the decoder looks four
magnitudes up at once (`prmt`), in a table of eight bytes that the group's exponent shifts. Products
are added by the tensor core over 128 values, then in float32 with the activations' scale of these
128: the same sums in the same order for every N.

Floor: bytes, E' (3 I D / 2 + 3 I D / 32) for E' experts that are hit: at 4.39 TB/s 18 us for one
token of Flash, 750 for 128; operations, 6 I D a pair: 1742 us for 8192 tokens at 1.42 PFLOP/s.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from finwhale.number_formats import E4M3_MAX
from finwhale.ops.launch import early_launch
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe.triton_fold import FoldedExperts
from finwhale.ops.moe.triton_order import order_pairs
from finwhale.ops.rounding import MIN_AMAX

if torch.version.hip is None:
    from finwhale.ops.moe import hopper_experts, hopper_one
    from finwhale.ops.moe.hopper_experts import HopperPlan

GROUP = 128  # activations that share a scale
NO_ORDER = (None, None, None)

# $2: eight values; $3, $7: the table of the first four; $11, $15: of the second four. Arguments of
# 32 bits come once for each of the four bytes.
DECODE = tl.constexpr("""{
.reg .b32 magnitudes, second, sign;
and.b32 magnitudes, $2, 0x77777777;
prmt.b32 $0, $3, $7, magnitudes;
shr.u32 second, magnitudes, 16;
prmt.b32 second, $11, $15, second;
and.b32 sign, $2, 0x80808080;
or.b32 $0, $0, sign;
shl.b32 sign, $2, 4;
and.b32 sign, sign, 0x80808080;
or.b32 $1, second, sign;
}""")
OPERANDS = tl.constexpr("=&r,=&r" + ",r" * 17)


# --- Weights --------------------------------------------------------------------------------------


@triton.jit
def _decode(w, steps, ROWS: tl.constexpr, ASM: tl.constexpr):
    """128 values of each row, in two halves [ROWS,64]; w uint8 [ROWS,64], steps [ROWS] of four."""
    half = tl.arange(0, 2)
    first = (steps[:, None] >> (8 * half)[None, :]) & 0xFF
    second = (steps[:, None] >> (16 + 8 * half)[None, :]) & 0xFF
    if ASM:
        w = tl.reshape(w, [ROWS, 2, 32])
        first_low, _ = tl.broadcast((0x14100800 + first * 0x01010100)[:, :, None], w)
        first_high, _ = tl.broadcast((0x24201C18 + first * 0x01010101)[:, :, None], w)
        second_low, _ = tl.broadcast((0x14100800 + second * 0x01010100)[:, :, None], w)
        second_high, _ = tl.broadcast((0x24201C18 + second * 0x01010101)[:, :, None], w)
        a, b = tl.inline_asm_elementwise(
            DECODE,
            OPERANDS,
            [w, first_low, first_high, second_low, second_high],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
        a = tl.reshape(a, [ROWS, 64]).to(tl.float8e4nv, bitcast=True)
        b = tl.reshape(b, [ROWS, 64]).to(tl.float8e4nv, bitcast=True)
    else:
        w = w.to(tl.int32)
        words = tl.permute(tl.reshape(w, [ROWS, 16, 2, 2]), (0, 1, 3, 2))
        low, high = tl.split(words)
        a = _values(tl.join(low & 7, (low >> 4) & 7), first, w >> 7, ROWS)
        b = _values(tl.join(high & 7, (high >> 4) & 7), second, w >> 3, ROWS)
    return a, b


@triton.jit
def _values(codes, steps, signs, ROWS: tl.constexpr):
    """What the decoder's E4M3 bytes stand for, in bfloat16 [ROWS,64]."""
    codes = tl.reshape(codes, [ROWS, 2, 32])
    byte = tl.where(codes == 1, 8, 8 + 4 * codes) + steps[:, :, None]
    bits = tl.where(codes == 0, 0, (byte << 4) + (120 << 7))
    bits = tl.reshape(bits, [ROWS, 64]) | ((signs & 1) << 15)
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _product(
    x_desc,
    x_scale_ptr,
    w_desc,
    steps_ptr,
    first,
    tile,
    blocks,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """w x^T [ROWS,COLUMNS] in units of the rows: sums over 128 values, then over these.

    Rows from 64 tile on; columns are the pairs from `first` on.
    """
    row = tl.arange(0, ROWS)
    steps_ptrs = steps_ptr + (tile + row // 64).to(tl.int64) * blocks * 64 + row % 64
    scale_ptrs = x_scale_ptr + first + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(0, blocks, num_stages=STAGES):
        w = tl.reshape(w_desc.load([tile, k, 0, 0]), [ROWS, 64])
        a, b = _decode(w, tl.load(steps_ptrs + k * 64), ROWS, ASM)
        x0 = x_desc.load([first, k * 128])
        x1 = x_desc.load([first, k * 128 + 64])
        scale = tl.load(scale_ptrs + k * stride)
        if ASM:
            part = tl.dot(a, tl.trans(x0))
            part = tl.dot(b, tl.trans(x1), part)
        else:
            part = tl.dot(a, tl.trans(x0.to(tl.bfloat16)))
            part = tl.dot(b, tl.trans(x1.to(tl.bfloat16)), part)
        total += part * scale[None, :]
    return total


# --- Kernels --------------------------------------------------------------------------------------


@triton.jit
def _round(x, AXIS: tl.constexpr, E4M3_MAX: tl.constexpr, MIN_AMAX: tl.constexpr):
    """(E4M3 values, scale) of float32 x, one power-of-two scale along the axis."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=AXIS), MIN_AMAX)
    bits = (amax * (1.0 / E4M3_MAX)).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    rounded = (x * tl.expand_dims(inverse, AXIS)).to(tl.float8e4nv)
    return rounded, bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["stride_scale"])
def _round_rows_kernel(
    x_ptr,
    place_ptr,
    values_ptr,
    scale_ptr,
    ids_ptr,
    order_ptr,
    blocks_ptr,
    stride_scale,
    D,
    stride_x,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Row n of x, BLOCK groups of it, to rows place[n K ..] of values and columns of scale.

    A place of -1 is none; without place_ptr K is 1 and a row keeps its number. With ids_ptr there
    is one token, whose pair k is at 8 k, in a block of its own: this writes order and blocks too.
    """
    if PDL:
        # In this order: what the next one reads before its wait was written before this one.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_group = group < D // 128
    d = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = tl.load(x_ptr + token * stride_x + d, mask=is_group[:, None], other=0.0).to(tl.float32)
    values, scale = _round(x, 1, E4M3_MAX, MIN_AMAX)
    for k in tl.static_range(K):
        place = token
        if ids_ptr is not None:
            expert = tl.load(ids_ptr + k).to(tl.int32)
            if tl.program_id(1) == 0:
                tl.store(order_ptr + 8 * k, k)
                tl.store(blocks_ptr + 3 * k, expert)
                tl.store(blocks_ptr + 3 * k + 1, 8 * k)
                tl.store(blocks_ptr + 3 * k + 2, 8 * k + 1)
            place = tl.where(expert >= 0, 8 * k, -1).to(tl.int64)
        elif place_ptr is not None:
            place = tl.load(place_ptr + token * K + k).to(tl.int64)
        used = is_group & (place >= 0)
        tl.store(values_ptr + place * D + d, values, mask=used[:, None])
        tl.store(scale_ptr + group * stride_scale + place, scale, mask=used)


@triton.jit(do_not_specialize=["stride"])
def _gate_up_kernel(
    x_desc,
    x_scale_ptr,
    order_ptr,
    blocks_ptr,
    w_desc,
    steps_ptr,
    unit_ptr,
    weights_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    stride,
    D,
    I,  # noqa: E741
    limit,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
):
    """hidden[place] = weight * clamped SwiGLU of BLOCK_I rows of w1 and of w3, for a block of
    pairs. If BLOCK_I is a whole group, the kernel rounds the result.

    Rows of the product alternate, eight of w1 and eight of w3, so that a thread holds both.
    """
    entry = blocks_ptr + tl.program_id(1) * 3
    expert = tl.load(entry)
    if expert >= 0:
        first = tl.load(entry + 1)
        end = tl.load(entry + 2)
        tile = expert * (I // 32) + tl.program_id(0) * (BLOCK_I // 32)
        total = _product(
            x_desc,
            x_scale_ptr,
            w_desc,
            steps_ptr,
            first,
            tile,
            D // 128,
            stride,
            2 * BLOCK_I,
            BLOCK_N,
            STAGES,
            ASM,
        )
        total *= tl.load(unit_ptr + tile * 64 + tl.arange(0, 2 * BLOCK_I))[:, None]
        both = tl.reshape(total, [BLOCK_I // 8, 2, 8, BLOCK_N])
        gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        hidden = tl.trans(tl.reshape(hidden, [BLOCK_I, BLOCK_N]))
        place = first + tl.arange(0, BLOCK_N)
        pair = tl.load(order_ptr + place, mask=place < end, other=0)
        hidden *= tl.load(weights_ptr + pair)[:, None]
        i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
        target = hidden_ptr + place.to(tl.int64)[:, None] * I + i[None, :]
        if BLOCK_I == 128:
            values, scale = _round(hidden, 1, E4M3_MAX, MIN_AMAX)
            tl.store(target, values, mask=(place < end)[:, None])
            scale_ptrs = hidden_scale_ptr + tl.program_id(0) * stride + place
            tl.store(scale_ptrs, scale, mask=place < end)
        else:
            tl.store(target, hidden.to(hidden_ptr.dtype.element_ty), mask=(place < end)[:, None])


@triton.jit(do_not_specialize=["stride"])
def _down_kernel(
    hidden_desc,
    hidden_scale_ptr,
    order_ptr,
    blocks_ptr,
    w_desc,
    steps_ptr,
    unit_ptr,
    out_ptr,
    stride,
    D,
    I,  # noqa: E741
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[pair] = w2 hidden, BLOCK_D rows for a block of pairs."""
    entry = blocks_ptr + tl.program_id(1) * 3
    expert = tl.load(entry)
    if expert >= 0:
        first = tl.load(entry + 1)
        end = tl.load(entry + 2)
        tile = expert * (D // 64) + tl.program_id(0) * (BLOCK_D // 64)
        total = _product(
            hidden_desc,
            hidden_scale_ptr,
            w_desc,
            steps_ptr,
            first,
            tile,
            I // 128,
            stride,
            BLOCK_D,
            BLOCK_N,
            STAGES,
            ASM,
        )
        total *= tl.load(unit_ptr + tile * 64 + tl.arange(0, BLOCK_D))[:, None]
        place = first + tl.arange(0, BLOCK_N)
        pair = tl.load(order_ptr + place, mask=place < end, other=0).to(tl.int64)
        total = tl.trans(total)
        d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        tl.store(
            out_ptr + pair[:, None] * D + d[None, :],
            total.to(tl.bfloat16),
            mask=(place < end)[:, None],
        )


@triton.jit
def _sum_kernel(
    pairs_ptr,
    ids_ptr,
    shared_ptr,
    out_ptr,
    D,
    stride_shared,
    K: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    is_d = d < D
    total = tl.zeros([BLOCK_D], tl.float32)
    for k in tl.static_range(K):
        is_used = tl.load(ids_ptr + token * K + k) >= 0
        row = pairs_ptr + (token * K + k) * D + d
        total += tl.load(row, mask=is_d & is_used, other=0.0).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(shared_ptr + token * stride_shared + d, mask=is_d, other=0.0)
    tl.store(out_ptr + token * D + d, total.to(tl.bfloat16), mask=is_d)


USES_ASM = isinstance(_sum_kernel, JITFunction) and torch.version.hip is None


# --- Launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of one launch.

    Attributes:
        block_n: pairs of one expert that a program takes.
        gate_up, down: rows of weights (of w1, and as many of w3), pipeline stages, warps.
        hopper: instead, how hopper_experts runs.
    """

    block_n: int
    gate_up: tuple[int, int, int] = (64, 3, 8)
    down: tuple[int, int, int] = (128, 3, 8)
    hopper: "HopperPlan | None" = None


def plan(num_pairs: int, num_experts: int, device: torch.device) -> Plan:
    """By the pairs an expert has on average."""
    each = num_pairs / num_experts
    if USES_ASM and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
        if each <= 6:
            return Plan(16, hopper=HopperPlan(1, (1, 4), (1, 4)))
        if each <= 32:
            return Plan(32, hopper=HopperPlan(1, (1, 6), (1, 6)))
        if each <= 64:
            return Plan(64, hopper=HopperPlan(1, (1, 3), (1, 4)))
        if each <= 104:
            return Plan(128, hopper=HopperPlan(4, (2, 4), (2, 4)))
        return Plan(256, hopper=HopperPlan(2, (1, 4), (4, 4)))
    return portable_plan(num_pairs, num_experts)


def portable_plan(num_pairs: int, num_experts: int) -> Plan:
    """Of the kernels that every GPU can run."""
    each = num_pairs / num_experts
    if each <= 6:
        return Plan(16, (128, 4, 8), (64, 4, 4))
    if each <= 20:
        return Plan(32, (128, 4, 8), (64, 4, 4))
    if each <= 64:
        return Plan(64, (128, 3, 8), (128, 3, 8))
    return Plan(128)


def _check(x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, w: ExpertWeight) -> FoldedExperts:
    if not isinstance(w, FoldedExperts):
        raise ValueError("these kernels read FP4 weights that `triton_fold.finish` has folded")
    experts, width, row_bytes = w.w2.shape
    if x_ND.dtype != torch.bfloat16 or x_ND.stride(1) != 1:
        raise ValueError(f"x must be bfloat16 rows, got {x_ND.dtype}, strides {x_ND.stride()}")
    if x_ND.shape[1] != width or width % GROUP or row_bytes * 2 % GROUP:
        raise ValueError(f"x {tuple(x_ND.shape)} does not fit w2 {tuple(w.w2.shape)} in groups")
    if not (ids_NK.is_contiguous() and weights_NK.is_contiguous()):
        raise ValueError("ids and weights must be contiguous")
    if w.w13.shape != (experts, 4 * row_bytes, width // 2):
        raise ValueError(f"w13 {tuple(w.w13.shape)} does not fit w2 {tuple(w.w2.shape)}")
    return w


def experts(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    w: ExpertWeight,
    limit: float,
    shared_ND: Tensor | None = None,
    join: Callable[[], None] | None = None,
    *,
    portable: bool = False,
) -> Tensor:
    """sum_k w2(weight_k * silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit)), plus `shared_ND`.

    x bfloat16 [N,D], its rows any stride apart; ids int32 or int64 [N,K], -1 skips; weights
    float32 [N,K]; shared_ND bfloat16 [N,D] or None. What enters w13 and w2 is rounded to E4M3, one
    scale for each 128. Returns bfloat16 [N,D]. portable: no kernel that one vendor's GPUs alone can
    run.
    """
    folded = _check(x_ND, ids_NK, weights_NK, w)
    if len(x_ND) == 0:
        if join is not None:
            join()
        return torch.empty_like(x_ND)
    pairs, count = ids_NK.numel(), len(folded.w2)
    chosen = portable_plan(pairs, count) if portable else plan(pairs, count, x_ND.device)
    each = _launch(x_ND, ids_NK, weights_NK, folded, limit, chosen)
    if join is not None:
        join()
    return _sum(each, ids_NK, shared_ND, len(x_ND))


def _tiles(w: Tensor, rows: int) -> TensorDescriptor:
    """w uint8 [E,M,K/2] as [tiles,blocks,64,64], read `rows` at a time."""
    experts, height, row_bytes = w.shape
    tiles = w.view(experts * height // 64, row_bytes // 64, 64, 64)
    return TensorDescriptor.from_tensor(tiles, [rows // 64, 1, 64, 64])


def _launch(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    w: FoldedExperts,
    limit: float,
    plan: Plan,
) -> Tensor:
    """Each pair's output [N K,D]; rows of pairs that have no expert mean nothing."""
    num_tokens, topk = ids_NK.shape
    num_experts, width, row_bytes = w.w2.shape
    inner, pairs, device = row_bytes * 2, num_tokens * topk, x_ND.device
    block_n = plan.block_n

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    each = empty(pairs, width)
    if plan.hopper and num_tokens == 1:
        hopper_one.each_expert(x_ND, ids_NK, weights_NK, w, limit, each)
        return each
    fp8, f32, i32 = torch.float8_e4m3fn, torch.float32, torch.int32
    ordering: tuple[Tensor | None, ...] = NO_ORDER
    place: Tensor | None = None
    if num_tokens == 1:
        # What rounds the token writes where its pairs are.
        order, blocks = empty(8 * pairs, dtype=i32), empty(pairs, 3, dtype=i32)
        ordering = ids_NK, order, blocks
    else:
        order, place, blocks = order_pairs(ids_NK, num_experts, block_n)
    padded, slots = len(order), len(blocks)

    def rounded(
        x: Tensor, place: Tensor | None, topk: int, ordering: tuple[Tensor | None, ...] = NO_ORDER
    ) -> tuple[Tensor, Tensor]:
        rows, row_width = x.shape
        values = empty(padded, row_width, dtype=fp8)
        scale = empty(row_width // GROUP, padded + plan.block_n, dtype=f32)
        groups = 8 if rows <= 256 else 16  # Flash's hidden values have 16
        _round_rows_kernel[(rows, triton.cdiv(row_width, groups * GROUP))](
            x,
            place,
            values,
            scale,
            *ordering,
            scale.stride(0),
            row_width,
            x.stride(0),
            K=topk,
            BLOCK=groups,
            E4M3_MAX=E4M3_MAX,
            MIN_AMAX=MIN_AMAX,
            num_warps=4,
            **early_launch(x),
        )
        return values, scale

    x, x_scale = rounded(x_ND, place, topk, ordering)
    if plan.hopper:
        hidden = empty(padded, inner)
        tiles = block_n, plan.hopper
        inputs = x, x_scale, order, blocks
        hopper_experts.gate_up(*inputs, *w.first(), weights_NK, hidden, limit, *tiles)
        hidden, scale = rounded(hidden, None, 1)
        hopper_experts.down(hidden, scale, order, blocks, *w.second(), each, *tiles)
        return each
    block_i, stages, warps = plan.gate_up
    hidden = empty(padded, inner, dtype=fp8 if block_i == GROUP else f32)
    hidden_scale = empty(inner // GROUP, padded + plan.block_n, dtype=f32)
    _gate_up_kernel[(inner // block_i, slots)](
        TensorDescriptor.from_tensor(x, [plan.block_n, 64]),
        x_scale,
        order,
        blocks,
        _tiles(w.w13, 2 * block_i),
        *w.first()[1:],
        weights_NK,
        hidden,
        hidden_scale,
        x_scale.stride(0),
        width,
        inner,
        limit,
        BLOCK_I=block_i,
        BLOCK_N=plan.block_n,
        STAGES=stages,
        ASM=USES_ASM,
        E4M3_MAX=E4M3_MAX,
        MIN_AMAX=MIN_AMAX,
        num_warps=warps,
    )
    if block_i != GROUP:
        hidden, hidden_scale = rounded(hidden, None, 1)

    block_d, stages, warps = plan.down
    _down_kernel[(width // block_d, slots)](
        TensorDescriptor.from_tensor(hidden, [plan.block_n, 64]),
        hidden_scale,
        order,
        blocks,
        _tiles(w.w2, block_d),
        *w.second()[1:],
        each,
        hidden_scale.stride(0),
        width,
        inner,
        BLOCK_D=block_d,
        BLOCK_N=plan.block_n,
        STAGES=stages,
        ASM=USES_ASM,
        num_warps=warps,
    )
    return each


def _sum(each: Tensor, ids_NK: Tensor, shared: Tensor | None, num_tokens: int) -> Tensor:
    width = each.shape[1]
    out = torch.empty((num_tokens, width), dtype=torch.bfloat16, device=each.device)
    block_d = min(1024, triton.next_power_of_2(width))
    _sum_kernel[(num_tokens, triton.cdiv(width, block_d))](
        each,
        ids_NK,
        each if shared is None else shared,
        out,
        width,
        0 if shared is None else shared.stride(0),
        K=ids_NK.shape[1],
        HAS_SHARED=shared is not None,
        BLOCK_D=block_d,
        num_warps=4,
        **early_launch(each),
    )
    return out
