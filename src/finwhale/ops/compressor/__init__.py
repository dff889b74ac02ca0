"""Compressors of keys and values: the contract.

Source: DeepSeek-V4 technical report, sections 2.3.1 and 2.3.2. Legend: N new tokens, C entry
width, S tokens that an entry mixes, R rope dimensions, L positions.

Entry w of a ratio compresses the tokens of window w: positions ratio * w .. ratio * (w + 1) - 1. It
is rope(RMSNorm(sum_j softmax_j(gate_j + ape_j) * kv_j)) at position ratio * w. With ratio 128, the
sum is over the window's tokens: S = 128. With ratio 4, each token has two halves [Ca | Cb], and the
sum is over Ca of the previous window's tokens and Cb of the window's own: S = 8.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from finwhale.ops.paging import CacheRows, Tokens

Rounding = Literal["none", "nope", "key"]

# ratio -> (align, before): a sequence of n tokens still needs its state rows from position
# n // align * align - before on.
STATE_KEPT = {2: (2, 0), 4: (4, 4), 128: (128, 0)}


@dataclass(frozen=True, slots=True)
class CompressorWeight:
    """The weights that turn projected rows into entries.

    Attributes:
        ape: [S, C] float32; for ratio 4 the first halves of 4 rows, then their second halves.
        norm: [C] float32.
        ratio: 4 or 128.
    """

    ape: Tensor
    norm: Tensor
    ratio: Literal[4, 128]


@dataclass(frozen=True, slots=True)
class CompressPart:
    """One compressor of a layer. A C4 layer has two: for attention's entries and for index keys.

    Attributes:
        projected: [N,X] float32: kv then gate, X = 2C for ratio 128, 4C for ratio 4; rows may be
            strided.
        weight: the compressor's ape and norm.
        state: rows [X] float32.
        entries: dense rows [C], or packed: rows of attention ("nope", attention/layout.py) or index
            keys ("key", indexer/layout.py).
        rounding: "nope": round all but the rope part to E4M3 with a scale for each 64 values;
            "key": rotate the whole entry by a Hadamard matrix, then round it to FP4 with a scale
            for each 32 values (rounding.rotate_to_fp4; C is a power of two); "none".
    """

    projected: Tensor
    weight: CompressorWeight
    state: CacheRows
    entries: CacheRows
    rounding: Rounding


class Compress(Protocol):
    """Compute and store the entries that complete, and keep the rows that later steps need.

    A token at position p with (p + 1) % ratio == 0 completes entry p // ratio from the S tokens up
    to itself; the first entry of ratio 4 has only its own 4 tokens.

    The state pool keeps the projected rows that later entries mix. If a sequence has `end` tokens
    after the step, the operator keeps its rows from end // 4 * 4 - 4 on for ratio 4, or from
    end // 128 * 128 on for ratio 128. A sequence with at most `max_verify_tokens` tokens in the
    step may verify drafts that are rejected, so its `end` is the position after its first token.
    Another sequence may resume at the end of a block of BLOCK_TOKENS tokens. So for ratio 4 the
    operator also keeps the last 4 rows of each block that ends in the step, if the state's page
    table has a page for them.
    """

    def __call__(
        self,
        parts: tuple[CompressPart, ...],
        tokens: Tokens,
        rotary_LR: Tensor,
        eps: float,
        max_verify_tokens: int,
    ) -> None:
        """All parts have the same ratio and page tables. rotary [L,R/2,2] float32 (cos, sin)."""
