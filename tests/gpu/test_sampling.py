"""Sampling by kernels on a GPU beside the definition there: tokens and statistics."""

from dataclasses import replace

import pytest
import torch

from finwhale.ops.sampling import SamplingBatch, ref
from finwhale.ops.sampling.cases import CASES, Case, Row, batch

kernels = pytest.importorskip("finwhale.ops.sampling.sample_triton", exc_type=ImportError)
CHI_SQUARE_15 = 37.70  # upper 0.1% point of 15 degrees of freedom


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_the_definition_s(case: Case) -> None:
    """Over many draws of each row, but for a few: exponentials differ in their last bits."""
    wanted = batch(case.rows, case.vocab_size, "cuda")
    same = total = 0
    for seed in range(50):
        logits = case.logits("cuda", seed)
        if wanted.uniform_R is not None:
            generator = torch.Generator("cuda").manual_seed(seed)
            uniform_R = torch.rand(
                wanted.uniform_R.shape, dtype=torch.float64, device="cuda", generator=generator
            )
            wanted = replace(wanted, uniform_R=uniform_R)
        found, expected = kernels.sample(logits, wanted), ref.sample(logits, wanted)
        assert torch.equal(found.valid_S, expected.valid_S) and bool(found.valid_S.all())
        same += int((found.ids_S == expected.ids_S).sum())
        total += len(case.rows)
        again = kernels.sample(logits, wanted)
        assert torch.equal(found.ids_S, again.ids_S)
        for row in (0, len(case.rows) - 1):
            one = kernels.sample(logits[row : row + 1], alone(case.rows[row], wanted, row, case))
            assert torch.equal(one.ids_S, found.ids_S[row : row + 1])
    print(f"{case.name}: {same} of {total} tokens are the definition's")
    assert same >= 0.998 * total


def alone(row: Row, whole: SamplingBatch, place: int, case: Case) -> SamplingBatch:
    """A row's batch of its own, with the draw that it has in the whole one."""
    one = batch((row,), case.vocab_size, "cuda")
    if one.uniform_R is None:
        return one
    assert whole.filters is not None and whole.filters.rows_R is not None
    assert whole.uniform_R is not None
    draws = whole.uniform_R[whole.filters.rows_R == place]
    return replace(one, uniform_R=draws)


def test_the_distribution() -> None:
    """200,000 draws of 16 tokens."""
    num_rows = 200_000
    logits = torch.linspace(0, 3, 16, device="cuda").expand(num_rows, 16).contiguous()
    one = batch((Row(),), 16, "cuda")
    assert one.filters is not None
    filters = replace(
        one.filters, rows_R=None, temperature_R=torch.ones(num_rows, device="cuda"), min_p_R=None
    )
    generator = torch.Generator("cuda").manual_seed(0)
    uniform_R = torch.rand(num_rows, dtype=torch.float64, device="cuda", generator=generator)
    ids = kernels.sample(logits, replace(one, filters=filters, uniform_R=uniform_R)).ids_S
    wanted = logits[0].double().softmax(0) * num_rows
    found = torch.bincount(ids, minlength=16)
    assert float(((found - wanted) ** 2 / wanted).sum()) < CHI_SQUARE_15
