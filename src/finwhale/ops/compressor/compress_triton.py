"""Compressors as one Triton kernel per layer: completed entries, and state for later steps.

A program processes one or a few adjacent tokens of one part: it mixes, normalises, rotates, rounds
and stores the entries that these tokens complete, and copies their rows that later steps need. For
an entry of ratio 128, one program per SLICE columns mixes, and the program that ends last does the
rest. Most tokens complete no entry and keep no state, so a decode step of ratio 128 costs little
more than its launch. The work for an entry is the same in every batch, so its bits depend only on
its own tokens. The kernel reads rows of this step from the projection and earlier rows from the
state pool. It writes only rows of this step to the pool, so no row is both read and written.

Bytes per prefill token: 4 X for its projected row of X values, in each part. The floors for 8192
tokens of Flash at 4.39 TB/s are 19 us in a C4 layer (X 2048 and 512) and 8 us in a C128 layer (X
1024).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.attention import NOPE_GROUP
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.attention.rotary_triton import rotate_row, rotation
from finwhale.ops.compressor import CompressPart
from finwhale.ops.indexer import layout
from finwhale.ops.indexer.fp4_triton import round_to_scale, scale_exponent
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.linear.quantise_triton import round_e4m3
from finwhale.ops.paging import BLOCK_TOKENS, MAX_DECODE_QUERY, Tokens
from finwhale.ops.rounding import fp4_group, is_power_of_two

MAX_PARTS = 2
# ratio -> number of adjacent tokens that one program processes in a prefill.
PREFILL_TOKENS = {4: 1, 128: 32}
# Columns of an entry of ratio 128 that one program mixes.
SLICE = 64
# log2 of the largest width of an index key.
MAX_LOG2_WIDTH = tl.constexpr(9)
MAX_SPREAD = tl.constexpr(layout.MAX_SPREAD)


@triton.jit
def _keep(rows, pool, kept, first_column, num_columns, BLOCK_X: tl.constexpr):
    """Copy columns of the kept tokens' projected rows to the state's pool.

    rows, pool: (pointer, numbers of the rows, stride).
    """
    projected_ptr, tokens, stride_projected = rows
    state_ptr, slots, stride_state = pool
    for start in range(0, num_columns, BLOCK_X):
        local = start + tl.arange(0, BLOCK_X)
        columns = first_column + local
        mask = kept[:, None] & (local < num_columns)[None, :]
        row = tl.load(
            projected_ptr + tokens[:, None] * stride_projected + columns[None, :], mask=mask
        )
        tl.store(state_ptr + slots[:, None] * stride_state + columns[None, :], row, mask=mask)


@triton.jit
def _mix(
    projected,
    state,
    ape_ptr,
    at,
    first_column,
    RATIO: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns from first_column on of the gated average of the S tokens up to `token`.

    at: the token, its position, and that of its sequence's first token in the step.
    """
    projected_ptr, stride_projected = projected
    state_ptr, state_row_ptr, stride_state = state
    token, position, first_position = at
    S: tl.constexpr = 8 if RATIO == 4 else RATIO
    columns = first_column + tl.arange(0, BLOCK)
    slot = tl.arange(0, S)
    ape_ptrs = ape_ptr + slot[:, None] * C + columns[None, :]
    ape = tl.load(ape_ptrs, mask=(columns < C)[None, :], other=0.0)
    source = position - (S - 1) + slot
    is_old = (source >= 0) & (source < first_position)
    page = tl.load(state_row_ptr + source // ROWS_PER_PAGE, mask=is_old, other=0).to(tl.int64)
    new_row = (token - (S - 1) + slot) * stride_projected
    old_row = (page * ROWS_PER_PAGE + source % ROWS_PER_PAGE) * stride_state
    # One load reads from both tensors: state rows are addressed relative to the projection.
    distance = (state_ptr.to(tl.int64) - projected_ptr.to(tl.int64)) // 4
    row = tl.multiple_of(tl.where(is_old, distance + old_row, new_row), 4)
    own = tl.where(slot < 4, 0, C) if RATIO == 4 else slot * 0
    gates: tl.constexpr = 2 * C if RATIO == 4 else C
    offsets = row[:, None] + own[:, None] + columns[None, :]
    mask = (source >= 0)[:, None] & (columns < C)[None, :]
    gate = tl.load(projected_ptr + offsets + gates, mask=mask, other=float("-inf"))
    kv = tl.load(projected_ptr + offsets, mask=mask, other=0.0)
    gate += ape
    top = tl.max(gate, axis=0)
    weight = tl.exp(gate - tl.where(columns < C, top, 0.0)[None, :])
    return tl.sum(weight * kv, axis=0) / tl.where(columns < C, tl.sum(weight, axis=0), 1.0)


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
    rounded, scale = round_e4m3(tl.reshape(nope, [BLOCK_C // GROUP, GROUP]), 1)
    rounded = tl.reshape(rounded, [BLOCK_C]).to(tl.uint8, bitcast=True)
    row_ptr = page_ptr + offset * (C + R)
    tl.store(row_ptr + columns, rounded, mask=columns < C - R)
    rope_ptr = row_ptr.to(tl.pointer_type(tl.bfloat16))
    # Column c of the rope part lies at byte (C - R) + 2 (c - (C - R)).
    rope_offsets = columns - (C - R) + (C - R) // 2
    tl.store(rope_ptr + rope_offsets, row.to(tl.bfloat16), mask=(columns >= C - R) & (columns < C))
    groups = tl.arange(0, BLOCK_C // GROUP)
    exponent = tl.where(groups * GROUP < C - R, scale.to(tl.int32, bitcast=True) >> 23, 0)
    scale_ptr = page_ptr + ROWS_PER_PAGE * (C + R) + offset * SCALE_BYTES
    tl.store(scale_ptr + groups, exponent.to(tl.uint8), mask=groups < SCALE_BYTES)


@triton.jit
def _hadamard(x, C: tl.constexpr):
    """x [C] times the Hadamard matrix of C without its factor, with the bits of rounding.hadamard.

    A pass replaces neighbours by their sum and difference, and moves these half the width apart, so
    that all passes are the same.
    """
    for i in tl.static_range(MAX_LOG2_WIDTH):
        if 2 << i <= C:
            even, odd = tl.split(tl.reshape(x, [C // 2, 2]))
            x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [1, 0]), [C])
    return x


@triton.jit
def _fp4_codes(x):
    """x [groups, values] -> e2m1 codes int32, and the exponent bytes of the groups' scales.

    Every scale is at least 2^-MAX_SPREAD times the row's largest (indexer/layout.py).
    """
    exponents = scale_exponent(tl.max(tl.abs(x), axis=1))
    exponents = tl.maximum(exponents, tl.max(exponents, axis=0) - MAX_SPREAD)
    size = tl.abs(round_to_scale(x, exponents[:, None]))
    size = size * ((254 - exponents) << 23).to(tl.float32, bitcast=True)[:, None]
    # The code of a value from 1 on is its exponent and one mantissa bit; 0.5 has code 1, 0 code 0.
    bits = (size.to(tl.int32, bitcast=True) >> 22) - 252
    codes = tl.maximum(bits, tl.minimum(2.0 * size, 1.0).to(tl.int32))
    return codes | ((x.to(tl.int32, bitcast=True) >> 28) & 8), exponents


@triton.jit
def _store_index_key(
    row,
    page_ptr,
    offset,
    C: tl.constexpr,
    ROWS_PER_PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE: tl.constexpr,
):
    """Rotate a key by the Hadamard matrix, round it to FP4 and pack it (indexer/layout.py)."""
    rotated = _hadamard(row, C) * SHARE
    codes, exponents = _fp4_codes(tl.reshape(rotated, [C // GROUP, GROUP]))
    low, high = tl.split(tl.reshape(codes & 7, [C // 2, 2]))
    signs = tl.permute(tl.reshape(codes >> 3, [C // 8, 2, 4]), [0, 2, 1])
    first, second = tl.split(tl.reshape(signs, [C // 2, 2]))
    columns = tl.arange(0, C // 2)
    codes = low | (second << 3) | (high << 4) | (first << 7)
    tl.store(page_ptr + offset * (C // 2) + columns, codes.to(tl.uint8))
    groups = tl.arange(0, C // GROUP)
    exponent_ptr = page_ptr + ROWS_PER_PAGE * (C // 2) + offset * (C // GROUP)
    tl.store(exponent_ptr + groups, exponents.to(tl.uint8))


@triton.jit
def _part(
    part,
    step,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    KEY: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    ENTRY_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    KEY_SHARE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MAX_VERIFY: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process TOKENS adjacent tokens of one part; the module's docstring has the steps."""
    # fmt: off
    (
        projected_ptr, ape_ptr, norm_ptr, state_ptr, entry_ptr, stride_projected, stride_state,
        stride_entry,
    ) = part
    (
        mixed_ptr, counters_ptr, positions_ptr, sequence_ptr, query_start_ptr, rotary_ptr,
        state_pages_ptr, state_first_ptr, entry_pages_ptr, entry_first_ptr, num_tokens,
        stride_state_pages, stride_entry_pages, eps,
    ) = step
    # fmt: on
    BEFORE: tl.constexpr = 4 if RATIO == 4 else 0
    first_token = tl.program_id(0).to(tl.int64) * TOKENS
    local = tl.arange(0, TOKENS)
    tokens = first_token + local
    positions = tl.load(positions_ptr + tokens, mask=tokens < num_tokens, other=-1)
    sequence = tl.load(sequence_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.int64)
    there = positions >= 0
    complete = there & (positions % RATIO == RATIO - 1)
    if RATIO == 4:
        # If token n + 8 belongs to the same sequence, do not keep the row of token n, unless a
        # block ends here.
        ahead = tokens + 8 < num_tokens
        far = tl.load(positions_ptr + tokens + 8, mask=ahead, other=-1)
        far_sequence = tl.load(sequence_ptr + tokens + 8, mask=ahead, other=0)
        within = (far == positions + 8) & (far_sequence == sequence)
        ending = positions % BLOCK_TOKENS >= BLOCK_TOKENS - BEFORE
        if tl.max((complete | (there & (ending | ~within))).to(tl.int32), axis=0) == 0:
            wait_for_last(PDL)
            return
    begins = tl.load(query_start_ptr + sequence, mask=there, other=0)
    ends = tl.load(query_start_ptr + sequence + 1, mask=there, other=0)
    state_first = tl.load(state_first_ptr + sequence, mask=there, other=0)
    entry_first = tl.load(entry_first_ptr + sequence, mask=there, other=0)
    first_column = tl.program_id(1) * SLICE if SLICES > 1 else 0
    # In a step that may verify drafts, only the first token is certain.
    end = positions + ends - tokens
    end = tl.where(ends - begins > MAX_VERIFY, end, positions + begins - tokens + 1)
    kept = there & (positions >= end // RATIO * RATIO - BEFORE)
    if RATIO == 4:
        kept |= there & (positions % BLOCK_TOKENS >= BLOCK_TOKENS - BEFORE)
    table_row = state_pages_ptr + sequence * stride_state_pages
    number = positions // STATE_ROWS - state_first
    kept_page = tl.load(table_row + number, mask=kept & (number >= 0), other=0)
    kept &= kept_page > 0
    wait_for_last(PDL)

    left = tl.sum(complete.to(tl.int32), axis=0)
    last = -1
    while left > 0:
        left -= 1
        last = tl.min(tl.where(complete & (local > last), local, TOKENS), axis=0)
        this = local == last
        token = first_token + last
        position = tl.sum(tl.where(this, positions, 0), axis=0)
        b = tl.sum(tl.where(this, sequence, 0), axis=0)
        first_position = position - token + tl.sum(tl.where(this, begins, 0), axis=0)
        first_state_page = tl.sum(tl.where(this, state_first, 0), axis=0)
        entry = position // RATIO
        page_index = entry // ENTRY_ROWS - tl.sum(tl.where(this, entry_first, 0), axis=0)
        page = tl.load(entry_pages_ptr + b * stride_entry_pages + page_index).to(tl.int64)
        columns = tl.arange(0, BLOCK_C)
        norm = tl.load(norm_ptr + columns, mask=columns < C, other=0.0)
        cos, sin = rotation(rotary_ptr + entry * RATIO * R, 0, C, R, BLOCK_C)
        at = token, position, first_position
        state_row_ptr = state_pages_ptr + b * stride_state_pages - first_state_page
        state = state_ptr, state_row_ptr, stride_state
        width: tl.constexpr = SLICE if SLICES > 1 else BLOCK_C
        # fmt: off
        mixed = _mix((projected_ptr, stride_projected), state, ape_ptr, at, first_column,
                     RATIO, STATE_ROWS, C, width)
        # fmt: on
        is_last_slice = True
        if SLICES > 1:
            slice_columns = first_column + tl.arange(0, SLICE)
            tl.store(mixed_ptr + token * C + slice_columns, mixed, mask=slice_columns < C)
            # All threads must store their values before the count announces them to other programs.
            tl.debug_barrier()
            is_last_slice = tl.atomic_add(counters_ptr + token, 1, sem="acq_rel") == SLICES - 1
        if is_last_slice:
            if SLICES > 1:
                tl.debug_barrier()
                tl.store(counters_ptr + token, 0)
                row = tl.load(
                    mixed_ptr + token * C + columns,
                    mask=columns < C,
                    other=0.0,
                    cache_modifier=".cg",
                )
            else:
                row = mixed
            row = row * tl.rsqrt(tl.sum(row * row, axis=0) / C + eps) * norm
            row = rotate_row(row, cos, sin, BLOCK_C)
            page_ptr = entry_ptr + page * stride_entry
            if KEY:
                _store_index_key(
                    row, page_ptr, entry % ENTRY_ROWS, C, ENTRY_ROWS, KEY_GROUP, KEY_SHARE
                )
            else:
                # fmt: off
                _store_attention_row(row, page_ptr, entry % ENTRY_ROWS, C, R, ENTRY_ROWS, GROUP,
                                     SCALE_BYTES, BLOCK_C)
                # fmt: on

    if tl.max(kept.to(tl.int32), axis=0) > 0:
        rows = projected_ptr, tokens, stride_projected
        slots = kept_page.to(tl.int64) * STATE_ROWS + positions % STATE_ROWS
        pool = state_ptr, slots, stride_state
        if SLICES > 1:
            for half in range(2):
                width = tl.minimum(SLICE, C - first_column)
                _keep(rows, pool, kept, half * C + first_column, width, SLICE)
        else:
            _keep(rows, pool, kept, 0, 4 * C if RATIO == 4 else 2 * C, BLOCK_X)


@triton.jit(do_not_specialize=["num_tokens"])
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
    mixed_ptr,
    counters_ptr,
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
    KEY_A: tl.constexpr,
    SCALE_BYTES_A: tl.constexpr,
    KEY_GROUP_A: tl.constexpr,
    KEY_SHARE_A: tl.constexpr,
    BLOCK_C_A: tl.constexpr,
    C_B: tl.constexpr,
    KEY_B: tl.constexpr,
    SCALE_BYTES_B: tl.constexpr,
    KEY_GROUP_B: tl.constexpr,
    KEY_SHARE_B: tl.constexpr,
    BLOCK_C_B: tl.constexpr,
    STATE_ROWS: tl.constexpr,
    ENTRY_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MAX_VERIFY: tl.constexpr,
    TOKENS: tl.constexpr,
    SLICES: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_X: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    # fmt: off
    part_a = (
        projected_a_ptr, ape_a_ptr, norm_a_ptr, state_a_ptr, entry_a_ptr, stride_projected_a,
        stride_state_a, stride_entry_a,
    )
    part_b = (
        projected_b_ptr, ape_b_ptr, norm_b_ptr, state_b_ptr, entry_b_ptr, stride_projected_b,
        stride_state_b, stride_entry_b,
    )
    step = (
        mixed_ptr, counters_ptr, positions_ptr, sequence_ptr, query_start_ptr, rotary_ptr,
        state_pages_ptr, state_first_ptr, entry_pages_ptr, entry_first_ptr, num_tokens,
        stride_state_pages, stride_entry_pages, eps,
    )
    if (tl.program_id(1) == 0) | (C_B == 0):
        _part(part_a, step, RATIO, C_A, R, KEY_A, STATE_ROWS, ENTRY_ROWS, GROUP, SCALE_BYTES_A,
              KEY_GROUP_A, KEY_SHARE_A, BLOCK_TOKENS, MAX_VERIFY, TOKENS, SLICES, SLICE, BLOCK_C_A,
              BLOCK_X, PDL)
    if C_B > 0 and tl.program_id(1) == 1:
        _part(part_b, step, RATIO, C_B, R, KEY_B, STATE_ROWS, ENTRY_ROWS, GROUP, SCALE_BYTES_B,
              KEY_GROUP_B, KEY_SHARE_B, BLOCK_TOKENS, MAX_VERIFY, TOKENS, SLICES, SLICE, BLOCK_C_B,
              BLOCK_X, PDL)
    # fmt: on


def _check(part: CompressPart, ratio: int, rope: int) -> None:
    """Raise ValueError if the kernel does not support the arguments."""
    pool, entry_rows = part.entries.pool, part.entries.table.rows_per_page
    width = part.weight.norm.shape[0]
    num_values = (4 if ratio == 4 else 2) * width
    if part.weight.ratio != ratio:
        raise ValueError(f"all parts must have the same ratio, got {part.weight.ratio} and {ratio}")
    for name, tensor in (("projected", part.projected), ("state", part.state.pool)):
        if tensor.dtype != torch.float32 or tensor.shape[1] != num_values or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} must be float32 rows of {num_values} contiguous values, "
                f"got {tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}"
            )
        if tensor.stride(0) % 4 or width % 4 or tensor.data_ptr() % 16:
            raise ValueError(
                f"rows of {name} and their parts of {width} values must begin at multiples of 16 "
                f"bytes, got strides {tensor.stride()}"
            )
    if pool.dtype != torch.uint8 or pool.dim() != 2 or part.rounding == "none":
        raise ValueError(
            f"these kernels write packed entries (uint8, rounding 'nope' or 'key'), "
            f"got {pool.dtype} {tuple(pool.shape)} and rounding {part.rounding!r}"
        )
    if part.rounding == "key":
        wanted = layout.IndexKey(width).page_bytes(entry_rows)
        if not is_power_of_two(width) or width < 2:
            raise ValueError(f"an index key's width must be a power of two, got {width}")
    else:
        wanted = RopeRow(width, rope).page_bytes(entry_rows)
    if pool.shape[1] < wanted or rope > width or width % 2:
        raise ValueError(
            f"pages of {entry_rows} entries of {width} values, {rope} rope, take {wanted} bytes, "
            f"got {pool.shape[1]}"
        )


def _exchange(tokens: Tokens, width: int) -> tuple[Tensor, Tensor]:
    """Memory for the programs of one entry: mixed columns, and a count of the programs that ended.

    The counts are 0 before and after each launch, so the layers of a step share them.
    """
    device, num_tokens = tokens.positions.device, tokens.positions.shape[0]
    if not width:
        return tokens.positions, tokens.positions
    counters = tokens.cache.compress_counters
    if counters is None:
        counters = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        tokens.cache.compress_counters = counters
    return torch.empty(num_tokens, width, dtype=torch.float32, device=device), counters


def _sizes(part: CompressPart, rope: int, letter: str) -> dict[str, Any]:
    """The kernel's constants that are those of a part, `letter`."""
    width, key = part.weight.norm.shape[0], part.rounding == "key"
    block = triton.next_power_of_2(width)
    sizes = {
        "C": width,
        "KEY": key,
        "SCALE_BYTES": 0 if key else RopeRow(width, rope).scale_bytes,
        "KEY_GROUP": fp4_group(width),
        "KEY_SHARE": width**-0.5,
        "BLOCK_C": block if key else max(NOPE_GROUP, block),
    }
    return {f"{name}_{letter}": value for name, value in sizes.items()}


def compress(
    parts: tuple[CompressPart, ...],
    tokens: Tokens,
    rotary_LR: Tensor,
    eps: float,
    max_verify_tokens: int,
    *,
    early_launch: bool = False,
) -> None:
    """Complete entries and keep state for one or two parts in one launch, into packed pools.

    early_launch: see `launch_options`.
    """
    num_tokens = tokens.positions.shape[0]
    if num_tokens == 0 or not parts:
        return
    # The kernel skips a token n if token n + 8 of the step belongs to the same sequence.
    assert max_verify_tokens <= MAX_DECODE_QUERY <= 8, max_verify_tokens
    if len(parts) > MAX_PARTS:
        raise ValueError(f"one launch takes at most {MAX_PARTS} compressors, got {len(parts)}")
    ratio, rope = parts[0].weight.ratio, 2 * rotary_LR.shape[1]
    state_table, entry_table = parts[0].state.table, parts[0].entries.table
    arguments: list[Tensor] = []
    strides: list[int] = []
    for part in (parts[0], parts[-1]):
        _check(part, ratio, rope)
        weight, pools = part.weight, (part.state.pool, part.entries.pool)
        arguments += (part.projected, weight.ape, weight.norm, *pools)
        strides += (part.projected.stride(0), *(pool.stride(0) for pool in pools))
    sizes = _sizes(parts[0], rope, "A") | _sizes(parts[-1], rope, "B")
    if len(parts) == 1:
        sizes["C_B"] = 0
    few, width, block = tokens.max_query <= MAX_DECODE_QUERY, sizes["C_A"], sizes["BLOCK_C_A"]
    tokens_per_program = 1 if few else PREFILL_TOKENS[ratio]
    slices = triton.cdiv(width, SLICE) if ratio == 128 else 1
    programs = (triton.cdiv(num_tokens, tokens_per_program), max(slices, len(parts)))
    _compress_kernel[programs](
        *arguments,
        *_exchange(tokens, width if slices > 1 else 0),
        *(tokens.positions, tokens.sequence, tokens.query_start, rotary_LR),
        *(state_table.pages, state_table.first, entry_table.pages, entry_table.first),
        num_tokens,
        *strides,
        *(state_table.pages.stride(0), entry_table.pages.stride(0), eps),
        RATIO=ratio,
        R=rope,
        **sizes,
        STATE_ROWS=state_table.rows_per_page,
        ENTRY_ROWS=entry_table.rows_per_page,
        GROUP=NOPE_GROUP,
        BLOCK_TOKENS=BLOCK_TOKENS,
        MAX_VERIFY=max_verify_tokens,
        TOKENS=tokens_per_program,
        SLICES=slices,
        SLICE=SLICE,
        BLOCK_X=min(512, 4 * block) if tokens_per_program > 1 else 2 * block,
        num_warps=8,
        **launch_options(early_launch),
    )
