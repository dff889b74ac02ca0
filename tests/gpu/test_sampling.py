"""Sampling by kernels on a GPU beside the definition there: tokens and statistics."""

from dataclasses import replace

import pytest
import torch
from tests.support.cases.sampling import CASES, Case, Row, batch

from finwhale.ops.sampling import SamplingBatch, ref

kernels = pytest.importorskip("finwhale.ops.sampling.sample_triton", exc_type=ImportError)
CHI_SQUARE_15 = 37.70  # upper 0.1% point of 15 degrees of freedom


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_the_definition_s(case: Case) -> None:
    """Every token of a row without min_p and top_p; of the others all but a few, because the last
    bits of exponentials differ.
    """
    exact = torch.tensor([row.min_p == 0 and row.top_p == 1 for row in case.rows], device="cuda")
    wanted = batch(case.rows, case.vocab_size, "cuda")
    same = total = 0
    for seed in range(50):
        logits = case.logits("cuda", seed)
        if wanted.positions_R is not None:
            wanted = replace(wanted, positions_R=torch.full_like(wanted.positions_R, seed))
        found, expected = kernels.sample(logits, wanted), ref.sample(logits, wanted)
        assert torch.equal(found.valid_S, expected.valid_S) and bool(found.valid_S.all())
        assert torch.equal(found.ids_S[exact], expected.ids_S[exact])
        same += int((found.ids_S == expected.ids_S).sum())
        total += len(case.rows)
        again = kernels.sample(logits, wanted)
        assert torch.equal(found.ids_S, again.ids_S)
        for row in (0, len(case.rows) - 1):
            one = kernels.sample(logits[row : row + 1], alone(case.rows[row], seed, case))
            assert torch.equal(one.ids_S, found.ids_S[row : row + 1])
    print(f"{case.name}: {same} of {total} tokens are the definition's")
    assert same >= 0.998 * total


def alone(row: Row, position: int, case: Case) -> SamplingBatch:
    """A row's batch of its own, with the draw that it has in the whole one."""
    return batch((replace(row, position=position),), case.vocab_size, "cuda")


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("num_rows", [1, 8, 128])
def test_candidates_of_shards_give_the_token_of_the_whole_row(shards: int, num_rows: int) -> None:
    rows = [Row(temperature=(0.0, 0.6, 1.0, 2.0)[i % 4], seed=i) for i in range(num_rows)]
    case = Case("", rows)
    step, logits = batch(rows, case.vocab_size, "cuda"), case.logits("cuda")
    width = case.vocab_size // shards
    parts = [
        kernels.best_candidates(logits[:, first : first + width], step, first)
        for first in range(0, case.vocab_size, width)
    ]
    found = kernels.merge_candidates(torch.cat(parts, 1))
    assert bool(found.valid_S.all())
    assert torch.equal(found.ids_S, kernels.sample(logits, step).ids_S)
    assert torch.equal(found.ids_S, ref.sample(logits, step).ids_S)
    # The CPU has the same bits.
    at_home = ref.sample(logits.cpu(), batch(rows, case.vocab_size))
    assert torch.equal(found.ids_S.cpu(), at_home.ids_S)


def test_the_distribution() -> None:
    """200,000 draws of 16 tokens."""
    num_rows = 200_000
    logits = torch.linspace(0, 3, 16, device="cuda").expand(num_rows, 16).contiguous()
    one = batch((Row(),), 16, "cuda")
    assert one.filters is not None
    rows = torch.arange(num_rows, device="cuda")
    filters = replace(
        one.filters,
        rows_R=None,
        temperature_R=torch.ones(num_rows, device="cuda"),
        seeds_R=torch.zeros_like(rows),
        indices_R=torch.zeros_like(rows),
    )
    ids = kernels.sample(logits, replace(one, filters=filters, positions_R=rows)).ids_S
    wanted = logits[0].double().softmax(0) * num_rows
    found = torch.bincount(ids, minlength=16)
    assert float(((found - wanted) ** 2 / wanted).sum()) < CHI_SQUARE_15
