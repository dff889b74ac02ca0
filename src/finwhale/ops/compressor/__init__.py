"""Compressors of keys and values: the contract.

Source: DeepSeek-V4 technical report, sections 2.3.1 and 2.3.2. Legend: N new tokens, C entry
width, M entries that complete in this step, S tokens that an entry mixes, P rows of a pool.

Ratio 128: an entry mixes its 128 tokens. Ratio 4: each token has two halves [Ca | Cb]; an entry
mixes Ca of the window before with Cb of its own: S = 8. Entry = rope(RMSNorm(sum_j softmax_j(
gate_j + ape_j) * kv_j)) at position ratio * w.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CompressorWeight:
    """What turns projected rows into entries.

    Attributes:
        ape: [S, C] float32; ratio 4: the 4 rows' first halves, then their second halves.
        norm: [C] float32.
        ratio: 4 or 128.
    """

    ape: Tensor
    norm: Tensor
    ratio: Literal[4, 128]


@dataclass(frozen=True, slots=True)
class CompressStep:
    """Which entries complete in a step and where everything lies; shared by a ratio's layers.

    Attributes:
        history_slots: [X] int64: state rows to put in front of the N new rows.
        entry_sources: [M,S] int64: rows of (history, new) that an entry mixes; -1: none.
        entry_slots: [M] int64: where the entries go in their pool.
        entry_positions: [M] int64: the position of each entry's rope.
        state_sources: [Y] int64: the new rows that later steps need.
        state_slots: [Y] int64: where they go in the state's pool.
    """

    history_slots: Tensor
    entry_sources: Tensor
    entry_slots: Tensor
    entry_positions: Tensor
    state_sources: Tensor
    state_slots: Tensor


class Compress(Protocol):
    """Complete entries from new and kept rows, store them, and keep what later steps need."""

    def __call__(
        self,
        projected_NX: Tensor,
        w: CompressorWeight,
        step: CompressStep,
        rotation_MR: Tensor,
        eps: float,
        rounding: Literal["none", "nope", "whole"],
        state_rows_PX: Tensor,
        entry_rows_PC: Tensor,
    ) -> None:
        """projected [N,X] float32: kv then gate, X = 2C for ratio 128, 4C for ratio 4.
        rotation [M,R/2,2] float32 (cos, sin) of entry_positions.
        state_rows [P,X] float32 and entry_rows [P,C] are written.
        rounding: "nope": all but the rope part in E4M3, a scale for each 64 values (attention's
        entries); "whole": all of it, one scale for each 128 (the indexer's keys); "none".
        """
        ...
