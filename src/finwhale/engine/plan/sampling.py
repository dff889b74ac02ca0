"""The sampling state of sequences, and its part in step plans.

The engine keeps the state that grows with the output: the tokens that penalties count, and the
matcher of a grammar. A step plan has the part of this state that the step needs. The ranks receive
settings that never change once, on admission.
"""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from finwhale.engine.plan.step_plan import AllowedRows, PenaltyRows, SamplingSettings
from finwhale.engine.plan.token_filter import TokenFilter, remove
from finwhale.errors import RequestError
from finwhale.request import SamplingParams

# The settings that a sequence takes from SamplingParams as they are.
_CHANGED = {"top_p", "logit_bias", "seed"}
_SAME = {one.name for one in fields(SamplingSettings)} & {*SamplingParams.__slots__} - _CHANGED


class TokenMatcher(Protocol):
    """The methods of a grammar's matcher (chat.grammar.Matcher) that sampling uses."""

    error: str | None

    def copy(self) -> "TokenMatcher": ...
    def allow(self, words: NDArray[np.int32]) -> None: ...
    def accept(self, token_id: int) -> None: ...


class SeenTokens:
    """The token ids of a request's prompt and output, and each one's count in the output."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        unique = list(dict.fromkeys(prompt_token_ids))
        self._indices = {token_id: index for index, token_id in enumerate(unique)}
        self._ids = np.array(unique or [0], dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self)]

    def copy(self) -> "SeenTokens":
        other = object.__new__(SeenTokens)
        other._indices = dict(self._indices)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    def count(self, token_id: int) -> None:
        index = self._indices.get(token_id)
        if index is None:
            index = self._indices[token_id] = len(self._indices)
            if index == len(self._ids):
                self._ids = np.resize(self._ids, 2 * index)
                self._counts = np.resize(self._counts, 2 * index)
            self._ids[index], self._counts[index] = token_id, 0
        self._counts[index] += 1


class History:
    """The sampling state that depends on the previous tokens.

    Attributes:
        seen: the tokens that penalties count; None: the request has no penalties.
        matcher: the state of the request's grammar; None: the request has no grammar.
        filter: removes more tokens; None: the request removes none.
        withheld: tokens that may not come yet, because they would end the output too early. Empty
            after `num_withheld` more tokens.
    """

    __slots__ = ("filter", "matcher", "num_withheld", "seen", "withheld")

    def __init__(
        self,
        seen: SeenTokens | None,
        matcher: TokenMatcher | None,
        filter: TokenFilter | None = None,
        withheld: Sequence[int] = (),
        num_withheld: int = 0,
    ) -> None:
        self.seen, self.matcher, self.filter = seen, matcher, filter
        self.withheld, self.num_withheld = withheld, num_withheld

    @property
    def needed(self) -> bool:
        """Whether sampling must wait until the previous tokens are known."""
        return self.seen is not None or self.masked

    @property
    def masked(self) -> bool:
        """Whether only some tokens may come next."""
        return self.matcher is not None or self.filter is not None or bool(self.withheld)

    def allow(self, words: NDArray[np.int32]) -> None:
        """Write the mask of the tokens that may come next (AllowedRows.words)."""
        if self.matcher is None:
            words[:] = -1
        else:
            self.matcher.allow(words)
        if self.filter is not None:
            self.filter.restrict(words)
        if self.withheld:
            before = words.copy()
            remove(words, self.withheld)
            if not words.any():
                words[:] = before  # the grammar allows only the end of sequence

    def accept(self, token_id: int) -> None:
        """Add a token to the output."""
        if self.seen is not None:
            self.seen.count(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)
        if self.filter is not None:
            self.filter.accept(token_id)
        if self.withheld:
            self.num_withheld -= 1
            if not self.num_withheld:
                self.withheld = ()

    def after(self, drafts: Sequence[int]) -> list["History"]:
        """This history, then the history after each draft, as if the draft were accepted."""
        found = [self]
        for draft in drafts:
            last = found[-1]
            found.append(
                History(
                    None if last.seen is None else last.seen.copy(),
                    None if last.matcher is None else last.matcher.copy(),
                    None if last.filter is None else last.filter.copy(),
                    last.withheld,
                    last.num_withheld,
                )
            )
            found[-1].accept(draft)
        return found


class RequestSampling:
    """The sampling settings and the history of one sequence.

    Args:
        index: index among the params.n continuations. Each continuation has its own random draws.
        matcher: the matcher of the request's grammar, which is copied; None: it has no grammar.
        filter: removes more tokens, and is copied; None: the request removes none.
        ends: tokens that end the sequence. The first params.min_tokens tokens are none of them.

    Raises:
        RequestError: a prompt token under a repetition penalty is outside the vocabulary.
    """

    __slots__ = ("history", "settings")

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        index: int = 0,
        matcher: TokenMatcher | None = None,
        filter: TokenFilter | None = None,
        ends: Iterable[int] = (),
    ) -> None:
        self.settings = SamplingSettings(
            **{name: getattr(params, name) for name in _SAME},
            top_p=max(params.top_p, 1e-9),  # in float32, a smaller number may be 0
            logit_bias=tuple((params.logit_bias or {}).items()),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            index=index,
            # Ranks compute in float32, where the smallest temperatures are 0.
            greedy=float(np.float32(params.temperature)) == 0.0,
            num_prompt=len(prompt),
        )
        seen: SeenTokens | None = None
        if params.repetition_penalty != 1:
            if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
                wrong = next(i for i in prompt if not 0 <= i < vocab_size)
                raise RequestError(f"prompt token id {wrong} is not in 0..{vocab_size - 1}")
            seen = SeenTokens(prompt)
        elif params.presence_penalty or params.frequency_penalty:
            seen = SeenTokens(())
        withheld = tuple(i for i in ends if i < vocab_size) if params.min_tokens else ()
        self.history = History(
            seen,
            None if matcher is None else matcher.copy(),
            None if filter is None else filter.copy(),
            withheld,
            params.min_tokens,
        )


def penalty_rows(histories: Sequence[History]) -> PenaltyRows | None:
    """The counted tokens of the rows that have any. Row i has the history histories[i]."""
    found = [(row, h.seen) for row, h in enumerate(histories) if h.seen]
    if not found:
        return None
    return PenaltyRows(
        tuple(row for row, _ in found),
        tuple(len(seen) for _, seen in found),
        np.concatenate([seen.ids for _, seen in found]),
        np.concatenate([seen.counts for _, seen in found]),
    )


def allowed_rows(histories: Sequence[History], vocab_size: int) -> AllowedRows | None:
    """The masks of the rows that have any. Row i has the history histories[i]."""
    found = [(row, history) for row, history in enumerate(histories) if history.masked]
    if not found:
        return None
    words = np.empty((len(found), -(-vocab_size // 32)), np.int32)
    for mask, (_, history) in zip(words, found, strict=True):
        history.allow(mask)
    return AllowedRows(tuple(row for row, _ in found), words)
