"""The latents of pairs of tokens as one Triton kernel with one program per token.

The program of a pair's second token mixes and normalises both rows. The program of a row that later
steps may need copies it to the state. The kernel reads earlier steps' rows from the state and
writes only rows of this step, so no row is both read and written.

Bytes per token: 8 C for its projected row of two parts of C values, and 4 C for its latent. The
floor for 8192 tokens of Flash (C 512) at 4.39 TB/s is 11.5 us; the floor for a few tokens is the
launch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.paging import CacheRows, Tokens

VALUES_PER_WARP = 128


@triton.jit
def _merge_pairs_kernel(
    projected_ptr,
    norm_ptr,
    state_ptr,
    out_ptr,
    positions_ptr,
    sequence_ptr,
    query_start_ptr,
    pages_ptr,
    first_ptr,
    stride_projected,
    stride_state,
    stride_pages,
    eps,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_VERIFY: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_C)
    mask = column < C
    position = tl.load(positions_ptr + token)
    sequence = tl.load(sequence_ptr + token).to(tl.int64)
    begin = tl.load(query_start_ptr + sequence)
    end = tl.load(query_start_ptr + sequence + 1)
    pages_ptr += sequence * stride_pages - tl.load(first_ptr + sequence)
    norm = tl.load(norm_ptr + column, mask=mask, other=0.0)
    wait_for_last(PDL)
    own_ptr = projected_ptr + token * stride_projected + column
    kv = tl.load(own_ptr, mask=mask, other=0.0)
    gate = tl.load(own_ptr + C, mask=mask, other=0.0)
    latent = tl.zeros([BLOCK_C], tl.float32)
    if (position >= 0) & (position % 2 == 1):
        before = position - 1
        before_ptr = own_ptr - stride_projected
        if token == begin:
            page = tl.load(pages_ptr + before // ROWS).to(tl.int64)
            before_ptr = state_ptr + (page * ROWS + before % ROWS) * stride_state + column
        before_kv = tl.load(before_ptr, mask=mask, other=0.0)
        before_gate = tl.load(before_ptr + C, mask=mask, other=0.0)
        highest = tl.maximum(before_gate, gate)
        before_weight, weight = tl.exp(before_gate - highest), tl.exp(gate - highest)
        mixed = (before_weight * before_kv + weight * kv) / (before_weight + weight)
        latent = mixed * tl.rsqrt(tl.sum(mixed * mixed) / C + eps) * norm
    tl.store(out_ptr + token * C + column, latent, mask=mask)

    # In a step that may verify drafts, only the first token is certain.
    certain = tl.where(end - begin > MAX_VERIFY, end, begin + 1)
    if (position >= 0) & (position >= (position - token + certain) // 2 * 2):
        page = tl.load(pages_ptr + position // ROWS).to(tl.int64)
        kept_ptr = state_ptr + (page * ROWS + position % ROWS) * stride_state + column
        tl.store(kept_ptr, kv, mask=mask)
        tl.store(kept_ptr + C, gate, mask=mask)


def merge_pairs(
    projected_NX: Tensor,
    norm_C: Tensor,
    state: CacheRows,
    tokens: Tokens,
    eps: float,
    max_verify_tokens: int,
    *,
    early_launch: bool = False,
) -> Tensor:
    """projected's rows may be strided. early_launch: see `launch_options`."""
    num_tokens, width, table = len(projected_NX), len(norm_C), state.table
    for name, rows in (("projected", projected_NX), ("state", state.pool)):
        if rows.dtype != torch.float32 or rows.shape[1] != 2 * width or rows.stride(1) != 1:
            raise ValueError(
                f"{name} must be float32 rows of {2 * width} contiguous values, "
                f"got {rows.dtype} {list(rows.shape)}, strides {rows.stride()}"
            )
    latents_NC = projected_NX.new_empty(num_tokens, width)
    if num_tokens == 0:
        return latents_NC
    block = triton.next_power_of_2(width)
    _merge_pairs_kernel[(num_tokens,)](
        *(projected_NX, norm_C, state.pool, latents_NC, tokens.positions, tokens.sequence),
        *(tokens.query_start, table.pages, table.first, projected_NX.stride(0)),
        *(state.pool.stride(0), table.pages.stride(0), eps),
        C=width,
        ROWS=table.rows_per_page,
        MAX_VERIFY=max_verify_tokens,
        BLOCK_C=block,
        num_warps=max(1, min(8, block // VALUES_PER_WARP)),
        **launch_options(early_launch),
    )
    return latents_NC
