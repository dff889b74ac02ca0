"""DeepSeek-V4.1's operators on a CPU: a token's bits do not depend on the rest of its step.

The package has the legend.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.cpu_math import F32, I32, I64, view
from finwhale.ops.deepseek_v41 import IndexRule, Pending, Selection, ref
from finwhale.ops.indexer.cpu import MAX_SCORES, best_indices, weighted_scores
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.mhc.cpu import mhc_post, mixes_of
from finwhale.ops.norm.cpu import rms_norm
from finwhale.ops.paging import CacheRows, Tokens
from finwhale.ops.slots import ENTRY_PAD, entry_slots, padded, token_groups


def mhc_input(
    last: Pending | None, residual_NHD: Tensor, pre_NH: Tensor, w: MhcWeight, params: MhcParams
) -> tuple[Tensor, Tensor, None]:
    if last is not None:
        x, post, res = last
        assert isinstance(x, Tensor)
        residual_NHD = mhc_post(x, post, res, residual_NHD)
    residual: F32 = np.ascontiguousarray(residual_NHD.numpy())
    collapsed = cpu_math.matmul(pre_NH.numpy()[:, None], residual)[:, 0]
    x_ND = cpu_math.rms_norm(collapsed, view(w.norm), params.rms_eps)
    return torch.from_numpy(x_ND), residual_NHD, None


def mhc_mixes(
    streams_NHD: Tensor, parts: Tensor | None, w: MhcWeight, params: MhcParams
) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, res = mixes_of(np.ascontiguousarray(streams_NHD.numpy()), w, params)
    return torch.from_numpy(pre), torch.from_numpy(post), torch.from_numpy(res)


def engram_gate(
    residual_NHD: Tensor,
    key_NHD: Tensor,
    value_ND: Tensor,
    q_weight_HD: Tensor,
    k_weight_HD: Tensor,
    eps: float,
) -> Tensor:
    x: F32 = np.ascontiguousarray(residual_NHD.numpy())
    key: F32 = np.ascontiguousarray(key_NHD.numpy())
    product = x * view(q_weight_HD) * view(k_weight_HD) * key
    score = np.add.reduce(product, -1, keepdims=True) * np.float32(x.shape[-1] ** -0.5)
    score = score * cpu_math.inverse_rms(x, eps) * cpu_math.inverse_rms(key, eps)
    root = np.sqrt(np.maximum(np.abs(score), np.float32(1e-6))) * np.sign(score)
    gate = np.reciprocal(np.float32(1) + np.exp(-root))
    return torch.from_numpy(x + gate * value_ND.numpy()[:, None])


def select_shared(
    q_NIJ: Tensor,
    weights_NI: Tensor,
    keys: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    rule: IndexRule,
    blocks_NB: Tensor | None = None,
) -> Selection:
    q: F32 = ref.index_queries(q_NIJ, rotary_LR, tokens, rule).numpy()
    weights = np.multiply(weights_NI.numpy(), cpu_math.constant(rule.scale))
    visible: I64 = (tokens.host_positions + 1) // rule.ratio
    longest = int(visible.max(initial=0))
    # Attention adds blocks of slots, whose widths must not depend on the other tokens.
    slots = np.full((len(q), min(rule.topk, padded(longest))), -1, np.int32)
    kept = np.full((len(q), min(rule.keeps, -(-longest // rule.block))), -1, np.int32)
    all_slots: I64 = entry_slots(tokens, keys.table, rule.ratio).numpy()
    rows, row_step = cpu_math.rows(keys.pool)
    for some, sequences in token_groups(tuple(tokens.host_query_start)):
        entries = int(visible[some].max(initial=0))
        if not entries:
            continue
        slots_SE = all_slots[sequences, : padded(entries)]
        chosen = _Choice(
            rule,
            q[some],
            weights[some],
            rows.take(slots_SE * row_step, 0, mode="clip"),
            visible[some],
            slots_SE,
            None if blocks_NB is None else blocks_NB.numpy()[some],
        )
        chosen.write(slots[some], kept[some])
    return Selection(torch.from_numpy(slots), torch.from_numpy(kept) if rule.keeps else None)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The choice of N tokens among E padded entries. S is N, or 1 if all tokens share them."""

    rule: IndexRule
    q_NIJ: F32
    weights_NI: F32
    keys_SEJ: F32
    visible_N: I64
    slots_SE: I64
    blocks_NB: I32 | None

    def write(self, slots_NK: I32, kept_NB: I32) -> None:
        num_tokens, heads, width = self.q_NIJ.shape
        num_entries = self.slots_SE.shape[1]
        step = max(1, MAX_SCORES // (heads * num_entries))

        def run(tokens: slice) -> None:
            for start in range(tokens.start, tokens.stop, step):
                some = slice(start, min(start + step, tokens.stop))
                self._write(some, slots_NK[some], kept_NB[some])

        cpu_math.split_rows(num_tokens, heads * num_entries * width, run)

    def _write(self, some: slice, slots_NK: I32, kept_NB: I32) -> None:
        of = slice(0, 1) if len(self.slots_SE) == 1 else some
        scores = self._scores(some, of)
        found = _highest(scores, slots_NK.shape[1])
        slots = np.take_along_axis(self.slots_SE[of], np.minimum(found, scores.shape[1] - 1), 1)
        np.copyto(slots_NK[:, : found.shape[1]], slots, where=found < scores.shape[1])
        if self.rule.keeps:
            size, num_entries = self.rule.block, scores.shape[1]
            of_block = np.full((len(scores), -(-num_entries // size) * size), -np.inf, np.float32)
            of_block[:, :num_entries] = scores
            of_block = of_block.reshape(len(scores), -1, size).max(2)
            newest = (self.visible_N[some, None] - 1) // size
            np.put_along_axis(of_block, np.maximum(newest, 0), np.inf, 1)
            of_block[newest[:, 0] < 0] = -np.inf
            best = _highest(of_block, kept_NB.shape[1])
            np.copyto(kept_NB[:, : best.shape[1]], best, where=best < of_block.shape[1])

    def _scores(self, some: slice, of: slice) -> F32:
        """The scores [N,E] of some tokens; -inf for entries that they may not select."""
        rule, num_entries = self.rule, self.slots_SE.shape[1]
        visible_N1 = self.visible_N[some, None]
        most = int(visible_N1.max())
        scores = np.zeros((len(visible_N1), num_entries), np.float32)
        # If all entries and blocks are selected, their scores do not matter.
        if most > rule.topk or (rule.keeps and most > rule.keeps * rule.block):
            keys = self.keys_SEJ[of].reshape(
                -1, num_entries // ENTRY_PAD, ENTRY_PAD, self.q_NIJ.shape[2]
            )
            scores = weighted_scores(self.q_NIJ[some], self.weights_NI[some], keys.swapaxes(2, 3))
        numbers = np.arange(num_entries)
        np.copyto(scores, -np.inf, where=numbers >= visible_N1)
        if self.blocks_NB is not None:
            # The last column takes the fill value -1.
            allowed = np.zeros((len(scores), -(-num_entries // rule.block) + 1), np.bool_)
            np.put_along_axis(allowed, self.blocks_NB[some].astype(np.int64), True, 1)
            np.copyto(scores, -np.inf, where=~allowed[:, numbers // rule.block])
        return scores


def _highest(scores_NE: F32, most: int) -> I64:
    """Indices of the highest scores above -inf, ascending, then E; the lowest index wins ties."""
    found = best_indices(scores_NE, min(most, scores_NE.shape[1]))
    above = np.take_along_axis(scores_NE, found, 1) > -np.inf
    found = np.where(above, found, scores_NE.shape[1])
    found.sort(1)
    return found


OPS = replace(
    ref.OPS,
    prepare_qkv=partial(ref.prepare_qkv, norm=rms_norm),
    select=select_shared,
    mhc_input=mhc_input,
    mhc_mixes=mhc_mixes,
    engram_gate=engram_gate,
)
