"""Tokens that may not come next, whatever a grammar says: allowed_token_ids and bad_words."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]


class TokenFilter:
    """Removes tokens from the masks of one output.

    Args:
        allowed: the only tokens that may come; empty: all.
        bad: sequences of tokens that the output must not have.
        vocab_size: token ids are below it.
    """

    __slots__ = ("_allowed", "_bad", "_last", "_longest")

    def __init__(
        self, allowed: Sequence[int], bad: Sequence[Sequence[int]], vocab_size: int
    ) -> None:
        self._allowed: Words | None = None
        if allowed:
            bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
            bits[list(allowed)] = 1
            self._allowed = np.packbits(bits, bitorder="little").view(np.int32)
        self._bad = [tuple(sequence) for sequence in bad]
        self._longest = max(map(len, self._bad), default=1) - 1
        self._last: tuple[int, ...] = ()  # of the output, as many as a bad sequence may begin with

    def copy(self) -> "TokenFilter":
        """An independent filter in the same state."""
        other = object.__new__(TokenFilter)
        other._allowed, other._bad = self._allowed, self._bad
        other._longest, other._last = self._longest, self._last
        return other

    def restrict(self, words: Words) -> None:
        """Removes tokens from a mask (AllowedRows.words), in place."""
        if self._allowed is not None:
            words &= self._allowed
        remove(words, (bad[-1] for bad in self._bad if self._ends_with(bad[:-1])))

    def accept(self, token_id: int) -> None:
        """Continues the output."""
        if self._longest:
            self._last = (*self._last, token_id)[-self._longest :]

    def _ends_with(self, tokens: tuple[int, ...]) -> bool:
        return not tokens or self._last[-len(tokens) :] == tokens


def remove(words: Words, token_ids: Iterable[int]) -> None:
    """Removes tokens from a mask, in place."""
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
