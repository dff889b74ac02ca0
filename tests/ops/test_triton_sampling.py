"""The Triton kernels of sampling in the interpreter, against the reference.

The interpreter's exponentials are numpy's, so the reference takes them too: then every token is the
same, and those next to a border of top_p or of the draw are as well.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from finwhale.ops.sampling import Filters, SamplingBatch, cases, draw_triton, ref
from finwhale.ops.sampling import sample_triton as kernels
from finwhale.ops.sampling.cases import GREEDY, Row

from .kernels_support import Inputs

BATCH = SamplingBatch()
LAST = 1 - 2**-53  # the largest uniform


@pytest.fixture(autouse=True)
def numpy_exponentials(monkeypatch: pytest.MonkeyPatch) -> None:
    def exp_(x: Tensor) -> Tensor:
        return x.copy_(torch.from_numpy(np.exp(x.numpy())))

    monkeypatch.setattr(Tensor, "exp_", exp_)


def assert_same(logits: Tensor, batch: SamplingBatch = BATCH) -> list[int]:
    """The tokens."""
    before = logits.clone()
    found, wanted = kernels.sample(logits, batch), ref.sample(logits, batch)
    assert torch.equal(found.valid_S, wanted.valid_S)
    assert found.ids_S[wanted.valid_S].tolist() == wanted.ids_S[wanted.valid_S].tolist()
    assert (found.ids_S >= 0).all() and (found.ids_S < logits.shape[1]).all()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return found.ids_S.tolist()


def drawn(logits: Tensor, *rows: Row) -> list[int]:
    """Tokens, which must be the reference's."""
    return assert_same(logits, cases.batch(rows, logits.shape[1]))


def filters_of_all(num_rows: int, top_k: int, top_p: float) -> Filters:
    rows = torch.arange(num_rows)
    return Filters(
        rows_R=None,
        temperature_R=torch.ones(num_rows),
        top_k_rows_K=rows,
        top_k_K=torch.full((num_rows,), top_k),
        max_top_k=top_k,
        top_p_rows_P=rows,
        top_p_P=torch.full((num_rows,), top_p, dtype=torch.float64),
    )


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


@pytest.mark.parametrize(
    ("vocab_size", "spread"), [(7, 3.0), (1027, 0.01), (1027, 40.0), (4000, 3.0)]
)
def test_mixed_batches(vocab_size: int, spread: float) -> None:
    case = cases.Case("", cases.MIXED, vocab_size, spread)
    assert_same(case.logits(), cases.batch(case.rows, vocab_size))


def test_log_probabilities_are_those_of_unchanged_logits() -> None:
    case = cases.Case("", cases.MIXED, 1027)
    batch = cases.batch(case.rows, 1027)
    found, wanted = (op(case.logits(), batch).logprobs for op in (kernels.sample, ref.sample))
    assert found is not None and wanted is not None
    assert torch.equal(found.rank_S, wanted.rank_S)
    assert torch.equal(found.token_S.nan_to_num(), wanted.token_S.nan_to_num())


def test_changes_of_logits_have_the_reference_s_bits() -> None:
    case = cases.Case("", cases.MIXED, 1027)
    logits, batch = case.logits(), cases.batch(case.rows, 1027)
    assert batch.penalties is not None and batch.bias is not None and batch.allowed is not None
    wanted = ref.add(ref.penalise(logits, batch.penalties), batch.bias)
    wanted = ref.restrict(wanted, batch.allowed)
    assert torch.equal(kernels._change(logits, batch), wanted)
    assert kernels._change(logits, BATCH) is logits


@pytest.mark.parametrize(
    "row",
    [
        Row(),
        Row(temperature=0.3),
        Row(top_k=40),
        Row(top_p=0.9),
        Row(min_p=0.02),
        Row(temperature=1.5, top_k=200, top_p=0.7, min_p=0.001),
        Row(temperature=30.0, top_p=0.5),
    ],
    ids=lambda row: f"{row.temperature} {row.top_k} {row.top_p} {row.min_p}",
)
def test_both_sides_of_borders_between_tokens(row: Row) -> None:
    """A token too many or too few moves them."""
    logits = Inputs(1).normal(1, 1500, scale=2.0).expand(6, -1)
    filters = cases.batch([row] * 6, 1500).filters
    assert filters is not None
    ends = ref.weigh(logits, logits.amax(-1), filters)[0].cumsum(-1)
    borders = ends.unique()[[0, len(ends.unique()) // 2, -2]].double()
    uniforms = torch.cat((borders - 8, borders + 8)) / ends[-1]
    ids = drawn(logits, *(replace(row, uniform=u) for u in uniforms.tolist()))
    assert len(set(ids)) >= 4


def test_extreme_filters() -> None:
    rows = [
        Row(temperature=t, top_k=k, top_p=p, min_p=m, uniform=u)
        for (t, k, p, m), u in product(
            [
                (1e-5, 0, 1.0, 0.0),
                (1e-30, 5, 0.5, 0.0),
                (1e5, 0, 1.0, 0.0),
                (1e5, 2999, 0.999, 0.0),
                (1.0, 1, 1.0, 0.0),
                (1.0, 2999, 1.0, 0.0),
                (1.0, 0, 1e-9, 0.0),
                (1.0, 0, 1 - 2**-53, 0.0),
                (1.0, 0, 1.0, 1.0),
                (1.0, 700, 0.9, 1.0),
            ],
            [0.0, 0.4, LAST],
        )
    ]
    drawn(Inputs().normal(len(rows), 3000, scale=3.0), *rows)


@pytest.mark.parametrize(("top_k", "top_p"), [(3000, 1.0), (3000, 0.9), (1, 1.0), (50, 1e-300)])
def test_filters_that_leave_all_or_one(top_k: int, top_p: float) -> None:
    uniform = torch.tensor([0.0, 0.6, LAST], dtype=torch.float64)
    batch = SamplingBatch(filters=filters_of_all(3, top_k, top_p), uniform_R=uniform)
    assert_same(Inputs().normal(3, 3000, scale=2.0), batch)


def test_all_of_those_equal_to_the_kth_logit_stay() -> None:
    logits = torch.full((1, 4000), -1.0)
    logits[0, 17] = 0.0
    logits[0, 3900:3990] = -0.25
    ids = [drawn(logits, Row(top_k=2, uniform=u))[0] for u in (0.0, 0.02, LAST)]
    assert ids == [17, 3900, 3989]


def test_the_lower_ids_of_those_at_the_end_of_top_p_stay() -> None:
    logits = torch.zeros(1, 4000)
    ids = [drawn(logits, Row(top_p=0.3, uniform=u))[0] for u in (0.0, 0.5, LAST)]
    assert ids == [0, 600, 1199]
    logits[0, :10] = 0.25
    assert drawn(logits, Row(top_p=0.9, uniform=LAST))[0] == 3599
    logits[0, :10] = 0.0
    # With -0.0, which is equal; below them what top_k keeps and top_p does not.
    logits[0, ::2] *= -1
    logits[0, 500:] = -3.0
    assert drawn(logits, Row(top_p=0.3, top_k=600, uniform=LAST))[0] < 500
    ids = [drawn(logits, Row(top_p=0.3, top_k=500, uniform=u))[0] for u in (0.0, LAST)]
    assert ids == [0, 149]


def test_top_p_is_of_what_top_k_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far less than what is in the bin in which top_k ends."""
    monkeypatch.setattr(draw_triton, "BINS", 4)
    logits = -1 - torch.arange(1100.0)[None] * 1e-4
    logits[0, :100] = 0.0
    assert drawn(logits, Row(top_k=110, top_p=0.9, uniform=LAST)) == [93]


def test_logits_of_few_values() -> None:
    """Every border falls among equals."""
    logits = (Inputs().normal(12, 2500, scale=3.0)).round()
    rows = [
        Row(top_k=k, top_p=p, uniform=u)
        for k, p, u in product([0, 100, 1000], [0.4, 0.95], [0.3, LAST])
    ]
    drawn(logits, *rows)


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((6, 5000), -torch.inf)
    logits[:, 2500:2504] = 1.0
    logits[4:, 2504:] = -1e30
    rows = [Row(uniform=LAST), Row(top_k=100), Row(top_p=0.5), Row(min_p=0.5, uniform=0.0)]
    rows += [Row(top_k=100, top_p=0.9, uniform=LAST), Row(temperature=1e5, uniform=LAST)]
    assert drawn(logits, *rows) == [2503, 2502, 2501, 2500, 2503, 2503]


def test_rows_without_a_distribution_leave_the_others_alone() -> None:
    logits = Inputs().normal(6, 3000)
    logits[0, 5] = torch.nan
    logits[1, 2999] = torch.inf
    logits[2] = -torch.inf
    rows = [Row(top_k=5), Row(top_p=0.5), Row(), Row(top_k=5), Row(top_p=0.5), GREEDY]
    batch = cases.batch(rows, 3000)
    assert_same(logits, batch)
    assert kernels.sample(logits, batch).valid_S.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("rows", [[Row()] * 3, [Row(top_p=0.9)] * 3, [GREEDY, Row(), GREEDY]])
def test_rows_that_lie_apart(rows: list[Row]) -> None:
    logits = Inputs().normal(3, 2 * 1100, scale=2.0)
    drawn(logits[:, 100:1100], *rows)


def test_no_rows() -> None:
    batch = SamplingBatch(
        filters=filters_of_all(0, 5, 0.9), uniform_R=torch.empty(0, dtype=torch.float64)
    )
    assert kernels.sample(torch.empty(0, 100), batch).ids_S.shape == (0,)


def test_a_row_depends_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the other rows, nor on how it is cut."""
    case = cases.Case("", (*cases.MIXED[1:6], cases.MIXED[13]), 1100, spread=2.0)
    logits = case.logits()
    together = drawn(logits, *case.rows)
    assert [drawn(logits[i : i + 1], row)[0] for i, row in enumerate(case.rows)] == together
    for module, name, value in (
        (kernels, "PROGRAMS", 6),  # one a row
        (kernels, "BLOCK_V", 256),
        (draw_triton, "BINS", 8),
        (draw_triton, "TILE", 64),
        (draw_triton, "WAYS", 2),
        (draw_triton, "ROWS", 4),
    ):
        monkeypatch.setattr(module, name, value)
        assert drawn(logits, *case.rows) == together


def test_what_the_kernels_do_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="lie together"):
        kernels.greedy(torch.zeros(4, 8).mT)
    with pytest.raises(ValueError, match="got 0"):
        kernels.greedy(torch.zeros(1, 0))
    with pytest.raises(ValueError, match="bfloat16"):
        kernels.sample(torch.zeros(1, 8).bfloat16(), cases.batch([Row()], 8))
