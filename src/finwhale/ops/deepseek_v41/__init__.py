"""Operators that only DeepSeek-V4.1 has: the contracts.

Layers share entries, and an entry's index key is made of the entry before its rope. Scores choose
among blocks of entries that an earlier layer kept. A block's input is collapsed with the mixes of
the block before. Engram adds rows of a hash table to the residual streams.

Source: the authors' inference code. Legend: N tokens, C width of a row, I index heads, J width of a
key, K selected entries, H residual streams, D hidden, R rope dimensions, L positions.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from finwhale.ops.mhc import MhcParams, MhcWeight, Terms
from finwhale.ops.paging import CacheRows, Tokens

# "e4m3": E4M3 with a power-of-two scale for each 32 values; "fp4": e2m1 with an E4M3 scale for each
# 16; "key": e2m1 with a power-of-two scale for each 32; always all values of a row, after rope.
RowRounding = Literal["none", "e4m3", "fp4", "key"]


class StoreRows(Protocol):
    """Store a row of the cache for each token that completes one.

    The token at position p with (p + 1) % ratio == 0 writes row p // ratio: its values, rotated by
    position p // ratio * ratio, then rounded. A token at position -1 writes none.
    """

    def __call__(
        self,
        values_NC: Tensor,
        rows: CacheRows,
        rotary_LR: Tensor,
        tokens: Tokens,
        ratio: int,
        rounding: RowRounding,
    ) -> None:
        """values [N,C]; rotary [L,R/2,2] float32 (cos, sin)."""


class PrepareQkv(Protocol):
    """RMSNorm of the latents of query and kv, each with its weight; then StoreRows of kv's."""

    def __call__(
        self,
        latents: tuple[Tensor, Tensor],
        norms: tuple[Tensor, Tensor],
        eps: float,
        rows: CacheRows,
        rotary_LR: Tensor,
        tokens: Tokens,
        rounding: RowRounding,
    ) -> Tensor:
        """latents: [N,Q] and [N,C], whose rows may be strided. Returns the query's [N,Q]."""


class MergePairs(Protocol):
    """The latents of pairs of tokens: RMSNorm(sum over both of softmax(gate) * kv), per channel.

    `state` keeps the projected row of a token whose pair is not complete. A sequence with at most
    max_verify_tokens tokens in the step may continue after any of them (ops.compressor.Compress).
    """

    def __call__(
        self,
        projected_NX: Tensor,
        norm_C: Tensor,
        state: CacheRows,
        tokens: Tokens,
        eps: float,
        max_verify_tokens: int,
    ) -> Tensor:
        """projected [N,2C] float32: kv then gate; state: rows [2C] float32. Returns [N,C] float32:
        the latent in the row of the pair's second token; other rows are zeros.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRule:
    """How a layer selects entries.

    Attributes:
        ratio: tokens of an entry.
        topk: the most entries that a token selects.
        scale: factor of all scores.
        round_query: round the rotated queries as keys are.
        block: entries of a block.
        keeps: the most blocks that later layers may select from; 0: the layer keeps none.
    """

    ratio: int
    topk: int
    scale: float
    round_query: bool
    block: int = 8
    keeps: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """slots: [N,K] int32 in order of the entries' positions, filled with -1. blocks: [N,B] int32,
    the kept blocks in order, filled with -1; None: the layer keeps none.
    """

    slots: Tensor
    blocks: Tensor | None = None


class SelectShared(Protocol):
    """Select the topk visible entries with the highest score; the lowest index wins ties.

    score(n, e) = sum_i weights[n,i] * scale * relu(rope(q[n,i]) . key[e]); a token at position p
    sees the entries e < (p + 1) // ratio. A block's score is its highest visible one; the block of
    the newest visible entry is always kept, and blocks without a visible entry never.
    """

    def __call__(
        self,
        q_NIJ: Tensor,
        weights_NI: Tensor,
        keys: CacheRows,
        rotary_LR: Tensor,
        tokens: Tokens,
        rule: IndexRule,
        blocks_NB: Tensor | None = None,
    ) -> Selection:
        """q [N,I,J] as projected; weights [N,I] float32.

        Args:
            blocks_NB: select from these blocks only; None: from all.
        """


Pending = tuple[Terms | Tensor, Tensor, Tensor]
"""A block's output x [N,D] and its mixes post [N,H] and res [N,H,H], whose post step is pending."""


class MhcInput(Protocol):
    """The pending post step (mhc.MhcPost), if there is one; then a block's input, collapsed with
    the mixes of the block before: RMSNorm(sum_i pre_i X_i).
    """

    def __call__(
        self,
        last: Pending | None,
        residual_NHD: Tensor,
        pre_NH: Tensor,
        w: MhcWeight,
        params: MhcParams,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the input [N,D] in the residual's dtype; the new residual streams [N,H,D]; and
        parts of their GEMM with w.fn. None: `MhcMixes` computes it.

        The block's output may be the terms of a sum, if the table has FusedReduceMhc.
        """


class MhcMixes(Protocol):
    """A block's own mixes, as mhc.MhcPre has them. Only the next block reads them."""

    def __call__(
        self, streams_NHD: Tensor, parts: Tensor | None, w: MhcWeight, params: MhcParams
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns pre [N,H], post [N,H] and res [N,H,H] in float32.

        Args:
            streams_NHD: the block's residual streams.
            parts: those that MhcInput returned with them.
        """


class RecallIds(Protocol):
    """Keep a number for each token, and return those of its last S tokens.

    The numbers are compressed ids, below 2^24, so that float32 rows hold them.
    """

    def __call__(
        self, ids_N: Tensor, size: int, pad: int, rows: CacheRows, tokens: Tokens
    ) -> Tensor:
        """ids [N] int64; size: S; pad: the number before the sequence's beginning; rows: [1]
        float32. Returns [N,S] int64, the newest first.
        """


@dataclass(frozen=True, slots=True)
class HashTensors:
    """The hashes of one layer's Engram, on the device.

    Attributes:
        multipliers: [S] int64, odd; a compressed id times one of them fits int64.
        sizes, starts: [S-1,heads] int64: the number of rows of each part of the table, and its
            first row.
    """

    multipliers: Tensor
    sizes: Tensor
    starts: Tensor


class LookUp(Protocol):
    """The rows of a table that the last S ids address: for n-grams of 2 to S ids, one row a head.

    A row is the XOR of the first n products of ids and multipliers, modulo the part's size, after
    the part's first row.
    """

    def __call__(
        self,
        ids_NS: Tensor,
        hashes: HashTensors,
        rows: Tensor,
        scale: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """ids [N,S] int64, the newest first. Returns the values [N,X,K] of X = (S-1) * heads rows.

        rows [rows,K] may be in host memory: E4M3 with scale uint8 [rows,K/32] (E8M0), or values.
        """


class Collapse(Protocol):
    """sum_i pre_i X_i: the residual streams collapsed by the last mixes."""

    def __call__(self, streams_NHD: Tensor, pre_NH: Tensor) -> Tensor:
        """Returns [N,D] in the streams' dtype."""


class EngramGate(Protocol):
    """X_h + gate_h * value, gate = sigmoid(sign(s) sqrt(max(|s|, 1e-6))) with
    s = sum_d RMSNorm(X_h)_d q_hd RMSNorm(key_h)_d k_hd D^-0.5; these norms have no weights.
    """

    def __call__(
        self,
        residual_NHD: Tensor,
        key_NHD: Tensor,
        value_ND: Tensor,
        q_weight_HD: Tensor,
        k_weight_HD: Tensor,
        eps: float,
    ) -> Tensor:
        """Returns the new residual streams [N,H,D] in their dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEntryOps:
    """The operators of this package, one typed field each."""

    store_rows: StoreRows
    prepare_qkv: PrepareQkv
    merge_pairs: MergePairs
    select: SelectShared
    mhc_input: MhcInput
    mhc_mixes: MhcMixes
    collapse: Collapse
    recall_ids: RecallIds
    look_up: LookUp
    engram_gate: EngramGate
