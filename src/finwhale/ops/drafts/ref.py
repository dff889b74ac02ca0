"""The reference implementation of the operators around drafts."""

import torch
from torch import Tensor

from finwhale.ops.drafts import (
    BlockShape,
    ConfidenceWeight,
    DraftBlock,
    PlannedTokens,
    VerifiedStep,
)
from finwhale.ops.mhc import MhcParams
from finwhale.ops.paging import PageTable, Tokens


def continue_tokens(
    planned: PlannedTokens, last_2LW: Tensor, ids_N: Tensor, positions_N: Tensor
) -> None:
    carried, advanced = last_2LW.flatten(1).index_select(1, planned.links_N)
    continues = planned.links_N < last_2LW[0, :-1].numel()
    known = planned.ids_S.index_select(0, planned.sources_N)
    torch.where(continues, carried, known, out=ids_N)
    torch.add(planned.positions_N, advanced, out=positions_N)


def accept_drafts(
    chosen_N: Tensor, step: VerifiedStep, next_ids_BW: Tensor, advanced_BW: Tensor
) -> tuple[Tensor, Tensor]:
    last_token = len(chosen_N) - 1
    drafted = step.token_indices_BP < last_token
    token_indices = step.token_indices_BP.clamp(max=last_token)
    drafts = step.ids_N[(token_indices + 1).clamp(max=last_token)]
    accepted_B = (drafted & (chosen_N[token_indices] == drafts)).cumprod(1).sum(1)
    last_B = step.first_B + accepted_B
    next_ids_BW[:, 0] = chosen_N[last_B]
    advanced_BW.copy_(accepted_B[:, None])
    return last_B, step.positions_N[last_B]


def make_blocks(newest_B: Tensor, last: Tokens, table: PageTable, shape: BlockShape) -> DraftBlock:
    rows = shape.num_tokens
    ids = newest_B.new_full((len(newest_B), rows), shape.noise_id)
    ids[:, 0] = newest_B
    start = last.positions[:, None]
    steps_G = torch.arange(1, rows + 1, device=newest_B.device)
    positions_BG = torch.where(start < 0, start, start + steps_G)
    tokens = Tokens(
        positions=positions_BG.flatten(),
        sequence=last.sequence[:, None].repeat(1, rows).flatten(),
        query_start=last.query_start * rows,
        max_len=last.max_len + rows,
        max_query=rows,
    )
    first_B = positions_BG[:, 0]
    # Each token's further rows, counted from the block's first position.
    k, j = steps_G[:, None] - 1, steps_G - 1
    later = rows - 1 - k
    extra_GG = torch.where(j < later, k + 1 + j, k - shape.window - (j - later))
    seen_BGG = first_B[:, None, None] + extra_GG
    page_indices = seen_BGG // table.rows_per_page - table.first[:, None, None]
    page_indices = page_indices.clamp_(0, table.pages.shape[1] - 1)
    pages = table.pages.gather(1, page_indices.flatten(1)).view_as(page_indices)
    slots = pages * table.rows_per_page + seen_BGG % table.rows_per_page
    none = (seen_BGG < 0) | (first_B < 0)[:, None, None]
    return DraftBlock(ids.flatten(), tokens, slots.masked_fill_(none, -1).flatten(0, 1).int())


def draft_confidences(
    streams_BKHD: Tensor, newest_B: Tensor, ids_BK: Tensor, w: ConfidenceWeight, params: MhcParams
) -> Tensor:
    head = w.hc_head
    streams = streams_BKHD.float()
    flat = streams.flatten(2)
    scale = torch.rsqrt(flat.square().mean(-1, keepdim=True) + params.rms_eps)
    mixes = flat @ head.fn.T * scale
    shares = torch.sigmoid(mixes * head.scale + head.base) + params.eps
    hidden = torch.einsum("bkh,bkhd->bkd", shares, streams)
    scores_BK = torch.matmul(hidden, w.proj[0, : hidden.shape[2]])
    if w.markov_w1 is not None:
        width = w.proj.shape[1] - w.markov_w1.shape[1]
        before_BK = torch.cat((newest_B[:, None], ids_BK[:, :-1]), 1)
        markov_BKR = w.markov_w1[before_BK]
        scores_BK = scores_BK + (markov_BKR * w.proj[0, width:]).sum(-1)
    return torch.sigmoid(scores_BK)
