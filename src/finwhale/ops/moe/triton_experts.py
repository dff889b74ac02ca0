"""The routed experts as Triton kernels: FP4 weights, E4M3 activations, FP8 tensor cores.

Legend: N tokens, K experts a token, P = N K pairs, E experts, D hidden, I intermediate width.

Four launches: `_order_kernel` sorts the pairs by expert and rounds x; `_gate_up_kernel` multiplies
w1 and w3 of an expert with its tokens and applies the clamped SwiGLU; `_down_kernel` multiplies w2
and applies the routed weights; `_sum_kernel` adds a token's pairs in order of k. A weight is read
once for a block of tokens, whatever their number up to the block's size. Nothing depends on the
host knowing how the tokens spread: blocks without tokens return at once.

A weight enters the tensor cores as E4M3, exactly: `finish` writes a row's exponents as differences
from the row's largest one, and E4M3 holds an FP4 value times 2^-11 to 2^0 of what is left out. The
decoder looks four magnitudes up at once (`prmt`), in a table of eight bytes that the difference
shifts; for that `finish` also sorts the bits of every 64 bytes. Products are added by the tensor
core over 128 values, then in float32 with the activations' scale of these 128: the same sums in the
same order for every N.

Floor: bytes, E' (3 I D / 2 + 3 I D / 32) for E' experts that are hit: at 4.39 TB/s 18 us for one
token of Flash, 750 for 128; operations, 6 I D a pair: 1742 us for 8192 tokens at 1.42 PFLOP/s.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

from finwhale.ops.moe import ExpertWeight
from finwhale.ops.rounding import E4M3_MAX, MIN_AMAX

GROUP = 128  # activations that share a scale
SPREAD = 11  # E4M3 holds FP4 values times 2^-5 to 2^6 as normal numbers
# Up to here one chunk of pairs is counted by a histogram, and blocks are numbered without gaps.
CHUNK = 2048

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


@dataclass(frozen=True, slots=True)
class FoldedExperts(ExpertWeight):
    """FP4 weights after `finish`: every 64 bytes of a row are sorted for the decoder.

    Attributes:
        scale13, scale2: uint8, of the same shapes: 8 (11 - how far a group's exponent lies below
            its row's largest).
        unit13, unit2: float32 [E,2I] and [E,D]: what a row's decoded values are multiplied with.
    """

    unit13: Tensor | None = None
    unit2: Tensor | None = None


# --- Weights --------------------------------------------------------------------------------------


@triton.jit
def _code_times(code, steps_down):
    """The FP4 code, 0 to 7, nearest to a code's value times 2^-steps_down, ties to even."""
    exponent = code >> 1
    mantissa = tl.where(code > 1, 2 + (code & 1), code)
    value = (mantissa << tl.where(code > 1, exponent - 1, 0)).to(tl.float32) * 0.5
    value = value * tl.exp2(-steps_down.to(tl.float32))
    found = (value > 0.25).to(tl.int32) + (value >= 0.75).to(tl.int32)
    found += (value > 1.25).to(tl.int32) + (value >= 1.75).to(tl.int32)
    found += (value > 2.5).to(tl.int32) + (value >= 3.5).to(tl.int32)
    return found + (value > 5.0).to(tl.int32)


@triton.jit
def _fold_kernel(
    w_ptr, scale_ptr, unit_ptr, changed_ptr, K, BLOCK_G: tl.constexpr, SPREAD: tl.constexpr
):
    """One row of K values: what is raw on entry is folded on return, in place."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)
    is_group = group < K // 32
    scale = tl.load(scale_ptr + row * (K // 32) + group, mask=is_group, other=0).to(tl.int32)
    byte = tl.arange(0, 16)
    row_ptr = w_ptr + row * (K // 2)
    raw = tl.load(
        row_ptr + group[:, None] * 16 + byte[None, :], mask=is_group[:, None], other=0
    ).to(tl.int32)
    used = tl.max(raw & 0x77, axis=1) > 0
    largest = tl.max(tl.where(used, scale, 0))
    below = tl.where(used, largest - scale, 0)
    excess = tl.maximum(below - SPREAD, 0)
    steps = 8 * (SPREAD - (below - excess))
    # Bytes 64 b + 4 i + t of the result: block b of 128 values, word i, byte t.
    target = group[:, None] * 16 + byte[None, :]
    start = target & -64
    i = (target >> 2) & 15
    t = target & 3
    magnitudes = start + 2 * i + tl.where(t < 2, t, t + 30)
    signs = start + 2 * i + (t >> 1)
    mask = is_group[:, None]
    both = tl.load(row_ptr + magnitudes, mask=mask, other=0).to(tl.int32) & 0x77
    shift = 4 * (t & 1) + 3
    first = (tl.load(row_ptr + signs, mask=mask, other=0).to(tl.int32) >> shift) & 1
    second = (tl.load(row_ptr + signs + 32, mask=mask, other=0).to(tl.int32) >> shift) & 1
    # Values too small beside their row's largest are rounded to what the table can say.
    from_scale = tl.load(
        scale_ptr + row * (K // 32) + magnitudes // 16, mask=mask & (both > 0), other=0
    ).to(tl.int32)
    down = tl.where(both > 0, tl.maximum(largest - from_scale - SPREAD, 0), 0)
    low, high = both & 7, both >> 4
    new_low = tl.where(down > 0, _code_times(low, down), low)
    new_high = tl.where(down > 0, _code_times(high, down), high)
    changed = tl.sum(tl.sum(tl.where(down > 0, 1, 0) * ((low > 0) + (high > 0)), axis=1))
    result = new_low | (new_high << 4) | (first << 7) | (second << 3)
    tl.debug_barrier()
    tl.store(row_ptr + target, result.to(tl.uint8), mask=mask)
    tl.store(scale_ptr + row * (K // 32) + group, steps.to(tl.uint8), mask=is_group)
    bits = tl.where(largest == 255, 0x7FC00000, tl.maximum(largest - 6, 1) << 23)
    tl.store(unit_ptr + row, bits.to(tl.float32, bitcast=True))
    tl.store(changed_ptr + row, changed)


@triton.jit
def _decode(w_ptrs, steps, k_byte, ROWS: tl.constexpr, ASM: tl.constexpr):
    """128 values of each row as two [ROWS,64]; w_ptrs [ROWS,2,32], steps [ROWS] of four bytes."""
    half = tl.arange(0, 2)
    first = (steps[:, None] >> (8 * half)[None, :]) & 0xFF
    second = (steps[:, None] >> (16 + 8 * half)[None, :]) & 0xFF
    if ASM:
        w = tl.load(w_ptrs + k_byte)
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
        t = (tl.arange(0, 32) & 3)[None, None, :]
        place = w_ptrs + k_byte - t + (t >> 1)
        shift = 4 * (t & 1)
        signs = tl.load(w_ptrs + k_byte).to(tl.int32)
        a = _value((tl.load(place) >> shift) & 7, first[:, :, None], signs >> 7)
        b = _value((tl.load(place + 2) >> shift) & 7, second[:, :, None], signs >> 3)
        a = tl.reshape(a, [ROWS, 64])
        b = tl.reshape(b, [ROWS, 64])
    return a, b


@triton.jit
def _value(code, steps, sign):
    """What the decoder's E4M3 byte stands for, in bfloat16."""
    code = code.to(tl.int32)
    byte = tl.where(code == 1, 8, 8 + 4 * code) + steps
    bits = tl.where(code == 0, 0, ((byte << 4) + (120 << 7)) | ((sign & 1) << 15))
    return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _product(
    x_ptrs,
    x_scale_ptrs,
    w_ptrs,
    steps_ptrs,
    blocks,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """w x^T [ROWS,COLUMNS] in units of the rows: sums over 128 values, then over these."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.range(0, blocks, num_stages=STAGES):
        a, b = _decode(w_ptrs, tl.load(steps_ptrs + k), k * 64, ROWS, ASM)
        first = tl.load(x_ptrs + k * 128)
        second = tl.load(x_ptrs + k * 128 + 64)
        scale = tl.load(x_scale_ptrs + k)
        if ASM:
            part = tl.dot(a, tl.trans(first))
            part = tl.dot(b, tl.trans(second), part)
        else:
            part = tl.dot(a, tl.trans(first.to(tl.bfloat16)))
            part = tl.dot(b, tl.trans(second.to(tl.bfloat16)), part)
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


@triton.jit
def _round_rows(
    x_ptr,
    values_ptr,
    scale_ptr,
    program,
    N,
    D,
    stride_x,
    BLOCK: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
):
    """BLOCK groups of 128 values; groups are counted along the rows."""
    group = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    per_row = D // 128
    mask = (group < N * per_row)[:, None]
    k = tl.arange(0, 128)[None, :]
    place = (group // per_row * stride_x + group % per_row * 128)[:, None] + k
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    values, scale = _round(x, 1, E4M3_MAX, MIN_AMAX)
    tl.store(values_ptr + group[:, None] * 128 + k, values, mask=mask)
    tl.store(scale_ptr + group, scale, mask=group < N * per_row)


@triton.jit
def _round_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    N,
    D,
    stride_x,
    BLOCK: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
):
    _round_rows(
        x_ptr,
        values_ptr,
        scale_ptr,
        tl.program_id(0),
        N,
        D,
        stride_x,
        BLOCK,
        E4M3_MAX,
        MIN_AMAX,
    )


@triton.jit
def _order_kernel(
    x_ptr,
    ids_ptr,
    values_ptr,
    scale_ptr,
    order_ptr,
    blocks_ptr,
    N,
    D,
    P,
    E,
    slots,
    stride_x,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
):
    """The first E programs order an expert's pairs each, the others round x.

    Blocks (expert, first, end) of up to BLOCK_N pairs, expert -1 where there is none. In one chunk
    they are numbered without gaps; else expert e's from first // BLOCK_N + e, where there is room
    for all of them.
    """
    expert = tl.program_id(0)
    if expert >= E:
        _round_rows(
            x_ptr,
            values_ptr,
            scale_ptr,
            expert - E,
            N,
            D,
            stride_x,
            BLOCK,
            E4M3_MAX,
            MIN_AMAX,
        )
    else:
        pair = tl.arange(0, CHUNK)
        slot = tl.arange(0, BLOCK_S)
        if ONE_CHUNK:
            ids = tl.load(ids_ptr + pair, mask=pair < P, other=-1).to(tl.int32)
            counts = tl.histogram(tl.where(ids < 0, BLOCK_E - 1, ids), BLOCK_E)
            each = tl.arange(0, BLOCK_E)
            before = tl.where(each < expert, counts, 0)
            first = tl.sum(before)
            count = tl.sum(tl.where(each == expert, counts, 0))
            base = tl.sum((before + BLOCK_N - 1) // BLOCK_N)
            used = (count + BLOCK_N - 1) // BLOCK_N
            room = tl.where(expert == E - 1, slots - base, used)
            is_expert = ids == expert
            rank = tl.cumsum(is_expert.to(tl.int32), 0) - 1
            tl.store(order_ptr + first + rank, pair, mask=is_expert)
        else:
            first = 0
            count = 0
            for start in tl.range(0, P, CHUNK):
                ids = tl.load(ids_ptr + start + pair, mask=start + pair < P, other=-1).to(tl.int32)
                first += tl.sum(((ids >= 0) & (ids < expert)).to(tl.int32))
                count += tl.sum((ids == expert).to(tl.int32))
            place = first
            for start in tl.range(0, P, CHUNK):
                ids = tl.load(ids_ptr + start + pair, mask=start + pair < P, other=-1).to(tl.int32)
                is_expert = ids == expert
                rank = tl.cumsum(is_expert.to(tl.int32), 0) - 1
                tl.store(order_ptr + place + rank, start + pair, mask=is_expert)
                place += tl.sum(is_expert.to(tl.int32))
            base = first // BLOCK_N + expert
            used = (count + BLOCK_N - 1) // BLOCK_N
            end = tl.where(expert == E - 1, slots, (first + count) // BLOCK_N + expert + 1)
            room = end - base
        for start in tl.range(0, room, BLOCK_S):
            block = start + slot
            entry = blocks_ptr + (base + block) * 3
            tl.store(entry, tl.where(block < used, expert, -1), mask=block < room)
            tl.store(entry + 1, first + block * BLOCK_N, mask=block < room)
            tl.store(entry + 2, first + count + 0 * block, mask=block < room)


@triton.jit
def _gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    order_ptr,
    blocks_ptr,
    w_ptr,
    steps_ptr,
    unit_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    D,
    I,  # noqa: E741
    row_bytes,
    row_steps,
    limit,
    K: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    E4M3_MAX: tl.constexpr,
    MIN_AMAX: tl.constexpr,
):
    """clamped SwiGLU of BLOCK_I rows of w1 and of w3 for a block of pairs, which it rounds if
    BLOCK_I is a whole group.

    Rows of the product alternate, eight of w1 and eight of w3, so that a thread holds both.
    """
    entry = blocks_ptr + tl.program_id(1) * 3
    expert = tl.load(entry)
    if expert >= 0:
        end = tl.load(entry + 2)
        place = tl.load(entry + 1) + tl.arange(0, BLOCK_N)
        token = tl.load(order_ptr + tl.minimum(place, end - 1)).to(tl.int64) // K
        tile = tl.program_id(0)
        r = tl.arange(0, 2 * BLOCK_I)
        row = tile * BLOCK_I + (r // 16) * 8 + r % 8 + (r // 8) % 2 * I
        w_ptrs = (
            w_ptr
            + expert.to(tl.int64) * 2 * I * row_bytes
            + row[:, None, None] * row_bytes
            + (tl.arange(0, 2) * 32)[None, :, None]
            + tl.arange(0, 32)[None, None, :]
        )
        total = _product(
            x_ptr + token[:, None] * D + tl.arange(0, 64)[None, :],
            x_scale_ptr + token * (D // 128),
            w_ptrs,
            steps_ptr + expert.to(tl.int64) * 2 * I * row_steps + row * row_steps,
            D // 128,
            2 * BLOCK_I,
            BLOCK_N,
            STAGES,
            ASM,
        )
        total = total * tl.load(unit_ptr + expert * 2 * I + row)[:, None]
        both = tl.reshape(total, [BLOCK_I // 8, 2, 8, BLOCK_N])
        gate, up = tl.split(tl.permute(both, (0, 2, 3, 1)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        hidden = tl.trans(tl.reshape(hidden, [BLOCK_I, BLOCK_N]))
        target = hidden_ptr + place.to(tl.int64)[:, None] * I + tile * BLOCK_I
        target += tl.arange(0, BLOCK_I)[None, :]
        if BLOCK_I == 128:
            values, scale = _round(hidden, 1, E4M3_MAX, MIN_AMAX)
            tl.store(target, values, mask=(place < end)[:, None])
            tl.store(hidden_scale_ptr + place * (I // 128) + tile, scale, mask=place < end)
        else:
            tl.store(target, hidden.to(tl.bfloat16), mask=(place < end)[:, None])


@triton.jit
def _down_kernel(
    hidden_ptr,
    hidden_scale_ptr,
    order_ptr,
    blocks_ptr,
    w_ptr,
    steps_ptr,
    unit_ptr,
    weights_ptr,
    out_ptr,
    D,
    I,  # noqa: E741
    row_bytes,
    row_steps,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[pair] = weight * w2 hidden, BLOCK_D rows for a block of pairs."""
    entry = blocks_ptr + tl.program_id(1) * 3
    expert = tl.load(entry)
    if expert >= 0:
        end = tl.load(entry + 2)
        place = tl.load(entry + 1) + tl.arange(0, BLOCK_N)
        row_of = tl.minimum(place, end - 1).to(tl.int64)
        row = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
        w_ptrs = (
            w_ptr
            + expert.to(tl.int64) * D * row_bytes
            + row[:, None, None] * row_bytes
            + (tl.arange(0, 2) * 32)[None, :, None]
            + tl.arange(0, 32)[None, None, :]
        )
        total = _product(
            hidden_ptr + row_of[:, None] * I + tl.arange(0, 64)[None, :],
            hidden_scale_ptr + row_of * (I // 128),
            w_ptrs,
            steps_ptr + expert.to(tl.int64) * D * row_steps + row * row_steps,
            I // 128,
            BLOCK_D,
            BLOCK_N,
            STAGES,
            ASM,
        )
        pair = tl.load(order_ptr + row_of).to(tl.int64)
        total = total * tl.load(unit_ptr + expert * D + row)[:, None]
        total = tl.trans(total) * tl.load(weights_ptr + pair)[:, None]
        target = out_ptr + pair[:, None] * D + row[None, :]
        tl.store(target, total.to(tl.bfloat16), mask=(place < end)[:, None])


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
):
    token = tl.program_id(0).to(tl.int64)
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


USES_ASM = isinstance(_order_kernel, JITFunction) and torch.version.hip is None


# --- Launch ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of one launch: rows of weights, pairs, pipeline stages, warps."""

    block_n: int
    gate_up: tuple[int, int, int]  # rows of w1 (and as many of w3), stages, warps
    down: tuple[int, int, int]


def plan(num_pairs: int, num_experts: int) -> Plan:
    """By the pairs an expert has on average."""
    each = num_pairs / num_experts
    if each <= 6:
        return Plan(16, (128, 4, 8), (64, 4, 4))
    if each <= 20:
        return Plan(32, (128, 4, 8), (64, 4, 4))
    if each <= 64:
        return Plan(64, (128, 3, 8), (128, 3, 8))
    return Plan(128, (64, 3, 8), (128, 3, 8))


def finish(w: ExpertWeight) -> tuple[FoldedExperts, Tensor]:
    """Weights as the checkpoint has them to weights as these kernels read them: once, in place.

    Takes w13 uint8 [E,2I,D/2], scale13 uint8 [E,2I,D/32], w2 [E,D,I/2], scale2 [E,D,I/32], all
    contiguous, D and I multiples of 128. A row's groups keep every value exactly while their
    exponents lie at most 11 below the row's largest (groups of zeros do not count); values further
    below are rounded to a step of 2^-12 of the largest group's. Returns the weights and how many
    values that may have changed, an int64 scalar on the device.
    """
    unit13, changed13 = _fold(w.w13, w.scale13)
    unit2, changed2 = _fold(w.w2, w.scale2)
    folded = FoldedExperts(w.w13, w.w2, w.round_input, w.scale13, w.scale2, unit13, unit2)
    return folded, changed13 + changed2


def _fold(w: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    experts, rows, row_bytes = w.shape
    if w.dtype != torch.uint8 or scale is None or scale.dtype != torch.uint8:
        raise ValueError(f"weights must be FP4 with E8M0 scales, both as uint8, got {w.dtype}")
    if not (w.is_contiguous() and scale.is_contiguous()) or row_bytes % 64:
        raise ValueError(
            f"weights must be contiguous with rows of a multiple of 128 values, got {w.shape}, "
            f"strides {w.stride()} and {scale.stride()}"
        )
    unit = torch.empty((experts, rows), dtype=torch.float32, device=w.device)
    changed = torch.empty((experts, rows), dtype=torch.int32, device=w.device)
    groups = triton.next_power_of_2(row_bytes // 16)
    _fold_kernel[(experts * rows,)](
        w, scale, unit, changed, row_bytes * 2, BLOCK_G=groups, SPREAD=SPREAD, num_warps=4
    )
    return unit, changed.sum()


def _check(x_ND: Tensor, ids_NK: Tensor, weights_NK: Tensor, w: FoldedExperts) -> None:
    experts, width, row_bytes = w.w2.shape
    if x_ND.dtype != torch.bfloat16 or x_ND.stride(1) != 1:
        raise ValueError(f"x must be bfloat16 rows, got {x_ND.dtype}, strides {x_ND.stride()}")
    if x_ND.shape[1] != width or width % GROUP or row_bytes * 2 % GROUP:
        raise ValueError(f"x {tuple(x_ND.shape)} does not fit w2 {tuple(w.w2.shape)} in groups")
    if not (ids_NK.is_contiguous() and weights_NK.is_contiguous()):
        raise ValueError("ids and weights must be contiguous")
    if w.w13.shape != (experts, 4 * row_bytes, width // 2):
        raise ValueError(f"w13 {tuple(w.w13.shape)} does not fit w2 {tuple(w.w2.shape)}")


def experts(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    w: FoldedExperts,
    limit: float,
    shared: Tensor | None = None,
) -> Tensor:
    """sum_k weight_k * w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit)), plus `shared`.

    x bfloat16 [N,D], its rows any stride apart; ids int32 or int64 [N,K], -1 skips; weights
    float32 [N,K]; shared bfloat16 [N,D] or None. What enters w13 and w2 is rounded to E4M3, one
    scale for each 128. Returns bfloat16 [N,D].
    """
    _check(x_ND, ids_NK, weights_NK, w)
    num_tokens, topk = ids_NK.shape
    if num_tokens == 0:
        return torch.empty_like(x_ND)
    return _launch(x_ND, ids_NK, weights_NK, w, limit, shared, plan(ids_NK.numel(), len(w.w2)))


def _launch(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    w: FoldedExperts,
    limit: float,
    shared: Tensor | None,
    plan: Plan,
) -> Tensor:
    num_tokens, topk = ids_NK.shape
    num_experts, width, row_bytes = w.w2.shape
    inner, pairs, device = row_bytes * 2, num_tokens * topk, x_ND.device
    chunk = min(CHUNK, max(16, triton.next_power_of_2(pairs)))
    slots = num_experts + pairs // plan.block_n
    if pairs <= chunk:
        slots = min(pairs, slots)

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    fp8, f32, i32 = torch.float8_e4m3fn, torch.float32, torch.int32
    x, x_scale = empty(num_tokens, width, dtype=fp8), empty(num_tokens, width // GROUP, dtype=f32)
    order, blocks = empty(pairs, dtype=i32), empty(slots, 3, dtype=i32)
    groups = 8
    _order_kernel[(num_experts + triton.cdiv(num_tokens * width, groups * GROUP),)](
        x_ND,
        ids_NK,
        x,
        x_scale,
        order,
        blocks,
        num_tokens,
        width,
        pairs,
        num_experts,
        slots,
        x_ND.stride(0),
        BLOCK_N=plan.block_n,
        CHUNK=chunk,
        ONE_CHUNK=pairs <= chunk,
        BLOCK_E=triton.next_power_of_2(num_experts + 1),
        BLOCK_S=min(1024, triton.next_power_of_2(slots)),
        BLOCK=groups,
        E4M3_MAX=E4M3_MAX,
        MIN_AMAX=MIN_AMAX,
        num_warps=4,
    )

    hidden, hidden_scale = empty(pairs, inner, dtype=fp8), empty(pairs, inner // GROUP, dtype=f32)
    block_i, stages, warps = plan.gate_up
    rounds = block_i == GROUP
    unrounded = hidden if rounds else empty(pairs, inner)
    _gate_up_kernel[(inner // block_i, slots)](
        x,
        x_scale,
        order,
        blocks,
        w.w13,
        w.scale13.view(i32),
        w.unit13,
        unrounded,
        hidden_scale,
        width,
        inner,
        width // 2,
        width // 128,
        limit,
        K=topk,
        BLOCK_I=block_i,
        BLOCK_N=plan.block_n,
        STAGES=stages,
        ASM=USES_ASM,
        E4M3_MAX=E4M3_MAX,
        MIN_AMAX=MIN_AMAX,
        num_warps=warps,
    )
    if not rounds:
        _round_kernel[(triton.cdiv(pairs * inner, 32 * GROUP),)](
            unrounded,
            hidden,
            hidden_scale,
            pairs,
            inner,
            inner,
            BLOCK=32,
            E4M3_MAX=E4M3_MAX,
            MIN_AMAX=MIN_AMAX,
            num_warps=4,
        )

    block_d, stages, warps = plan.down
    each = empty(pairs, width)
    _down_kernel[(triton.cdiv(width, block_d), slots)](
        hidden,
        hidden_scale,
        order,
        blocks,
        w.w2,
        w.scale2.view(i32),
        w.unit2,
        weights_NK,
        each,
        width,
        inner,
        inner // 2,
        inner // 128,
        BLOCK_D=block_d,
        BLOCK_N=plan.block_n,
        STAGES=stages,
        ASM=USES_ASM,
        num_warps=warps,
    )
    out = empty(num_tokens, width)
    block_d = min(1024, triton.next_power_of_2(width))
    _sum_kernel[(num_tokens, triton.cdiv(width, block_d))](
        each,
        ids_NK,
        each if shared is None else shared,
        out,
        width,
        0 if shared is None else shared.stride(0),
        K=topk,
        HAS_SHARED=shared is not None,
        BLOCK_D=block_d,
        num_warps=4,
    )
    return out
