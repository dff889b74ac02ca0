"""Steps that verify drafts and make new ones: the contracts of the operators around the layers.

All of them are small, so a kernel each replaces many launches. None waits for the device.

Legend: N tokens of a step, B sequences, S ids that the host may send, L rows of the last step, W
the most tokens of a sequence in a step that verifies drafts, P = W - 1 drafts, K new drafts, G
tokens of a block, H residual streams, D hidden, R width of the Markov head, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from finwhale.ops.mhc import HcHeadWeight, MhcParams
from finwhale.ops.paging import PageTable, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTokens:
    """The tokens of a step as the host planned it. All tensors are int64 and contiguous.

    Attributes:
        ids_S, sources_N: token n has the id ids_S[sources_N[n]] if the host knows it.
        positions_N: the positions if the last step accepted no draft; -1 is padding.
        links_N: for a token that continues the last step, its index into [L,W] results of that
            step. For the others, an index into the last of the L rows.
    """

    ids_S: Tensor
    sources_N: Tensor
    positions_N: Tensor
    links_N: Tensor


class ContinueTokens(Protocol):
    """Give a step its ids and positions, which may follow from the last step's accepted drafts."""

    def __call__(
        self, planned: PlannedTokens, last_2LW: Tensor, ids_N: Tensor, positions_N: Tensor
    ) -> None:
        """Write the ids and positions of the tokens.

        Args:
            last_2LW: int64, contiguous: for L - 1 sequences, the next tokens of the last step, and
                by how many tokens each of them is ahead of the plan. The last row belongs to no
                sequence. Its tokens have the host's ids, and are ahead by its numbers, which are 0.
            ids_N, positions_N: int64, contiguous; written. ids_N may not overlap ids_S.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedStep:
    """The tokens of a step that verified drafts. All tensors are contiguous.

    Attributes:
        ids_N, positions_N: int64; position -1 is padding.
        first_B: int64, the index of each sequence's first token. A padding sequence begins at any
            token.
        token_indices_BP: int64, the indices of the tokens that have a draft after them. For a
            sequence with fewer than P drafts, the remaining numbers are at least N - 1.
    """

    ids_N: Tensor
    positions_N: Tensor
    first_B: Tensor
    token_indices_BP: Tensor


class AcceptDrafts(Protocol):
    """Count each sequence's accepted drafts: those before the first one that was not sampled."""

    def __call__(
        self, chosen_N: Tensor, step: VerifiedStep, next_ids_BW: Tensor, advanced_BW: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write the sampled tokens and the counts, from which the next step continues.

        Args:
            chosen_N: int64, contiguous: the token that was sampled after each token.
            next_ids_BW: int64, contiguous. Column 0 gets the token after the accepted drafts.
            advanced_BW: int64, contiguous. Every column gets the number of accepted drafts.

        Returns:
            last_B, positions_B: int64: the index and the position of the last accepted draft, or of
            the sequence's first token if no draft is accepted.
        """


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The length, noise token and window of all blocks of a draft head.

    Attributes:
        num_tokens: G, the newest token and the noise tokens after it.
        noise_id: the id of the noise tokens.
        window: rows that a token sees, its own row included.
    """

    num_tokens: int
    noise_id: int
    window: int


class DraftBlock(NamedTuple):
    """The tokens of B blocks, in order.

    Attributes:
        ids: [B*G] int64.
        tokens: their positions and sequences.
        extra_kv_slots: [B*G,G] int32: the slots of the rows that a token sees beyond its window;
            -1: none.
    """

    ids: Tensor
    tokens: Tokens
    extra_kv_slots: Tensor


class MakeBlocks(Protocol):
    """Make a block of tokens after each sequence's last verified token.

    The tokens of a block that begins at position p see the rows p-w .. p+G-1, for a window of w
    rows. The window of token p+k has the rows p+k-w+1 .. p+k. The further rows are those after the
    token, then those before its window, newest first, so that rows before position 0, which do not
    exist, come last. A block after padding is padding, and sees no further row.
    """

    def __call__(
        self, newest_B: Tensor, last: Tokens, table: PageTable, shape: BlockShape
    ) -> DraftBlock:
        """Make a block for each sequence.

        Args:
            newest_B: int64: the first token of each block.
            last: the last verified token of each sequence. The sequences are those of `table`, in
                the same order.
        """


@dataclass(frozen=True, slots=True)
class ConfidenceWeight:
    """The weights of a head that estimates how likely its drafts are accepted.

    Attributes:
        hc_head: collapses the residual streams; its norm is not used.
        proj: [1,D+R] or, without `markov_w1`, [1,D] float32.
        markov_w1: [V,R]: the Markov head's rows of the tokens; None: they are not used.
    """

    hc_head: HcHeadWeight
    proj: Tensor
    markov_w1: Tensor | None


class DraftConfidences(Protocol):
    """sigmoid(proj[:D] . sum_i (sigmoid(m_i * scale + base_i) + eps) X_i + proj[D:] . markov row).

    m is as in HcHead, and the Markov row is markov_w1[before], where `before` is the token before
    the draft. On a GPU, a confidence's bits depend only on its draft, never on the batch.
    """

    def __call__(
        self,
        streams_BKHD: Tensor,
        newest_B: Tensor,
        ids_BK: Tensor,
        w: ConfidenceWeight,
        params: MhcParams,
    ) -> Tensor:
        """Returns the confidences [B,K] float32.

        Args:
            streams_BKHD: the residual streams that predict each draft.
            newest_B: int64: the token before the first draft.
            ids_BK: int64: the drafts.
        """
