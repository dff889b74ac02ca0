"""The Triton kernels of the greedy step in the interpreter, against the reference."""

import pytest
import torch
from torch import Tensor

from finwhale.ops.sampling import SamplingBatch, cases, ref
from finwhale.ops.sampling import triton as kernels

from .kernels_support import Inputs

BATCH = SamplingBatch()


def assert_same(logits: Tensor) -> None:
    found, wanted = kernels.sample(logits, BATCH), ref.sample(logits, BATCH)
    assert torch.equal(found.valid_S, wanted.valid_S)
    assert torch.equal(found.ids_S[wanted.valid_S], wanted.ids_S[wanted.valid_S])
    assert (found.ids_S >= 0).all() and (found.ids_S < logits.shape[1]).all()


@pytest.mark.parametrize("shape", [(0, 10), (1, 1), (1, 2048), (3, 5000), (2, 20011)], ids=str)
def test_against_the_reference(shape: tuple[int, int]) -> None:
    logits = Inputs().normal(*shape, scale=3.0)
    assert_same(logits)
    assert_same(logits.bfloat16().float())
    found = kernels.greedy(logits.bfloat16())
    wanted = kernels.greedy(logits.bfloat16().float())
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_rows_of_several_steps_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 4)
    assert_same(Inputs().normal(2, 20011))


def test_ties_go_to_the_lowest_id_and_zero_has_no_sign() -> None:
    logits = torch.full((4, 9000), -1.0)
    logits[0, [8999, 4097, 4096]] = 2.0
    logits[1, [3, 8000]] = torch.tensor([-0.0, 0.0])
    logits[2, [3, 8000]] = torch.tensor([0.0, -0.0])
    assert kernels.greedy(logits)[0].tolist() == [4096, 3, 3, 0]


def test_rows_without_a_finite_maximum_are_not_valid() -> None:
    logits = torch.zeros(6, 5000)
    logits[0, 4000] = torch.nan
    logits[1, 4000] = -torch.tensor(torch.nan)
    logits[2, 4000] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 4321] = torch.finfo(torch.float32).min
    logits[5, 4000] = torch.finfo(torch.float32).max
    ids, valid = kernels.greedy(logits)
    assert valid.tolist() == [False] * 4 + [True] * 2
    assert ids[4:].tolist() == [4321, 4000] and ids.min() >= 0 and ids.max() < 5000
    assert_same(logits)


def test_other_batches_are_as_defined() -> None:
    case = cases.Case("", cases.MIXED, vocab_size=1027)
    batch = cases.batch(case.rows, case.vocab_size)
    found, wanted = kernels.sample(case.logits(), batch), ref.sample(case.logits(), batch)
    assert torch.equal(found.ids_S, wanted.ids_S) and torch.equal(found.valid_S, wanted.valid_S)


def test_what_the_kernels_do_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="lie together"):
        kernels.greedy(torch.zeros(4, 8).mT)
    with pytest.raises(ValueError, match="got 0"):
        kernels.greedy(torch.zeros(1, 0))
