"""The reference implementation of the lightning indexer. The package's docstring has the legend."""

import torch
from torch import Tensor

from finwhale.ops.attention.ref import apply_rope
from finwhale.ops.indexer import RATIO, IndexQueries
from finwhale.ops.paging import CacheRows, Tokens
from finwhale.ops.rounding import rotate_to_fp4
from finwhale.ops.slots import ENTRY_PAD, index_step, padded, token_groups

# The most scores of all heads to compute at once. This bounds memory for chunks of any length.
MAX_SCORES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}


def prepare_index_queries(
    q_NIC: Tensor, rotary_LR: Tensor, tokens: Tokens, topk: int, round_query: bool
) -> IndexQueries:
    if tokens.max_len // RATIO <= topk:
        return IndexQueries(q_NIC)
    q_NIC = apply_rope(q_NIC, tokens.rotation(rotary_LR))
    return IndexQueries(rotate_to_fp4(q_NIC) if round_query else q_NIC)


def select_entries(
    q_NIC: Tensor | IndexQueries,
    weights_NI: Tensor,
    keys: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    topk: int,
    scale: float,
    round_query: bool,
) -> Tensor:
    if isinstance(q_NIC, Tensor):
        q_NIC = prepare_index_queries(q_NIC, rotary_LR, tokens, topk, round_query)
    queries_NIC = q_NIC.values
    step = index_step(tokens, keys.table)
    longest = max(step.max_entries, default=0)
    width = min(topk, padded(longest))
    slots_NK = step.entry_slots.new_full((queries_NIC.shape[0], width), -1, dtype=torch.int32)
    weights_NI = weights_NI * scale
    for some, sequences in token_groups(step.query_start):
        entries = max(step.max_entries[sequences])
        visible = step.num_entries[some]
        slots_SE = step.entry_slots[sequences, : padded(entries)]
        slots_NE = slots_SE.expand(visible.shape[0], -1)
        if entries <= topk:
            columns = torch.arange(min(width, slots_NE.shape[1]), device=slots_NE.device)
            chosen = slots_NE[:, : columns.shape[0]]
            slots_NK[some, : columns.shape[0]] = chosen.where(columns < visible[:, None], -1)
            continue
        keys_SEC = keys.pool.index_select(0, slots_SE.clamp(min=0).flatten()).float()
        keys_NEC = keys_SEC.view(*slots_SE.shape, -1).expand(visible.shape[0], -1, -1)
        q_GIC, weights_GI = queries_NIC[some].float(), weights_NI[some]
        block = max(1, MAX_SCORES[q_GIC.device.type] // (q_GIC.shape[1] * slots_NE.shape[1]))
        for start in range(0, visible.shape[0], block):
            part = slice(start, start + block)
            scores = _scores(q_GIC[part], weights_GI[part], keys_NEC[part])
            slots_NK[some][part] = _top(scores, visible[part], slots_NE[part], topk)
    return slots_NK


def _scores(q_NIC: Tensor, weights_NI: Tensor, keys_NEC: Tensor) -> Tensor:
    """Scores [N,E] float32, from GEMMs of one fixed shape, so no bit depends on E or N."""
    blocks = []
    for keys in keys_NEC.split(ENTRY_PAD, 1):
        relu = torch.bmm(q_NIC, keys.transpose(1, 2)).relu_()
        blocks.append(torch.bmm(weights_NI[:, None], relu).squeeze(1))
    return torch.cat(blocks, 1)


def _top(scores_NE: Tensor, visible_N: Tensor, slots_NE: Tensor, topk: int) -> Tensor:
    """Slots [N,topk] of the highest scores, in order of position; -1 past a token's entries."""
    entries = torch.arange(scores_NE.shape[1], device=scores_NE.device)
    hidden = entries >= visible_N[:, None]
    # Adding 0 turns -0 into 0. Flipping the lower bits of negative floats makes the integer order
    # equal to the float order. The low word is the inverted index: the lowest index wins ties.
    bits = (scores_NE + 0.0).masked_fill_(hidden, -torch.inf).view(torch.int32).long()
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = (order << 32) | (0xFFFFFFFF - entries)
    chosen = 0xFFFFFFFF - (keys.topk(topk, 1).values & 0xFFFFFFFF)
    chosen = chosen.masked_fill_(chosen >= visible_N[:, None], scores_NE.shape[1]).sort(1).values
    missing = chosen == scores_NE.shape[1]
    return slots_NE.gather(1, chosen.masked_fill_(missing, 0)).masked_fill_(missing, -1)
