"""Ranks that each hold some columns of the logits sample what one rank samples from whole rows."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.support.cases.sampling import GREEDY, MIXED, Row, batch
from torch import Tensor

from finwhale.distributed.collectives import Collectives
from finwhale.models.deepseek_v4.tensor_parallel import SampleFromParts, TensorParallel
from finwhale.ops import Ops
from finwhale.ops.sampling import SampledTokens
from finwhale.ops.tables.cpu import OPS as CPU
from finwhale.ops.tables.reference import OPS as REFERENCE

from .ranks import run_ranks

VOCAB = 1040
DRAWS = tuple(Row(temperature=t, seed=i) for i, t in enumerate((1.0, 0.7, 1.3, 30.0)))
PLAIN = {"greedy": (GREEDY,) * 4, "draws": DRAWS, "both": (*DRAWS, GREEDY, *DRAWS, GREEDY)}


class Counting:
    """Collectives that count the bytes that this rank sends."""

    def __init__(self, collectives: Collectives) -> None:
        self.rank, self._collectives = collectives.rank, collectives
        self.sent = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("sampling sums nothing")

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        self.sent += x.nbytes
        return self._collectives.all_gather(x, dim)

    def check(self) -> None:
        pass


def sample(
    logits: Tensor, rows: Sequence[Row], size: int, ops: Ops
) -> list[tuple[SampledTokens, int]]:
    """Each rank's tokens, and the bytes that it sent."""
    width = logits.shape[1] // size

    def one(collectives: Collectives) -> tuple[SampledTokens, int]:
        counting = Counting(collectives)
        first = collectives.rank.index * width
        sampler = SampleFromParts(ops, TensorParallel(counting), first)
        part = logits[:, first : first + width].contiguous()
        return sampler(part, batch(rows, logits.shape[1])), counting.sent

    return run_ranks(size, one)


def assert_equal(logits: Tensor, rows: Sequence[Row], size: int, ops: Ops = CPU) -> int:
    """All ranks choose the tokens of whole rows; returns the bytes that a rank sends."""
    wanted = ops.sample(logits, batch(rows, logits.shape[1]))
    ranks = sample(logits, rows, size, ops)
    valid = wanted.valid_S
    for found, _ in ranks:
        assert torch.equal(found.valid_S, valid)
        assert torch.equal(found.ids_S[valid], wanted.ids_S[valid])
        assert torch.equal(found.ids_S, ranks[0][0].ids_S)
        assert ((found.ids_S >= 0) & (found.ids_S < logits.shape[1])).all()
        assert (found.logprobs is None) == (wanted.logprobs is None)
        if found.logprobs is not None and wanted.logprobs is not None:
            for name in ("token_S", "rank_S", "top_SL", "top_ids_SL"):
                one, other = getattr(found.logprobs, name), getattr(wanted.logprobs, name)
                assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    return ranks[0][1]


def normal(num_rows: int, vocab_size: int = VOCAB) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=["cpu", "reference"])
@pytest.mark.parametrize("kind", PLAIN)
def test_ranks_exchange_candidates_only(kind: str, ops: Ops, size: int) -> None:
    rows = PLAIN[kind]
    assert assert_equal(normal(len(rows)), rows, size, ops) == 8 * len(rows)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("row", range(len(MIXED)))
def test_one_row_that_needs_its_whole_logits(row: int, size: int) -> None:
    """Filters, penalties, bias, allowed tokens and log-probabilities, beside rows without."""
    rows = (GREEDY, MIXED[row], DRAWS[1])
    sent = assert_equal(normal(3), rows, size)
    plain = replace(MIXED[row], temperature=0.0) == GREEDY or MIXED[row] == Row(temperature=1e-30)
    assert sent == (8 * 3 if plain else 3 * 4 * VOCAB // size)


@pytest.mark.parametrize("size", [2, 4])
def test_equal_logits_of_several_ranks(size: int) -> None:
    """The lowest id wins, wherever it is."""
    logits = torch.zeros(3, VOCAB)
    logits[1, VOCAB // 4 - 1 :] = 1.0
    logits[2, [VOCAB // 2, VOCAB - 1]] = 1.0
    assert_equal(logits, (GREEDY,) * 3, size)
    found = sample(logits, (GREEDY,) * 3, size, CPU)[0][0]
    assert found.ids_S.tolist() == [0, VOCAB // 4 - 1, VOCAB // 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("row", [GREEDY, Row()], ids=["greedy", "draw"])
def test_a_bad_logit_of_any_rank_invalidates_its_row(row: Row, bad: float) -> None:
    logits = normal(6)
    for rank in range(4):
        logits[rank, rank * VOCAB // 4 + 5] = bad
    logits[4, : VOCAB // 2] = -math.inf
    assert_equal(logits, [row] * 6, 4)
    found = sample(logits, [row] * 6, 4, CPU)[0][0]
    assert found.valid_S.tolist() == [False] * 4 + [True] * 2
    assert found.ids_S[4] >= VOCAB // 2
    logits[4] = -math.inf
    assert sample(logits, [row] * 6, 4, CPU)[0][0].valid_S.tolist() == [False] * 5 + [True]
