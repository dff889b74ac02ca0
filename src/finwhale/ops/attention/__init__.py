"""Sparse attention over cached rows: the contracts.

Source: DeepSeek-V4 technical report, section 2.3. Legend: N tokens, A heads, C head_dim, R rope
dimensions (the last R of C, interleaved pairs), W window, K selected entries, P rows of a pool.

K and V are one row: [nope | rope] of C values, V with its rope, so the output is rotated back by
the query's position. A slot is a row's index in its pool; -1 stands for no row.
"""

from typing import Protocol

from torch import Tensor

NOPE_GROUP = 64


class PrepareQuery(Protocol):
    """Per-head RMSNorm without weight, then rope on each head's last R dimensions."""

    def __call__(self, q_NAC: Tensor, rotation_NR: Tensor, eps: float) -> Tensor:
        """q [N,A,C]; rotation [N,R/2,2] float32 (cos, sin); may write into q. Returns [N,A,C]."""
        ...


class StoreWindow(Protocol):
    """kv <- rope(RMSNorm(kv)), its nope part optionally rounded, written to the window's pool."""

    def __call__(
        self,
        kv_NC: Tensor,
        norm_C: Tensor,
        rotation_NR: Tensor,
        eps: float,
        round_nope: bool,
        rows_PC: Tensor,
        slots_N: Tensor,
    ) -> None:
        """kv [N,C], norm [C] float32, rotation [N,R/2,2]; rows [P,C] is written at slots [N]
        int64 (every slot valid and distinct). round_nope: E4M3 with one power-of-two scale for
        each 64 of the first C-R values.
        """
        ...


class SparseAttention(Protocol):
    """softmax over the window's rows, the selected entries and a sink a head, in float32.

    o[n,a] = sum_k p_k row_k with p = exp(q . row_k * scale) over the valid rows, normalised by
    their sum plus exp(sink[a]).
    """

    def __call__(
        self,
        q_NAC: Tensor,
        window_rows_PC: Tensor,
        window_slots_NW: Tensor,
        entry_rows_PC: Tensor | None,
        entry_slots_NK: Tensor | None,
        sink_A: Tensor,
        scale: float,
        out_NAC: Tensor,
    ) -> None:
        """q [N,A,C], pools [P,C], slots [N,W] and [N,K] int64 with -1 for none, sink [A] float32.
        Writes out [N,A,C]. Without entries both entry arguments are None.
        """
        ...


class InverseRope(Protocol):
    """Rotate the last R dimensions of each head back."""

    def __call__(self, o_NAC: Tensor, rotation_NR: Tensor) -> Tensor:
        """o [N,A,C], rotation [N,R/2,2] float32 (cos, sin); may write into o. Returns [N,A,C]."""
        ...
