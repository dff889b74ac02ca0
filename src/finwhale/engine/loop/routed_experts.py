"""Collects the routed experts of a sequence's tokens over the steps that compute them."""

import operator
from itertools import takewhile

import numpy as np

from finwhale.engine.plan.executor import RoutedExpertsForm
from finwhale.engine.plan.sequences import Chunk
from finwhale.request import ExpertIds

FEWEST_TOKENS = 64  # smallest size of the array


class ExpertRecord:
    """The routed experts of one sequence's tokens, from token `first` on.

    A token keeps the experts of the step that computed it first, even if a preempted sequence
    computes the token again.

    Attributes:
        end: index of the first token whose experts are not known.
    """

    def __init__(self, first: int, form: RoutedExpertsForm) -> None:
        self.first = self.end = first
        self._ids: ExpertIds = np.empty((0, *form.shape), form.dtype)

    def add(self, chunk: Chunk, ids: ExpertIds) -> None:
        """Add the experts of a chunk's tokens, except for rejected drafts.

        Args:
            ids: [tokens of the chunk, layers, top-k]. The sequence already has the tokens that the
                step sampled.
        """
        assert chunk.start <= self.end, "a token was reused whose experts are not known"
        end = chunk.known + _num_accepted(chunk)
        if end <= self.end:
            return
        begin, after = self.end - self.first, end - self.first
        if after > len(self._ids):
            size = max(FEWEST_TOKENS, after, 2 * len(self._ids))
            grown = np.empty((size, *self._ids.shape[1:]), self._ids.dtype)
            grown[:begin] = self._ids[:begin]
            self._ids = grown
        self._ids[begin:after] = ids[self.end - chunk.start : end - chunk.start]
        self.end = end

    def of(self, begin: int, end: int) -> ExpertIds:
        """A copy of the experts of tokens begin..end-1, as far as they are known."""
        end = min(end, self.end)
        return self._ids[begin - self.first : max(begin, end) - self.first].copy()


def _num_accepted(chunk: Chunk) -> int:
    """How many of the chunk's drafts the sequence has, in order."""
    tokens = chunk.sequence.token_ids[chunk.known : chunk.known + len(chunk.drafts)]
    right = map(operator.eq, tokens, chunk.drafts)
    return sum(1 for _ in takewhile(bool, right))
