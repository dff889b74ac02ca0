"""Rows of long documents: whole books and speeches, and conversations of hundreds of turns.

The corpus has pieces of at most some 4,000 tokens. Pieces of one text that follow one another, or
conversations one after another, make a long document when all but the first lose the token that
begins a sequence.
"""

from __future__ import annotations

import numpy as np
from corpus import ALIGNMENT, PAD, Corpus, Rows

BOS, USER = 0, 3
PROSE = ("sotu", "moby", "shakespeare", "bible")
PROSE_SHARE = 0.4  # of the long documents
SHORT_SHARE = 0.2  # of the rows: documents as they are
# How often each number of documents shares a row.
DOCUMENTS_OF_A_ROW = {1: 0.6, 2: 0.25, 4: 0.15}


def starts_of(corpus: Corpus) -> np.ndarray:
    starts: np.ndarray = np.cumsum(corpus.lengths) - corpus.lengths
    return starts


def of_sources(corpus: Corpus, prose: bool) -> np.ndarray:
    """Documents of prose, or conversations that begin with the user's turn."""
    is_prose = np.isin(corpus.source, [corpus.sources.index(name) for name in PROSE])
    if prose:
        return np.flatnonzero(is_prose)
    second = corpus.tokens[np.minimum(starts_of(corpus) + 1, len(corpus.tokens) - 1)]
    return np.flatnonzero(~is_prose & (second == USER))


class LongRows:
    """Training rows of `length` tokens, at random."""

    def __init__(self, corpus: Corpus, length: int, seed: int) -> None:
        self.corpus, self.length = corpus, length
        self.rng = np.random.default_rng([seed, length])
        self.starts = starts_of(corpus)
        training = ~corpus.held_out
        self.prose, self.chats = (
            d[training[d]] for d in (of_sources(corpus, True), of_sources(corpus, False))
        )
        # Conversations with as many tokens as there are of each kind, but long ones more often.
        weight = np.sqrt(corpus.lengths[self.chats].astype(np.float64))
        self.cumulative = np.cumsum(weight / weight.sum())

    def tokens_of(self, document: int, first: bool) -> np.ndarray:
        start = self.starts[document]
        tokens = self.corpus.tokens[start : start + self.corpus.lengths[document]]
        return tokens if first or tokens[0] != BOS else tokens[1:]

    def document(self, size: int) -> np.ndarray:
        """A long document of exactly `size` tokens."""
        prose = self.rng.random() < PROSE_SHARE
        at, total = int(self.rng.integers(len(self.prose))), 0
        parts: list[np.ndarray] = []
        while total < size:
            if prose:
                document = self.prose[(at + len(parts)) % len(self.prose)]
            else:
                index = np.searchsorted(self.cumulative, self.rng.random())
                document = self.chats[min(int(index), len(self.chats) - 1)]
            parts.append(self.tokens_of(int(document), not parts))
            total += len(parts[-1])
        return np.concatenate(parts)[:size]

    def short(self) -> tuple[np.ndarray, np.ndarray]:
        """A row of documents as they are."""
        tokens = np.full(self.length, PAD, np.uint16)
        doc = np.full(self.length, 2**20, np.int32)
        at = number = 0
        while at < self.length:
            prose = self.rng.random() < 0.05
            group = self.prose if prose else self.chats
            part = self.tokens_of(int(self.rng.choice(group)), True)[: self.length - at]
            tokens[at : at + len(part)] = part
            end = min(self.length, -(-(at + len(part)) // ALIGNMENT) * ALIGNMENT)
            doc[at:end] = number
            at, number = end, number + 1
        return tokens, doc

    def row(self) -> tuple[np.ndarray, np.ndarray]:
        if self.rng.random() < SHORT_SHARE:
            return self.short()
        counts, shares = list(DOCUMENTS_OF_A_ROW), list(DOCUMENTS_OF_A_ROW.values())
        count = int(self.rng.choice(counts, p=shares))
        size = self.length // count
        tokens = np.concatenate([self.document(size) for _ in range(count)])
        return tokens, np.repeat(np.arange(count, dtype=np.int32), size)

    def rows(self, count: int) -> Rows:
        made = [self.row() for _ in range(count)]
        tokens = np.stack([tokens for tokens, _ in made]).astype(np.int16)
        return Rows(tokens=tokens, doc=np.stack([doc for _, doc in made]))


def position_rows(corpus: Corpus, length: int, num_rows: int, shift: int) -> Rows:
    """Rows of held-out text for measuring by position.

    They are cut from a ring of num_rows * shift tokens, each `shift` further than the one before,
    so that each `shift` positions of all rows together cover every token of the ring once.
    """
    parts: list[np.ndarray] = []
    starts, total, size = starts_of(corpus), 0, num_rows * shift
    groups = [d[corpus.held_out[d]] for d in (of_sources(corpus, True), of_sources(corpus, False))]
    rng = np.random.default_rng(0)
    groups = [rng.permutation(group) for group in groups]
    used, taken = [0, 0], [0, 0]
    while total < size:
        kind = int(taken[0] > taken[1])  # as many tokens of prose as of conversations
        document = groups[kind][used[kind] % len(groups[kind])]
        part = corpus.tokens[
            starts[document] : starts[document] + min(corpus.lengths[document], 4000)
        ]
        part = part[1:] if part[0] == BOS else part
        used[kind] += 1
        taken[kind] += len(part)
        total += len(part)
        parts.append(part)
    ring = np.concatenate(parts)[:size]
    index = (np.arange(num_rows)[:, None] * shift + np.arange(length)[None, :]) % size
    tokens = ring[index].astype(np.int16)
    tokens[:, 0] = BOS
    return Rows(tokens=tokens, doc=np.zeros_like(tokens, dtype=np.int32))
