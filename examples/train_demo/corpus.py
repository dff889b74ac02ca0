"""Reads corpus.xz and packs documents into rows of tokens."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAD = 2
ALIGNMENT = 4  # documents start at multiples of the smaller compression ratio


@dataclass(frozen=True, kw_only=True)
class Corpus:
    sources: list[str]
    lengths: np.ndarray  # [documents]
    source: np.ndarray  # [documents] index into sources
    held_out: np.ndarray  # [documents] bool
    tokens: np.ndarray  # uint16, all documents one after another

    @classmethod
    def load(cls, path: Path) -> Corpus:
        with lzma.open(path) as file:
            header = json.loads(file.readline())
            n = header["documents"]
            lengths = np.frombuffer(file.read(4 * n), np.uint32).astype(np.int64)
            source = np.frombuffer(file.read(n), np.uint8)
            held_out = np.frombuffer(file.read(n), np.uint8).astype(bool)
            tokens = np.frombuffer(file.read(2 * header["tokens"]), np.uint16)
        return cls(
            sources=header["sources"],
            lengths=lengths,
            source=source,
            held_out=held_out,
            tokens=tokens,
        )


@dataclass(frozen=True, kw_only=True)
class Rows:
    tokens: np.ndarray  # [rows, T] int16: PAD between documents
    doc: np.ndarray  # [rows, T] int32: number of the document within the packing

    def __len__(self) -> int:
        return len(self.tokens)


def pack(corpus: Corpus, documents: np.ndarray, length: int) -> Rows:
    """Put documents one after another, each aligned to ALIGNMENT, and cut them into rows of
    `length` tokens. PAD fills the last row."""
    lengths = corpus.lengths[documents]
    padded = -(-lengths // ALIGNMENT) * ALIGNMENT
    ends = np.cumsum(padded)
    rows = int(-(-ends[-1] // length))
    source_start = (np.cumsum(corpus.lengths) - corpus.lengths)[documents]
    within = np.arange(ends[-1]) - np.repeat(ends - padded, padded)
    real = within < np.repeat(lengths, padded)
    index = np.where(real, np.repeat(source_start, padded) + within, 0)
    tokens = np.full(rows * length, PAD, np.int16)
    doc = np.full(rows * length, len(documents), np.int32)
    tokens[: ends[-1]] = np.where(real, corpus.tokens[index].astype(np.int16), PAD)
    doc[: ends[-1]] = np.repeat(np.arange(len(documents), dtype=np.int32), padded)
    return Rows(tokens=tokens.reshape(rows, length), doc=doc.reshape(rows, length))


def epoch(corpus: Corpus, weights: dict[str, float], length: int, rng: np.random.Generator) -> Rows:
    """Rows of the training documents in a random order. The weight of a source says how often its
    documents are repeated, or how many of them are dropped."""
    training = np.flatnonzero(~corpus.held_out)
    weight = np.array([weights.get(name, 1.0) for name in corpus.sources])[corpus.source[training]]
    repeats = np.floor(weight + rng.random(len(training))).astype(np.int64)
    documents = np.repeat(training, repeats)
    rows = pack(corpus, rng.permutation(documents), length)
    order = rng.permutation(len(rows))
    return Rows(tokens=rows.tokens[order], doc=rows.doc[order])
