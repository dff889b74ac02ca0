"""Engram's hashes: the published counts, and rows against exact integers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from finwhale.errors import CheckpointError
from finwhale.models.deepseek_v41.engram_hash import compress_ids, engram_hashes
from finwhale.models.deepseek_v41.presets import PUBLISHED
from finwhale.ops.deepseek_v41 import HashTensors
from finwhale.ops.deepseek_v41.ref import hashed_rows

ROWS = (384006168, 384016682)  # of the tables of layers 1 and 14 in the published checkpoint


def published(rows: tuple[int, ...] = ROWS) -> dict[int, HashTensors]:
    engram = PUBLISHED["v4.1-flash"].engram
    assert engram is not None and engram.num_embeddings == ROWS
    return engram_hashes(replace(engram, num_embeddings=rows))


def test_texts_with_the_same_key() -> None:
    texts = ["a", " A ", "À", "\t", " ", "\u0301", "ﬁ", "FI", "", "\ufffd", "\ufffd", "b  c", "B c"]
    texts += ["\u0391\u03a3", "\u03b1\u03c3", "\u03b1\u03c2", "a\x1c", "a\u3000"]  # sigmas
    spellings = [f"<{i}>" for i in range(len(texts))]
    ids = compress_ids(texts.__getitem__, spellings.__getitem__, len(texts))
    # A lone accent keeps its text, because nothing else is left of it.
    assert ids.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8, 8, 9, 10, 0]


def test_the_tables_have_the_published_sizes() -> None:
    hashes = published()
    sizes = torch.cat([one.sizes.flatten() for one in hashes.values()])
    assert len(set(sizes.tolist())) == 48 and sizes.min() > 15999999
    for one, rows in zip(hashes.values(), ROWS, strict=True):
        assert one.starts[0, 0] == 0 and one.starts[-1, -1] + one.sizes[-1, -1] == rows
        assert all(m % 2 == 1 and 0 < m * 99091 < 2**63 for m in map(int, one.multipliers))
    with pytest.raises(CheckpointError, match="layer 14's Engram table has 5 rows; its 24 parts"):
        published((ROWS[0], 5))


def test_rows_against_exact_integers() -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 99092, (50, 4))
    ids[0] = 99091
    for one in published().values():
        found = hashed_rows(torch.from_numpy(ids), one)
        assert found.shape == (50, 24)
        for row, tokens in zip(found, ids, strict=True):
            wanted, hashed = [], int(tokens[0]) * int(one.multipliers[0])
            for s in (1, 2, 3):
                hashed ^= int(tokens[s]) * int(one.multipliers[s])
                for size, start in zip(one.sizes[s - 1], one.starts[s - 1], strict=True):
                    wanted.append(hashed % int(size) + int(start))
            assert row.tolist() == wanted
