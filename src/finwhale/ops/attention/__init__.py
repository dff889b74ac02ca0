"""Sparse attention over cached rows: the contracts.

Source: DeepSeek-V4 technical report, section 2.3. Legend: N tokens, A heads, C head_dim, Q width
of the query's latent, R rope dimensions (the last R of C, interleaved pairs), L positions, W
window, K selected entries, S groups of 128 of a token's A C values.

K and V are the same row: [nope | rope] of C values. V contains the rope, so the operator rotates
the output back by the query's position. A pool is dense, [rows, C] of a float dtype, or packed,
uint8 [pages, bytes] (layout.py). Its rows or pages are strided: other layers' rows or pages lie
between them. A slot is a row's number in its pool; -1 means no row.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from finwhale.ops.paging import CacheRows, Tokens

NOPE_GROUP = 64


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of all positions. A token sees the last `size` rows, including its own."""

    rows: CacheRows
    size: int


@dataclass(frozen=True, slots=True)
class TopkEntries:
    """Entries that the indexer selected: slots [N,K] int32, -1 for none."""

    rows: CacheRows
    slots: Tensor


@dataclass(frozen=True, slots=True)
class AllEntries:
    """Every complete entry: a token at position p sees entries w < (p + 1) // ratio."""

    rows: CacheRows
    ratio: Literal[128]


@dataclass(frozen=True, slots=True)
class RowForm:
    """How a token's kv becomes its row in the window: rope(RMSNorm(kv)).

    Attributes:
        norm: [C] float32.
        rotary: [L,R/2,2] float32 (cos, sin).
        round_nope: round the first C-R values to E4M3 with one power-of-two scale for each 64
            values; required for packed pools.
    """

    norm: Tensor
    rotary: Tensor
    eps: float
    round_nope: bool


class StoreWindowRows(Protocol):
    """Write the tokens' rows to the window."""

    def __call__(self, kv_NC: Tensor, form: RowForm, tokens: Tokens, window: CacheRows) -> None:
        """kv [N,C], rows may be strided."""


class PrepareQkv(Protocol):
    """StoreWindowRows, and the normalised latent of the query."""

    def __call__(
        self,
        q_lora_NQ: Tensor,
        q_norm_Q: Tensor,
        kv_NC: Tensor,
        form: RowForm,
        tokens: Tokens,
        window: CacheRows,
    ) -> Tensor:
        """q_lora [N,Q], rows may be strided; q_norm [Q] float32. Returns RMSNorm(q_lora) [N,Q]."""


class SparseAttention(Protocol):
    """Attention with softmax over the window's rows, the entries and one sink per head, in float32.

    q <- rope(RMSNorm(q) per head, without weight; eps None: no norm); o[n,a] = sum_k p_k row_k with
    p_k = exp(q . row_k * scale) over the visible rows, divided by their sum plus exp(sink[a]);
    out = o rotated back by the token's position.
    """

    def __call__(
        self,
        q_NAC: Tensor,
        rotary_LR: Tensor,
        eps: float | None,
        tokens: Tokens,
        window: Window,
        entries: TopkEntries | AllEntries | None,
        sink_A: Tensor,
        scale: float,
        out_NAC: Tensor,
        scales_NS: Tensor | None = None,
    ) -> None:
        """q [N,A,C] as projected, rows may be strided, may be written; rotary [L,R/2,2] float32;
        sink [A] float32. Writes out [N,A,C].

        With scales (float32 of any strides, also written), out is E4M3: the operator rounds its
        result in q's dtype for the next linear layer (`linear.LinearWeight.input_group`), and C is
        a multiple of 128.
        """
