"""The Triton kernels of sampling in the interpreter, against the reference.

The interpreter's exponentials are numpy's, so the reference takes them too: then every token is the
same, and those next to a border of min_p or top_p are as well.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from tests.support.cases import sampling as cases
from tests.support.cases.sampling import GREEDY, VOCAB_SIZE, Row
from torch import Tensor

from finwhale.ops.sampling import Filters, SamplingBatch, cpu, draw_triton, ref
from finwhale.ops.sampling import sample_triton as kernels
from finwhale.ops.sampling.noise import HALF, of_bits

from .kernels_support import Inputs

BATCH = SamplingBatch()


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
    """Tokens, which must be the reference's, as must be what the filters keep."""
    batch = cases.batch(rows, logits.shape[1])
    if batch.filters is not None and batch.filters.active:
        kept(logits, batch.filters)
    return assert_same(logits, batch)


def kept(logits: Tensor, f: Filters) -> list[list[int]]:
    """The tokens that the filters of each row that draws keep: the reference's."""
    x = logits if f.rows_R is None else logits[f.rows_R]
    wanted = ref.keep(x, x.amax(-1), f)
    parts = kernels._parts(*logits.shape)
    ends = draw_triton.find_kept(logits, *kernels._best(logits, parts, low=True), parts, f)
    assert torch.equal(ends.top_R, x.amax(-1))
    bits = (x + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    width = (x.shape[1] - 1).bit_length()
    sort_keys = (order << width) + (1 << width) - 1 - torch.arange(x.shape[1])
    e = ((x - ends.top_R[:, None]) / f.temperature_R[:, None]).exp_()
    found = (sort_keys >= ends.least_R[:, None]) & (e >= ends.floor_R[:, None])
    assert torch.equal(found, wanted)
    return [row.nonzero()[:, 0].tolist() for row in found]


def kept_of(logits: Tensor, row: Row) -> list[int]:
    """The tokens that the filters of every row keep."""
    filters = cases.batch([row] * len(logits), logits.shape[1]).filters
    assert filters is not None
    return kept(logits, filters)[0]


def filters_of_all(num_rows: int, top_k: int, top_p: float) -> Filters:
    rows = torch.arange(num_rows)
    return Filters(
        rows_R=None,
        temperature_R=torch.ones(num_rows),
        seeds_R=rows,
        indices_R=rows,
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


def test_rows_of_several_steps_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 4)
    assert_same(Inputs().normal(2, 20011))


def test_ties_go_to_the_lowest_id_and_zero_has_no_sign() -> None:
    logits = torch.full((4, 9000), -1.0)
    logits[0, [8999, 4097, 4096]] = 2.0
    logits[1, [3, 8000]] = torch.tensor([-0.0, 0.0])
    logits[2, [3, 8000]] = torch.tensor([0.0, -0.0])
    assert kernels.sample(logits, SamplingBatch()).ids_S.tolist() == [4096, 3, 3, 0]


def test_rows_without_a_finite_maximum_are_not_valid() -> None:
    logits = torch.zeros(6, 5000)
    logits[0, 4000] = torch.nan
    logits[1, 4000] = -torch.tensor(torch.nan)
    logits[2, 4000] = torch.inf
    logits[3] = -torch.inf
    logits[4] = -torch.inf
    logits[4, 4321] = torch.finfo(torch.float32).min
    logits[5, 4000] = torch.finfo(torch.float32).max
    found = kernels.sample(logits, SamplingBatch())
    ids = found.ids_S
    assert found.valid_S.tolist() == [False] * 4 + [True] * 2
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
def test_what_is_kept_and_drawn(row: Row) -> None:
    logits = Inputs(1).normal(1, 1500, scale=2.0).expand(6, -1)
    ids = drawn(logits, *(replace(row, position=i) for i in range(6)))
    assert len(set(ids)) >= 3


def test_extreme_filters() -> None:
    rows = [
        Row(temperature=t, top_k=k, top_p=p, min_p=m, seed=seed)
        for seed, (t, k, p, m) in enumerate(
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
        )
    ]
    drawn(Inputs().normal(len(rows), 3000, scale=3.0), *rows)


@pytest.mark.parametrize(
    ("top_k", "top_p", "wanted"),
    [(3000, 1.0, [3000] * 3), (3000, 0.9, None), (1, 1.0, [1] * 3), (50, 1e-300, [1] * 3)],
)
def test_filters_that_leave_all_or_one(top_k: int, top_p: float, wanted: list[int] | None) -> None:
    """None: the fewest of the most likely tokens whose probabilities add up to top_p."""
    batch = SamplingBatch(filters=filters_of_all(3, top_k, top_p), positions_R=torch.arange(3))
    logits = Inputs().normal(3, 3000, scale=2.0)
    assert_same(logits, batch)
    assert batch.filters is not None
    if wanted is None:
        # No sum is within the rounding errors of float32 of top_p.
        sums = logits.double().softmax(-1).sort(-1, descending=True).values.cumsum(-1)
        assert (sums - top_p).abs().min() > 1e-6
        wanted = ((sums < top_p).sum(-1) + 1).tolist()
    assert [len(tokens) for tokens in kept(logits, batch.filters)] == wanted


def test_every_logit_equal_to_the_kth_is_kept() -> None:
    logits = torch.full((1, 4000), -1.0)
    logits[0, 17] = 0.0
    logits[0, 3900:3990] = -0.25
    assert kept_of(logits, Row(top_k=2)) == [17, *range(3900, 3990)]


def test_equal_logits_at_the_end_of_top_p_keep_the_lower_ids() -> None:
    logits = torch.zeros(1, 4000)
    assert kept_of(logits, Row(top_p=0.3)) == list(range(1200))
    logits[0, :10] = 0.25
    assert kept_of(logits, Row(top_p=0.9))[-1] == 3599
    logits[0, :10] = 0.0
    # With -0.0, which is equal; below them what top_k keeps and top_p does not.
    logits[0, ::2] *= -1
    logits[0, 500:] = -3.0
    assert kept_of(logits, Row(top_p=0.3, top_k=600))[-1] < 500
    assert kept_of(logits, Row(top_p=0.3, top_k=500)) == list(range(150))


def test_top_p_is_of_what_top_k_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far less than what is in the bin in which top_k ends."""
    monkeypatch.setattr(draw_triton, "BINS", 4)
    logits = -1 - torch.arange(1100.0)[None] * 1e-4
    logits[0, :100] = 0.0
    assert kept_of(logits, Row(top_k=110, top_p=0.9)) == list(range(94))


def test_logits_of_few_values() -> None:
    """Every border falls among equals."""
    logits = (Inputs().normal(6, 2500, scale=3.0)).round()
    rows = [
        Row(top_k=k, top_p=p, seed=seed)
        for seed, (k, p) in enumerate(product([0, 100, 1000], [0.4, 0.95]))
    ]
    drawn(logits, *rows)


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((6, 5000), -torch.inf)
    logits[:, 2500:2504] = 1.0
    logits[4:, 2504:] = -1e30
    rows = [Row(), Row(top_k=100), Row(top_p=0.5), Row(min_p=0.5)]
    rows += [Row(top_k=100, top_p=0.9), Row(temperature=1e5)]
    assert set(drawn(logits, *rows)) <= {2500, 2501, 2502, 2503}


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
        filters=filters_of_all(0, 5, 0.9), positions_R=torch.empty(0, dtype=torch.int64)
    )
    assert kernels.sample(torch.empty(0, 100), batch).ids_S.shape == (0,)
    draws = cases.batch([Row()], 100)
    candidates = kernels.best_candidates(torch.empty(0, 100), draws, 0)
    assert kernels.merge_candidates(candidates.expand(-1, 2)).ids_S.shape == (0,)


def test_a_row_depends_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the other rows, nor on how it is cut."""
    case = cases.Case("", (*cases.MIXED[1:6:2], cases.MIXED[13]), 1100, spread=2.0)
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


@triton.jit
def _noise_kernel(high_ptr, low_ptr, out_ptr, N, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    high = tl.load(high_ptr + i, mask=i < N, other=0).to(tl.uint32)
    low = tl.load(low_ptr + i, mask=i < N, other=0).to(tl.uint32)
    tl.store(out_ptr + i, draw_triton._of_bits(high, low), mask=i < N)


def test_the_noise_has_the_definition_s_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    high, low = torch.randint(0, 2**32, (2, 50_000), generator=generator)
    edges = 2 ** torch.arange(32)
    high[:66] = torch.cat((torch.tensor([0, 2**32 - 1]), edges, 2**32 - 1 - edges))
    high[66:100], low[:66] = 0, high[:66].flip(0)
    low[66:100] = torch.cat((torch.tensor([0, 2**32 - 1]), edges))
    out = torch.empty(len(high))
    _noise_kernel[(triton.cdiv(len(high), 1024),)](high, low, out, len(high), BLOCK=1024)
    assert torch.equal(out, of_bits(high, low))


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_candidates_of_shards_give_the_token_of_the_whole_row(shards: int) -> None:
    """With shards that begin anywhere in a pair of tiles, and shorter than one."""
    for vocab_size in (8 * 141, 8):
        rows = [replace(row, seed=i) for i, row in enumerate([Row(), GREEDY, Row()] * 2)]
        logits = Inputs().normal(len(rows), vocab_size)
        logits[3, vocab_size // 2 :] = torch.nan
        logits[4] = -torch.inf
        logits[5] = 0.0
        for some in (rows, [GREEDY] * 6):
            batch, width = cases.batch(some, vocab_size), vocab_size // shards
            parts = []
            for first in range(0, vocab_size, width):
                part = logits[:, first : first + width]
                parts.append(kernels.best_candidates(part, batch, first))
                best = parts[-1].amax(1, keepdim=True)
                assert torch.equal(best, ref.best_candidates(part, batch, first))
            assert len({part.shape for part in parts}) == 1
            together = torch.cat(parts, 1)
            found, wanted = kernels.merge_candidates(together), ref.sample(logits, batch)
            assert torch.equal(found.ids_S, ref.merge_candidates(together).ids_S)
            assert torch.equal(found.valid_S, wanted.valid_S)
            assert found.ids_S[found.valid_S].tolist() == wanted.ids_S[wanted.valid_S].tolist()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_exchange_as_many_candidates(ranks: int) -> None:
    """Whatever they draw; without an extra part for a first token within a pair of tiles."""
    width = VOCAB_SIZE // ranks
    for num_rows in (1, 2, 64, 65, 100, 200, 5000):
        parts = kernels._parts_of_rank(num_rows, width)
        for rank in range(ranks):
            needed = width + rank * width % (2 * HALF)
            assert parts.count * parts.steps * parts.block >= needed
        assert parts.count == kernels._parts(num_rows, width).count
        assert num_rows * parts.count <= kernels.PROGRAMS + num_rows


def test_parts_without_a_token() -> None:
    """A row's only part with tokens holds nothing but -inf, and still has the best candidate."""
    logits = torch.full((2, 3000), -torch.inf)
    logits[1] = torch.nan
    draws = cases.batch([Row(), Row()], 3000 * 4)
    for batch in (BATCH, draws):
        found = kernels.best_candidates(logits, batch, 9000)
        assert found.shape == (2, 4)
        assert torch.equal(found.amax(1, keepdim=True), ref.best_candidates(logits, batch, 9000))
    few = kernels.best_candidates(logits[:, :900], BATCH, 900)
    assert few.shape == (2, 2) and (few[:, 1] < few[:, 0]).all()
    merged = kernels.merge_candidates(torch.cat((few[:, 1:], few), 1))
    assert merged.ids_S.tolist() == [900, 900] and merged.valid_S.tolist() == [False, False]


def test_the_best_of_many_candidates() -> None:
    """With several warps, and with parts that lie anywhere."""
    candidates = torch.randint(-(2**62), 2**62, (3, 700), generator=Inputs().generator)
    found, wanted = kernels.merge_candidates(candidates), ref.merge_candidates(candidates)
    assert torch.equal(found.ids_S, wanted.ids_S) and torch.equal(found.valid_S, wanted.valid_S)


def test_a_row_of_temperature_0_is_greedy() -> None:
    """As in a captured step of drafts: every row has a temperature, and some are 0."""
    vocab_size, count = 3000, 8
    logits = Inputs().normal(count, vocab_size)
    logits[1, 77] = logits[1, 2077] = 9.0
    logits[2], logits[4] = -torch.inf, 0.0
    logits[6, 5] = torch.inf
    filters = Filters(
        rows_R=None,
        temperature_R=torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.7, 0.0, 0.0]),
        seeds_R=torch.arange(count),
        indices_R=torch.zeros(count, dtype=torch.int64),
    )
    positions = torch.tensor([0, 3, 2**20, 5, 6, 7, 8, 9])
    batch = SamplingBatch(filters=filters, positions_R=positions)
    found, plain = torch.tensor(assert_same(logits, batch)), ref.sample(logits, BATCH)
    valid, greedy = plain.valid_S, filters.temperature_R == 0
    assert valid.tolist() == [True, True, False, True, True, True, False, True]
    assert torch.equal(found[valid], cpu.sample(logits, batch).ids_S[valid])
    assert torch.equal(found[valid & greedy], plain.ids_S[valid & greedy])
    assert not torch.equal(found[~greedy], plain.ids_S[~greedy])
    assert found[1] == 77 and found[4] == 0
    halves = [
        kernels.best_candidates(part, batch, first)
        for part, first in zip(logits.split(1500, 1), (0, 1500), strict=True)
    ]
    merged = kernels.merge_candidates(torch.cat(halves, 1)).ids_S
    assert torch.equal(merged[valid], found[valid])


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kernels.sample(torch.zeros(4, 8).mT, SamplingBatch())
    with pytest.raises(ValueError, match="got 0"):
        kernels.sample(torch.zeros(1, 0), SamplingBatch())
    with pytest.raises(ValueError, match="bfloat16"):
        kernels.sample(torch.zeros(1, 8).bfloat16(), cases.batch([Row()], 8))
    with pytest.raises(ValueError, match="part of the vocabulary"):
        kernels.best_candidates(torch.zeros(1, 8), cases.batch([Row(top_k=2)], 8), 0)
    with pytest.raises(ValueError, match="a multiple of its 8 tokens, got 12"):
        kernels.best_candidates(torch.zeros(1, 8), BATCH, 12)
