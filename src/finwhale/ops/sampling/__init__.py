"""Choosing the next token: the contract.

Legend: S rows (one a sequence), V vocabulary, R rows that draw at random (temperature above 0),
K and P those of them with a top_k and a top_p, N (row, token) pairs under penalties or with a bias,
G rows that want logprobs or have a grammar, L the most logprobs that any row wants, W = ceil(V/32).

A row's result depends on that row alone, bit for bit: never on the rest of the batch.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What the rows that draw at random ask for.

    Attributes:
        rows_R: int64, which rows of the logits; None: every row, in order.
        temperature_R: float32, above 0.
        min_p_R: float32; None: no row has one. 0 keeps all.
        top_k_rows_K, top_k_K: int64, indices into R and their top_k, 1 to V; None: no row.
        max_top_k: the largest of top_k_K; 0: no row.
        top_p_rows_P, top_p_P: int64 indices into R, and float64; None: no row.
    """

    rows_R: Tensor | None
    temperature_R: Tensor
    min_p_R: Tensor | None = None
    top_k_rows_K: Tensor | None = None
    top_k_K: Tensor | None = None
    max_top_k: int = 0
    top_p_rows_P: Tensor | None = None
    top_p_P: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Tokens seen so far, each (row, token) pair once; what is not listed is not penalised.

    Attributes:
        rows_N, ids_N: int64, row of the logits and token id.
        counts_N: float32, how often the row's output holds the token; 0: only its prompt does.
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
    """What is added to logits, each (row, token) pair once.

    Attributes:
        rows_N, ids_N: int64, row of the logits and token id.
        values_N: float32.
    """

    rows_N: Tensor
    ids_N: Tensor
    values_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """Rows that may choose among some tokens only.

    Attributes:
        rows_G: int64, rows of the logits, each once.
        words_GW: int32; token i is allowed where bit i % 32 of word i // 32 is set.
    """

    rows_G: Tensor
    words_GW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobRows:
    """Rows that want log-probabilities of their token and of the `num_top` most likely ones.

    Attributes:
        rows_G: int64, rows of the logits.
        num_top: 0 to V.
    """

    rows_G: Tensor
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """One step's choices. All tensors on the device of the logits.

    Attributes:
        filters: None: every row is greedy.
        uniform_R: float64 in [0, 1), one draw for each row of `filters`.
        penalties: None: no row has any.
        bias: None: no row has any.
        allowed: None: every row may choose any token.
        logprobs: rows that want them, one entry for each distinct `num_top`.
    """

    filters: Filters | None = None
    uniform_R: Tensor | None = None
    penalties: Penalties | None = None
    bias: Bias | None = None
    allowed: AllowedTokens | None = None
    logprobs: tuple[LogprobRows, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether every row takes its largest logit, and nothing else is wanted."""
        changed = self.penalties or self.bias or self.allowed or self.logprobs
        return self.filters is None and not changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Natural log-probabilities before penalties, bias, temperature and filters.

    Rows that did not ask, and columns past what a row asked for, hold NaN, rank 0 and id -1.

    Attributes:
        token_S: float32, the chosen token's.
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
    ids_S: int64 token ids; where not valid, meaningless ids of the vocabulary.
    valid_S: bool, False where the row has a NaN, +inf or nothing but -inf.
    logprobs: None where no row wants them.
    """

    ids_S: Tensor
    valid_S: Tensor
    logprobs: Logprobs | None = None


class Sample(Protocol):
    """Penalties, bias, allowed tokens, then temperature, min_p, top_k, top_p, then the draw.

    Penalties: a seen token's logit is divided by repetition if positive, else multiplied by it;
    then frequency * count and, if count > 0, presence are subtracted (Keskar et al. 2019).
    Greedy rows take the largest logit, the lowest id among equals. For the others
    e = exp((logit - max) / temperature); min_p keeps e >= min_p; top_k keeps the logits not below
    the k-th largest (all of those equal to it); top_p keeps, from the most likely on (lower id
    first among equals), each token before which the sum of what is left is below top_p.
    The draw inverts the cumulative distribution in the order of token ids. The weights are
    integers, floor(e * 2^44), so that sums are exact and in no order.
    """

    def __call__(self, logits_SV: Tensor, batch: SamplingBatch) -> SampledTokens:
        """logits [S,V] float32, not changed; a -inf excludes its token."""
        ...
