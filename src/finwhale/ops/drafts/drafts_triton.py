"""The operators around drafts as Triton kernels, one launch each (and a fill in `make_blocks`).

The launches of the integer kernels have one signature for any step of an engine, because they
specialise on no size and no alignment. A confidence takes one program, which reads H^2 D float32
weights from L2: 256 KB with Flash.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.drafts import (
    BlockShape,
    ConfidenceWeight,
    DraftBlock,
    PlannedTokens,
    VerifiedStep,
)
from finwhale.ops.launch import check_contiguous
from finwhale.ops.mhc import MhcParams
from finwhale.ops.paging import PageTable, Tokens

BLOCK_N = 128  # tokens of a program that continues a step
# `_confidence_kernel` loads each residual stream in blocks of BLOCK_D values.
BLOCK_D = 512


@triton.jit(
    do_not_specialize=["N", "carrying", "last_size"],
    do_not_specialize_on_alignment=[
        *("known_ids_ptr", "sources_ptr", "planned_ptr", "links_ptr", "last_ptr"),
        *("token_ids_ptr", "token_positions_ptr"),
    ],
)
def _continue_kernel(
    known_ids_ptr,
    sources_ptr,
    planned_ptr,
    links_ptr,
    last_ptr,
    token_ids_ptr,
    token_positions_ptr,
    N,
    carrying,
    last_size,
    BLOCK_N: tl.constexpr,
):
    """Write ids and positions of a block of tokens. Links below `carrying` continue the last step.

    last_size: number of the next tokens in last_ptr, after which the advances follow.
    """
    n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < N
    link = tl.load(links_ptr + n, mask=inside, other=0)
    source = tl.load(sources_ptr + n, mask=inside, other=0)
    planned = tl.load(planned_ptr + n, mask=inside, other=0)
    continues = link < carrying
    known = tl.load(known_ids_ptr + source, mask=inside & (continues == 0), other=0)
    carried = tl.load(last_ptr + link, mask=inside & continues, other=0)
    advanced = tl.load(last_ptr + last_size + link, mask=inside, other=0)
    tl.store(token_ids_ptr + n, tl.where(continues, carried, known), mask=inside)
    tl.store(token_positions_ptr + n, planned + advanced, mask=inside)


@triton.jit(
    do_not_specialize=["N"],
    do_not_specialize_on_alignment=[
        *("chosen_ptr", "token_ids_ptr", "positions_ptr", "first_token_ptr", "token_indices_ptr"),
        *("next_ids_ptr", "advanced_ptr", "last_ptr", "last_positions_ptr"),
    ],
)
def _accept_kernel(
    chosen_ptr,
    token_ids_ptr,
    positions_ptr,
    first_token_ptr,
    token_indices_ptr,
    next_ids_ptr,
    advanced_ptr,
    last_ptr,
    last_positions_ptr,
    N,
    P: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Accept a sequence's drafts."""
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_W)
    token_index = tl.load(token_indices_ptr + b * P + k, mask=k < P, other=0x7FFFFFFF)
    drafted = token_index < N - 1
    chosen = tl.load(chosen_ptr + token_index, mask=drafted, other=0)
    draft = tl.load(token_ids_ptr + token_index + 1, mask=drafted, other=0)
    accepted = tl.min(tl.where(drafted & (chosen == draft), P, k), axis=0)
    last = tl.load(first_token_ptr + b) + accepted
    tl.store(next_ids_ptr + b * (P + 1), tl.load(chosen_ptr + last))
    counts = tl.full([BLOCK_W], 0, tl.int64) + accepted
    tl.store(advanced_ptr + b * (P + 1) + k, counts, mask=k <= P)
    tl.store(last_ptr + b, last)
    tl.store(last_positions_ptr + b, tl.load(positions_ptr + last))


@triton.jit(
    do_not_specialize=["B", "stride_newest", "stride_pages", "num_pages", "noise_id", "window"],
    do_not_specialize_on_alignment=[
        *("newest_ptr", "positions_ptr", "sequence_ptr", "query_start_ptr", "pages_ptr"),
        *("first_ptr", "ids_ptr", "block_positions_ptr", "block_sequence_ptr"),
        *("block_start_ptr", "slots_ptr"),
    ],
)
def _block_kernel(
    newest_ptr,
    positions_ptr,
    sequence_ptr,
    query_start_ptr,
    pages_ptr,
    first_ptr,
    ids_ptr,
    block_positions_ptr,
    block_sequence_ptr,
    block_start_ptr,
    slots_ptr,
    B,
    stride_newest,
    stride_pages,
    num_pages,
    noise_id,
    window,
    ROWS_PER_PAGE: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Make a sequence's block."""
    b = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_G)
    last = tl.load(positions_ptr + b)
    real = last >= 0
    newest = tl.load(newest_ptr + b * stride_newest)
    at = b * G + k
    noise = tl.zeros([BLOCK_G], tl.int64) + noise_id
    tl.store(ids_ptr + at, tl.where(k == 0, newest, noise), mask=k < G)
    tl.store(block_positions_ptr + at, tl.where(real, last + 1 + k, last), mask=k < G)
    sequence = tl.zeros([BLOCK_G], tl.int32) + tl.load(sequence_ptr + b)
    tl.store(block_sequence_ptr + at, sequence, mask=k < G)
    tl.store(block_start_ptr + b, tl.load(query_start_ptr + b) * G)
    if b == B - 1:
        tl.store(block_start_ptr + B, tl.load(query_start_ptr + B) * G)
    row, j = k[:, None], k[None, :]
    later = G - 1 - row
    offset = tl.where(j < later, row + 1 + j, row - window - (j - later))
    seen = last + 1 + offset
    there = (seen >= 0) & real
    seen = tl.maximum(seen, 0)
    # The table of a sequence without these rows may be shorter.
    page_index = seen // ROWS_PER_PAGE - tl.load(first_ptr + b)
    page_index = tl.minimum(tl.maximum(page_index, 0), num_pages - 1)
    inside = (row < G) & (j < G)
    page = tl.load(pages_ptr + b * stride_pages + page_index, mask=inside & there, other=0)
    slot = page.to(tl.int64) * ROWS_PER_PAGE + seen % ROWS_PER_PAGE
    out = slots_ptr + (b * G + row) * G + j
    tl.store(out, tl.where(there, slot, -1).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["out_ptr"])
def _score_kernel(
    streams_ptr,
    fn_ptr,
    scale_ptr,
    base_ptr,
    proj_ptr,
    out_ptr,
    stride_b,
    stride_k,
    eps,
    rms_eps,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Score the residual streams of a draft.

    The projection is applied to each residual stream, before the streams are weighted and added, so
    that one pass over them is enough.
    """
    b, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = tl.arange(0, BLOCK_H)
    row = streams_ptr + b * stride_b + k.to(tl.int64) * stride_k
    squares = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    projected = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_H, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        at = h[:, None] * D + d[None, :]
        inside = (h < H)[:, None] & (d < D)[None, :]
        x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
        proj = tl.load(proj_ptr + d, mask=d < D, other=0.0)
        fn = tl.load(
            fn_ptr + h[:, None, None] * (H * D) + at[None, :, :],
            mask=(h < H)[:, None, None] & inside[None, :, :],
            other=0.0,
        )
        squares += x * x
        projected += x * proj[None, :]
        mixed += x[None, :, :] * fn
    mean = tl.sum(tl.sum(squares, axis=1), axis=0) / (H * D)
    mixes = tl.sum(tl.sum(mixed, axis=2), axis=1) * tl.rsqrt(mean + rms_eps)
    base = tl.load(base_ptr + h, mask=h < H, other=0.0)
    shares = tl.sigmoid(mixes * tl.load(scale_ptr) + base) + eps
    score = tl.sum(tl.where(h < H, shares * tl.sum(projected, axis=1), 0.0), axis=0)
    tl.store(out_ptr + b * tl.num_programs(1) + k, score)


@triton.jit(
    do_not_specialize=["stride_newest", "D"],
    do_not_specialize_on_alignment=["scores_ptr", "newest_ptr", "drafts_ptr", "out_ptr"],
)
def _confidence_kernel(
    scores_ptr,
    proj_ptr,
    markov_ptr,
    newest_ptr,
    drafts_ptr,
    out_ptr,
    stride_newest,
    D,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Estimate a draft's confidence. R is 0 if it does not read the Markov head's row."""
    b, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    draft = b * tl.num_programs(1) + k
    score = tl.load(scores_ptr + draft)
    if R > 0:
        before = tl.load(newest_ptr + b * stride_newest)
        before = tl.where(k > 0, tl.load(drafts_ptr + draft - 1, mask=k > 0, other=0), before)
        r = tl.arange(0, BLOCK_R)
        markov = tl.load(markov_ptr + before * R + r, mask=r < R, other=0.0).to(tl.float32)
        score += tl.sum(markov * tl.load(proj_ptr + D + r, mask=r < R, other=0.0), axis=0)
    tl.store(out_ptr + draft, tl.sigmoid(score))


def continue_tokens(
    planned: PlannedTokens, last_2LW: Tensor, ids_N: Tensor, positions_N: Tensor
) -> None:
    tensors = {
        "ids_S": planned.ids_S,
        "sources_N": planned.sources_N,
        "planned_positions_N": planned.positions_N,
        "links_N": planned.links_N,
        "last_2LW": last_2LW,
        "ids_N": ids_N,
        "positions_N": positions_N,
    }
    check_contiguous(**tensors)
    num_tokens, (_, rows, width) = len(ids_N), last_2LW.shape
    if num_tokens:
        _continue_kernel[(triton.cdiv(num_tokens, BLOCK_N),)](
            *tensors.values(),
            *(num_tokens, (rows - 1) * width, rows * width),
            BLOCK_N=BLOCK_N,
            num_warps=4,
        )


def accept_drafts(
    chosen_N: Tensor, step: VerifiedStep, next_ids_BW: Tensor, advanced_BW: Tensor
) -> tuple[Tensor, Tensor]:
    count, most = step.token_indices_BP.shape
    tensors = {
        "chosen_N": chosen_N,
        "ids_N": step.ids_N,
        "positions_N": step.positions_N,
        "first_B": step.first_B,
        "token_indices_BP": step.token_indices_BP,
        "next_ids_BW": next_ids_BW,
        "advanced_BW": advanced_BW,
    }
    check_contiguous(**tensors)
    if next_ids_BW.shape != (count, most + 1) or advanced_BW.shape != (count, most + 1):
        raise ValueError(f"{most} drafts need results of shape {(count, most + 1)}")
    last_B, positions_B = torch.empty_like(step.first_B), torch.empty_like(step.first_B)
    if count:
        _accept_kernel[(count,)](
            *tensors.values(),
            last_B,
            positions_B,
            len(chosen_N),
            P=most,
            BLOCK_W=triton.next_power_of_2(most + 1),
            num_warps=1,
        )
    return last_B, positions_B


def make_blocks(newest_B: Tensor, last: Tokens, table: PageTable, shape: BlockShape) -> DraftBlock:
    count, rows = len(newest_B), shape.num_tokens
    # Without a launch, while launches are recorded, these are still ids.
    ids = newest_B.new_zeros(count * rows)
    positions = newest_B.new_empty(count * rows)
    sequence = last.sequence.new_empty(count * rows)
    query_start = torch.empty_like(last.query_start) if count else last.query_start.clone()
    slots = table.pages.new_empty(count * rows, rows)
    check_contiguous(
        positions=last.positions,
        sequence=last.sequence,
        query_start=last.query_start,
        first=table.first,
    )
    if table.pages.stride(1) != 1:
        raise ValueError(f"a row's pages must be contiguous, got strides {table.pages.stride()}")
    if count:
        _block_kernel[(count,)](
            *(newest_B, last.positions, last.sequence, last.query_start),
            *(table.pages, table.first),
            *(ids, positions, sequence, query_start, slots),
            *(count, newest_B.stride(0), table.pages.stride(0), table.pages.shape[1]),
            *(shape.noise_id, shape.window),
            ROWS_PER_PAGE=table.rows_per_page,
            G=rows,
            BLOCK_G=triton.next_power_of_2(rows),
            num_warps=1,
        )
    tokens = Tokens(
        positions=positions,
        sequence=sequence,
        query_start=query_start,
        max_len=last.max_len + rows,
        max_query=rows,
    )
    return DraftBlock(ids, tokens, slots)


def draft_confidences(
    streams_BKHD: Tensor, newest_B: Tensor, ids_BK: Tensor, w: ConfidenceWeight, params: MhcParams
) -> Tensor:
    count, num_drafts, streams, width = streams_BKHD.shape
    head, markov, rank = w.hc_head, w.markov_w1, 0
    check_contiguous(fn=head.fn, base=head.base, proj=w.proj, ids_BK=ids_BK)
    if markov is not None:
        check_contiguous(markov_w1=markov)
        rank = markov.shape[1]
    if streams_BKHD.stride()[2:] != (width, 1):
        raise ValueError(f"a draft's streams are contiguous, got strides {streams_BKHD.stride()}")
    shape, device = (count, num_drafts), streams_BKHD.device
    scores_BK, out_BK = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
    if out_BK.numel() == 0:
        return out_BK
    block_d = min(BLOCK_D, triton.next_power_of_2(width))
    _score_kernel[shape](
        *(streams_BKHD, head.fn, head.scale, head.base, w.proj, scores_BK),
        *(streams_BKHD.stride(0), streams_BKHD.stride(1)),
        *(params.eps, params.rms_eps),
        H=streams,
        D=width,
        BLOCK_H=triton.next_power_of_2(streams),
        BLOCK_D=block_d,
        num_warps=max(1, block_d // 32),
    )
    _confidence_kernel[shape](
        *(scores_BK, w.proj, w.proj if markov is None else markov, newest_B, ids_BK, out_BK),
        *(newest_B.stride(0), w.proj.shape[1] - rank),
        R=rank,
        BLOCK_R=triton.next_power_of_2(max(1, rank)),
        num_warps=1,
    )
    return out_BK
