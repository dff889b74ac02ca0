"""Sampling the next token: the contract.

Legend: S rows (one per sequence), V vocabulary, R rows that draw at random (temperature above 0),
K and P those of them with a top_k and a top_p, N (row, token) pairs with penalties or a bias, G
rows with logprobs or a grammar, L the most logprobs of any row, W = ceil(V/32), C candidates.

A row's result depends only on that row, bit for bit, and never on the rest of the batch.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The settings of the rows that draw at random.

    Attributes:
        rows_R: int64, rows of the logits; None: every row, in order.
        temperature_R: float32, above 0 and at most 1e29. If no row has a min_p, top_k or top_p,
            temperature 0 is allowed and makes a row greedy.
        seeds_R: int64, of which all 64 bits count.
        indices_R: int64 below 2^32, index of the row's continuation among those of its prompt.
        min_p_R: float32; None: no row has one. 0 keeps all tokens.
        top_k_rows_K, top_k_K: int64, indices into R and their top_k, 1 to V; None: no row.
        max_top_k: the largest of top_k_K; 0: no row.
        top_p_rows_P, top_p_P: int64 indices into R, and float64; None: no row.
    """

    rows_R: Tensor | None
    temperature_R: Tensor
    seeds_R: Tensor
    indices_R: Tensor
    min_p_R: Tensor | None = None
    top_k_rows_K: Tensor | None = None
    top_k_K: Tensor | None = None
    max_top_k: int = 0
    top_p_rows_P: Tensor | None = None
    top_p_P: Tensor | None = None

    @property
    def active(self) -> bool:
        """Whether a row has a min_p, a top_k or a top_p."""
        return not (self.min_p_R is None and self.top_k_K is None and self.top_p_P is None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Tokens seen so far, each (row, token) pair once; other tokens are not penalised.

    Attributes:
        rows_N, ids_N: int64, row of the logits and token id.
        counts_N: float32, number of times the token is in the row's output; 0: only in its prompt.
        repetition_N, frequency_N, presence_N: float32, the row's penalties.
    """

    rows_N: Tensor
    ids_N: Tensor
    counts_N: Tensor
    repetition_N: Tensor
    frequency_N: Tensor
    presence_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """Values to add to logits, each (row, token) pair once.

    Attributes:
        rows_N, ids_N: int64, row of the logits and token id.
        values_N: float32.
    """

    rows_N: Tensor
    ids_N: Tensor
    values_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Rows in which only some tokens are allowed.

    Attributes:
        rows_G: int64, rows of the logits, each once.
        words_GW: int32; token i is allowed if bit i % 32 of word i // 32 is set.
    """

    rows_G: Tensor
    words_GW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Rows that need log-probabilities: of the chosen token and of the `num_top` most likely ones.

    Attributes:
        rows_G: int64, rows of the logits.
        num_top: 0 to V.
    """

    rows_G: Tensor
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The sampling settings of one step. All tensors are on the device of the logits.

    Attributes:
        filters: None: every row is greedy.
        positions_R: int64 below 2^32, the position of the token that each row of `filters` draws.
        penalties: None: no row has any.
        bias: None: no row has any.
        allowed: None: every row may choose any token.
        logprobs: rows that want log-probabilities, one entry for each distinct `num_top`.
    """

    filters: Filters | None = None
    positions_R: Tensor | None = None
    penalties: Penalties | None = None
    bias: Bias | None = None
    allowed: AllowedTokens | None = None
    logprobs: tuple[LogprobRows, ...] = ()

    @property
    def needs_whole_rows(self) -> bool:
        """Whether sampling needs whole rows of logits.

        Otherwise `BestCandidates` works on parts of the vocabulary. All ranks of a step decide
        alike, because they build the same batch.
        """
        filtered = self.filters is not None and self.filters.active
        return filtered or any((self.penalties, self.bias, self.allowed, self.logprobs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural log-probabilities before penalties, bias, temperature and filters.

    Rows without a request, and columns past a row's request, hold NaN, rank 0 and id -1.

    Attributes:
        token_S: float32, log-probability of the chosen token.
        rank_S: int64, 1 plus the number of tokens that are more likely than the chosen one.
        top_SL, top_ids_SL: float32 and int64, most likely first, ties by lower id.
    """

    token_S: Tensor
    rank_S: Tensor
    top_SL: Tensor
    top_ids_SL: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Attributes:
    ids_S: int64 token ids; arbitrary ids of the vocabulary in rows that are not valid.
    valid_S: bool, False if the row has a NaN, +inf or nothing but -inf.
    logprobs: None if no row wants them.
    """

    ids_S: Tensor
    valid_S: Tensor
    logprobs: Logprobs | None = None


class Sample(Protocol):
    """Apply penalties, bias, allowed tokens and filters to the logits, then choose a token.

    Penalties: a seen token's logit is divided by repetition if positive, else multiplied by it;
    then frequency * count and, if count > 0, presence are subtracted (Keskar et al. 2019).

    Greedy rows take the largest logit, the lowest id among equals. The other rows take the largest
    value logit + temperature * noise among the tokens that the filters keep, the lowest id among
    equals. Both operations round to float32. This is argmax(logit / temperature + noise), and the
    noise follows the Gumbel distribution, so a token's probability is the softmax of the kept
    logits / temperature (Gumbel 1954; Maddison et al. 2014). The noise is a function of seed,
    continuation, position and token id (noise.py). Noise and values have the same bits on every
    platform, and so have the tokens without filters.

    Filters: e = exp((logit - max) / temperature). min_p keeps e >= min_p. top_k keeps all logits
    that are not below the k-th largest. top_p goes through the remaining tokens from the most
    likely on (lower id first among equals), and keeps a token if the probabilities before it sum to
    less than top_p. top_k and top_p drop tokens with e < 2^-44. The weights of top_p are integers,
    floor(e * 2^44), so that sums are exact in any order. The last bit of the exponential depends on
    the platform, which can move a token across the boundary of min_p or top_p.
    """

    def __call__(self, logits_SV: Tensor, batch: SamplingBatch) -> SampledTokens:
        """logits [S,V] float32, not changed; a logit of -inf excludes its token."""


class BestCandidates(Protocol):
    """Search one rank's part of the vocabulary for tokens that may be a row's best token.

    Such a token is a candidate. A candidate is one int64, which is larger for a better token. Its
    upper 32 bits have the value (the logit or, for rows that draw, logit + temperature * noise) as
    an int32 of the same order, with 2^31 - 1 for NaN. Its lower 32 bits have 2^31 - 1 minus the
    token id.
    """

    def __call__(self, logits_SV: Tensor, batch: SamplingBatch, first: int) -> Tensor:
        """Split these tokens into C >= 1 parts and return the best token of each, as [S,C] int64.

        C depends only on S and V, so all ranks have as many. A part without a token has a candidate
        below all others.

        Args:
            logits_SV: [S,V] float32, the logits of the tokens first..first + V - 1. `first` is a
                multiple of V.

        Raises:
            ValueError: `batch.needs_whole_rows`.
        """


class MergeCandidates(Protocol):
    """Choose each row's best candidate: the token that `Sample` chooses from the whole row."""

    def __call__(self, candidates_SC: Tensor) -> SampledTokens:
        """candidates [S,C] int64 of parts that cover the vocabulary, in any order."""
