"""Tokens that may not come next, whatever a grammar says: allowed_token_ids and bad_words."""

from collections.abc import Iterable, Sequence
from copy import copy

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
        bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        bits[list(allowed) or slice(None)] = 1
        bits[[sequence[0] for sequence in bad if len(sequence) == 1]] = 0
        self._allowed: Words = np.packbits(bits, bitorder="little").view(np.int32)
        # The longer sequences, by the token before the last.
        self._bad: dict[int, list[tuple[int, ...]]] = {}
        for sequence in bad:
            if len(sequence) > 1:
                self._bad.setdefault(sequence[-2], []).append(tuple(sequence))
        self._longest = max(map(len, bad), default=1) - 1
        self._last: tuple[int, ...] = ()  # of the output, as many as a bad sequence may begin with

    def copy(self) -> "TokenFilter":
        """An independent filter in the same state."""
        return copy(self)

    def restrict(self, words: Words) -> None:
        """Removes tokens from a mask (AllowedRows.words), in place."""
        words &= self._allowed
        if self._last:
            found = self._bad.get(self._last[-1], ())
            remove(words, (b[-1] for b in found if self._last[-len(b) + 1 :] == b[:-1]))

    def accept(self, token_id: int) -> None:
        """Continues the output."""
        if self._longest:
            self._last = (*self._last, token_id)[-self._longest :]


def remove(words: Words, token_ids: Iterable[int]) -> None:
    """Removes tokens from a mask, in place."""
    bits = words.view(np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] &= ~np.uint32(1 << token_id % 32)
