"""Compressors as one Triton kernel a layer: entries that complete, and state for later steps.

A program looks at a few neighbouring tokens of one part; most complete nothing and keep nothing, so
that a decode step of ratio 128 costs little more than its launch. An entry is one program's work
whatever the batch: its bits depend on its own tokens alone. Rows of this step are read from the
projection, earlier ones from the state's pool; those that are written there are of this step, so
that no row is both read and written.

Bytes of a prefill token: 4 X of its projected row in each part; 8192 tokens of Flash at 4.39 TB/s
take 19 us in a C4 layer (X 2048 and 512) and 8 us in a C128 layer (X 1024).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention import NOPE_GROUP
from finwhale.ops.attention import layout as rows_layout
from finwhale.ops.compressor import CompressPart
from finwhale.ops.indexer import layout as keys_layout
from finwhale.ops.paging import PageTable, Tokens

MAX_PARTS = 2
# ratio -> rows of one block of the gated average.
BLOCK_ROWS = {4: 8, 128: 16}
# ratio -> neighbouring tokens that one program looks at in a prefill.
PREFILL_TOKENS = {4: 4, 128: 32}


@triton.jit
def round_e4m3_groups(x):
    """x [groups, values] -> E4M3 x / scale, and the bits of the groups' power-of-two scales."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    scale_bits = (bits + 0x7FFFFF) & 0x7F800000
    inverse = (0x7F000000 - scale_bits).to(tl.float32, bitcast=True)
    return (x * inverse[:, None]).to(tl.float8e4nv), scale_bits


@triton.jit
def _keep(
    projected_ptr,
    state_ptr,
    tokens,
    slots,
    kept,
    stride_projected,
    stride_state,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    """Copy the kept tokens' projected rows to the state's pool."""
    for start in range(0, X, BLOCK_X):
        columns = start + tl.arange(0, BLOCK_X)
        mask = kept[:, None] & (columns < X)[None, :]
        row = tl.load(
            projected_ptr + tokens[:, None] * stride_projected + columns[None, :], mask=mask
        )
        tl.store(state_ptr + slots[:, None] * stride_state + columns[None, :], row, mask=mask)


@triton.jit
def _mix(
    projected_ptr,
    ape_ptr,
    state_ptr,
    state_row_ptr,
    token,
    position,
    first_position,
    first_page,
    stride_projected,
    stride_state,
    RATIO: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gated average of the S tokens up to `token`: [BLOCK_C], 0 past C."""
    S: tl.constexpr = 8 if RATIO == 4 else RATIO
    columns = tl.arange(0, BLOCK_C)
    top = tl.full([BLOCK_C], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    mixed = tl.zeros([BLOCK_C], tl.float32)
    for block in range(S // BLOCK_R):
        slot = block * BLOCK_R + tl.arange(0, BLOCK_R)
        source = position - (S - 1) + slot
        is_new = source >= first_position
        is_old = (source >= 0) & (source < first_position)
        page = tl.load(
            state_row_ptr + source // ROWS_PER_PAGE - first_page, mask=is_old, other=0
        ).to(tl.int64)
        new_row = (token - (S - 1) + slot) * stride_projected
        old_row = (page * ROWS_PER_PAGE + source % ROWS_PER_PAGE) * stride_state
        if RATIO == 4:
            column = (slot // 4 * C)[:, None] + columns[None, :]
            gate_column = column + 2 * C
        else:
            column = columns[None, :] + tl.zeros([BLOCK_R, 1], tl.int32)
            gate_column = column + C
        new = is_new[:, None] & (columns < C)[None, :]
        old = is_old[:, None] & (columns < C)[None, :]
        new_kv = tl.load(projected_ptr + new_row[:, None] + column, mask=new, other=0.0)
        old_kv = tl.load(state_ptr + old_row[:, None] + column, mask=old, other=0.0)
        new_gate = tl.load(projected_ptr + new_row[:, None] + gate_column, mask=new, other=0.0)
        old_gate = tl.load(state_ptr + old_row[:, None] + gate_column, mask=old, other=0.0)
        ape = tl.load(
            ape_ptr + slot[:, None] * C + columns[None, :], mask=(columns < C)[None, :], other=0.0
        )
        gate = tl.where(new, new_gate, old_gate) + ape
        gate = tl.where((source >= 0)[:, None], gate, float("-inf"))
        new_top = tl.maximum(top, tl.max(gate, axis=0))
        weight = tl.exp(gate - new_top[None, :])
        rescale = tl.exp(top - new_top)
        total = total * rescale + tl.sum(weight, axis=0)
        mixed = mixed * rescale + tl.sum(weight * tl.where(new, new_kv, old_kv), axis=0)
        top = new_top
    return mixed / total


@triton.jit
def _rotate(x, rotation_ptr, C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rotate the interleaved pairs of the last R of C values of x [BLOCK_C]."""
    even, odd = tl.split(tl.reshape(x, [BLOCK_C // 2, 2]))
    pair = tl.arange(0, BLOCK_C // 2) - (C - R) // 2
    is_rope = (pair >= 0) & (pair < R // 2)
    cos = tl.load(rotation_ptr + 2 * pair, mask=is_rope, other=1.0)
    sin = tl.load(rotation_ptr + 2 * pair + 1, mask=is_rope, other=0.0)
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [BLOCK_C])


@triton.jit
def _store_attention_row(
    row,
    page_ptr,
    offset,
    C: tl.constexpr,
    R: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_C)
    nope = tl.where(columns < C - R, row, 0.0)
    rounded, scale_bits = round_e4m3_groups(tl.reshape(nope, [BLOCK_C // GROUP, GROUP]))
    rounded = tl.reshape(rounded, [BLOCK_C]).to(tl.uint8, bitcast=True)
    row_ptr = page_ptr + offset * (C + R)
    tl.store(row_ptr + columns, rounded, mask=columns < C - R)
    rope_ptr = row_ptr.to(tl.pointer_type(tl.bfloat16))
    # Column c of the rope part lies at byte (C - R) + 2 (c - (C - R)).
    place = columns - (C - R) + (C - R) // 2
    tl.store(rope_ptr + place, row.to(tl.bfloat16), mask=(columns >= C - R) & (columns < C))
    groups = tl.arange(0, BLOCK_C // GROUP)
    exponent = tl.where(groups * GROUP < C - R, scale_bits >> 23, 0)
    scale_ptr = page_ptr + ROWS_PER_PAGE * (C + R) + offset * SCALE_BYTES
    tl.store(scale_ptr + groups, exponent.to(tl.uint8), mask=groups < SCALE_BYTES)


@triton.jit
def _store_index_key(
    row, page_ptr, offset, C: tl.constexpr, ROWS_PER_PAGE: tl.constexpr, BLOCK_C: tl.constexpr
):
    columns = tl.arange(0, BLOCK_C)
    rounded, scale_bits = round_e4m3_groups(row[None, :])
    rounded = tl.reshape(rounded, [BLOCK_C]).to(tl.uint8, bitcast=True)
    tl.store(page_ptr + offset * C + columns, rounded, mask=columns < C)
    scale = tl.reshape(scale_bits, [1]).to(tl.float32, bitcast=True)
    scale_ptr = (page_ptr + ROWS_PER_PAGE * C).to(tl.pointer_type(tl.float32))
    tl.store(scale_ptr + offset + tl.arange(0, 1), scale)


@triton.jit
def _part(
    projected_ptr,
    ape_ptr,
    norm_ptr,
    state_ptr,
    entry_ptr,
    positions_ptr,
    sequence_ptr,
    query_start_ptr,
    rotary_ptr,
    state_pages_ptr,
    state_first_ptr,
    entry_pages_ptr,
    entry_first_ptr,
    num_tokens,
    stride_projected,
    stride_state,
    stride_entry,
    stride_state_pages,
    stride_entry_pages,
    eps,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    WHOLE: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    ENTRY_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = tokens < num_tokens
    positions = tl.load(positions_ptr + tokens, mask=there, other=-1)
    there = positions >= 0
    sequence = tl.load(sequence_ptr + tokens, mask=there, other=0)
    after = tl.load(query_start_ptr + sequence + 1, mask=there, other=0)
    end = positions + after - tokens
    BEFORE: tl.constexpr = 4 if RATIO == 4 else 0
    kept = there & (positions >= end // RATIO * RATIO - BEFORE)
    if tl.max(kept.to(tl.int32), axis=0) > 0:
        first_page = tl.load(state_first_ptr + sequence, mask=kept, other=0)
        index = positions // STATE_ROWS - first_page
        table_row = state_pages_ptr + sequence.to(tl.int64) * stride_state_pages
        page = tl.load(table_row + index, mask=kept, other=0).to(tl.int64)
        slots = page * STATE_ROWS + positions % STATE_ROWS
        X: tl.constexpr = 4 * C if RATIO == 4 else 2 * C
        _keep(
            projected_ptr,
            state_ptr,
            tokens,
            slots,
            kept,
            stride_projected,
            stride_state,
            X,
            BLOCK_X,
        )
    complete = there & (positions % RATIO == RATIO - 1)
    left = tl.sum(complete.to(tl.int32), axis=0)
    last = -1
    while left > 0:
        left -= 1
        local = tl.arange(0, TOKENS)
        last = tl.min(tl.where(complete & (local > last), local, TOKENS), axis=0)
        token = tl.program_id(0).to(tl.int64) * TOKENS + last
        position = tl.load(positions_ptr + token)
        b = tl.load(sequence_ptr + token).to(tl.int64)
        first_position = position - (token - tl.load(query_start_ptr + b))
        mixed = _mix(
            projected_ptr,
            ape_ptr,
            state_ptr,
            state_pages_ptr + b * stride_state_pages,
            token,
            position,
            first_position,
            tl.load(state_first_ptr + b),
            stride_projected,
            stride_state,
            RATIO,
            STATE_ROWS,
            C,
            BLOCK_R,
            BLOCK_C,
        )
        columns = tl.arange(0, BLOCK_C)
        mixed = tl.where(columns < C, mixed, 0.0)
        norm = tl.load(norm_ptr + columns, mask=columns < C, other=0.0)
        row = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=0) / C + eps) * norm
        entry = position // RATIO
        row = _rotate(row, rotary_ptr + entry * RATIO * R, C, R, BLOCK_C)
        page_index = entry // ENTRY_ROWS - tl.load(entry_first_ptr + b)
        page = tl.load(entry_pages_ptr + b * stride_entry_pages + page_index).to(tl.int64)
        page_ptr = entry_ptr + page * stride_entry
        if WHOLE:
            _store_index_key(row, page_ptr, entry % ENTRY_ROWS, C, ENTRY_ROWS, BLOCK_C)
        else:
            _store_attention_row(
                row, page_ptr, entry % ENTRY_ROWS, C, R, ENTRY_ROWS, GROUP, SCALE_BYTES, BLOCK_C
            )


@triton.jit
def _compress_kernel(
    projected_a_ptr,
    ape_a_ptr,
    norm_a_ptr,
    state_a_ptr,
    entry_a_ptr,
    projected_b_ptr,
    ape_b_ptr,
    norm_b_ptr,
    state_b_ptr,
    entry_b_ptr,
    positions_ptr,
    sequence_ptr,
    query_start_ptr,
    rotary_ptr,
    state_pages_ptr,
    state_first_ptr,
    entry_pages_ptr,
    entry_first_ptr,
    num_tokens,
    stride_projected_a,
    stride_state_a,
    stride_entry_a,
    stride_projected_b,
    stride_state_b,
    stride_entry_b,
    stride_state_pages,
    stride_entry_pages,
    eps,
    RATIO: tl.constexpr,
    R: tl.constexpr,
    C_A: tl.constexpr,
    WHOLE_A: tl.constexpr,
    SCALE_BYTES_A: tl.constexpr,
    BLOCK_C_A: tl.constexpr,
    C_B: tl.constexpr,
    WHOLE_B: tl.constexpr,
    SCALE_BYTES_B: tl.constexpr,
    BLOCK_C_B: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    ENTRY_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    if tl.program_id(1) == 0:
        _part(
            projected_a_ptr,
            ape_a_ptr,
            norm_a_ptr,
            state_a_ptr,
            entry_a_ptr,
            positions_ptr,
            sequence_ptr,
            query_start_ptr,
            rotary_ptr,
            state_pages_ptr,
            state_first_ptr,
            entry_pages_ptr,
            entry_first_ptr,
            num_tokens,
            stride_projected_a,
            stride_state_a,
            stride_entry_a,
            stride_state_pages,
            stride_entry_pages,
            eps,
            RATIO,
            C_A,
            R,
            WHOLE_A,
            STATE_ROWS,
            ENTRY_ROWS,
            GROUP,
            SCALE_BYTES_A,
            TOKENS,
            BLOCK_R,
            BLOCK_C_A,
            BLOCK_X,
        )
    elif C_B > 0:
        _part(
            projected_b_ptr,
            ape_b_ptr,
            norm_b_ptr,
            state_b_ptr,
            entry_b_ptr,
            positions_ptr,
            sequence_ptr,
            query_start_ptr,
            rotary_ptr,
            state_pages_ptr,
            state_first_ptr,
            entry_pages_ptr,
            entry_first_ptr,
            num_tokens,
            stride_projected_b,
            stride_state_b,
            stride_entry_b,
            stride_state_pages,
            stride_entry_pages,
            eps,
            RATIO,
            C_B,
            R,
            WHOLE_B,
            STATE_ROWS,
            ENTRY_ROWS,
            GROUP,
            SCALE_BYTES_B,
            TOKENS,
            BLOCK_R,
            BLOCK_C_B,
            BLOCK_X,
        )


def _check(part: CompressPart, ratio: int, rope: int, entry_rows: int) -> None:
    """Raises ValueError where the kernel would not read or write what the contract says."""
    width = part.weight.norm.shape[0]
    num_values = (4 if ratio == 4 else 2) * width
    if part.weight.ratio != ratio:
        raise ValueError(f"parts have one ratio, got {part.weight.ratio} beside {ratio}")
    for name, tensor in (("projected", part.projected), ("state_pool", part.state_pool)):
        if tensor.dtype != torch.float32 or tensor.shape[1] != num_values or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be float32 rows of {num_values} values that lie together, "
                f"got {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
    pool = part.entry_pool
    if pool.dtype != torch.uint8 or pool.dim() != 2 or part.rounding == "none":
        raise ValueError(
            f"these kernels write packed entries (uint8, rounding 'nope' or 'whole'), "
            f"got {pool.dtype} {tuple(pool.shape)} and rounding {part.rounding!r}"
        )
    if part.rounding == "whole":
        wanted = keys_layout.page_bytes(entry_rows, width)
        if width > 128:
            raise ValueError(f"an index key has one scale and at most 128 values, got {width}")
    else:
        wanted = rows_layout.page_bytes(entry_rows, width, rope)
    if pool.shape[1] < wanted or rope > width or width % 2:
        raise ValueError(
            f"pages of {entry_rows} entries of {width} values, {rope} rope, take {wanted} bytes, "
            f"got {pool.shape[1]}"
        )


def compress(
    parts: tuple[CompressPart, ...],
    tokens: Tokens,
    rotary_LR: Tensor,
    eps: float,
    state_table: PageTable,
    entry_table: PageTable,
) -> None:
    """Complete entries and keep state for one or two parts in one launch, into packed pools."""
    num_tokens = tokens.positions.shape[0]
    if num_tokens == 0 or not parts:
        return
    if len(parts) > MAX_PARTS:
        raise ValueError(f"one launch takes at most {MAX_PARTS} compressors, got {len(parts)}")
    ratio, rope = parts[0].weight.ratio, 2 * rotary_LR.shape[1]
    arguments: list[Tensor] = []
    strides: list[int] = []
    sizes: list[tuple[int, bool, int, int]] = []
    for part in (parts[0], parts[-1]):
        _check(part, ratio, rope, entry_table.rows_per_page)
        weight = part.weight
        arguments += (part.projected, weight.ape, weight.norm, part.state_pool, part.entry_pool)
        strides += (part.projected.stride(0), part.state_pool.stride(0), part.entry_pool.stride(0))
        width, whole = weight.norm.shape[0], part.rounding == "whole"
        scales = 0 if whole else rows_layout.scale_bytes(width, rope)
        block = triton.next_power_of_2(width)
        sizes.append((width, whole, scales, block if whole else max(NOPE_GROUP, block)))
    (width_a, whole_a, scales_a, block_a), (width_b, whole_b, scales_b, block_b) = sizes
    tokens_per_program = 1 if tokens.max_query == 1 else PREFILL_TOKENS[ratio]
    num_warps = 4 if ratio == 4 else max(4, block_a // 32)
    _compress_kernel[(triton.cdiv(num_tokens, tokens_per_program), len(parts))](
        *arguments,
        tokens.positions,
        tokens.sequence,
        tokens.query_start,
        rotary_LR,
        state_table.pages,
        state_table.first,
        entry_table.pages,
        entry_table.first,
        num_tokens,
        *strides,
        state_table.pages.stride(0),
        entry_table.pages.stride(0),
        eps,
        RATIO=ratio,
        R=rope,
        C_A=width_a,
        WHOLE_A=whole_a,
        SCALE_BYTES_A=scales_a,
        BLOCK_C_A=block_a,
        C_B=width_b if len(parts) > 1 else 0,
        WHOLE_B=whole_b,
        SCALE_BYTES_B=scales_b,
        BLOCK_C_B=block_b,
        STATE_ROWS=state_table.rows_per_page,
        ENTRY_ROWS=entry_table.rows_per_page,
        GROUP=NOPE_GROUP,
        TOKENS=tokens_per_program,
        BLOCK_R=BLOCK_ROWS[ratio],
        BLOCK_X=min(512, 4 * block_a) if tokens_per_program > 1 else 2 * block_a,
        num_warps=num_warps,
    )
