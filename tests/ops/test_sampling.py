"""The sampling operator against a naive per-row numpy version, and its statistics."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from finwhale.ops.sampling import SampledTokens
from finwhale.ops.sampling.cases import CASES, GREEDY, MIXED, Case, Row, batch
from finwhale.ops.sampling.cpu import sample as cpu_sample
from finwhale.ops.sampling.draws import derive_seed, uniforms
from finwhale.ops.sampling.ref import penalise, sample, weigh

CHI_SQUARE_0_001 = {7: 24.32, 15: 37.70, 255: 330.5}  # upper 0.1% points by degrees of freedom


def naive_penalised(logits: NDArray[np.float32], row: Row) -> NDArray[np.float64]:
    x: NDArray[np.float64] = logits.astype(np.float64)
    for token, count in row.seen.items():
        x[token] = x[token] / row.repetition if x[token] > 0 else x[token] * row.repetition
        x[token] -= row.frequency * count
        if count > 0:
            x[token] -= row.presence
    for token, value in row.bias.items():
        x[token] += value
    if row.allowed is not None:
        x[[not row.allowed(token) for token in range(len(x))]] = -np.inf
    return x


def naive_probabilities(logits: NDArray[np.float32], row: Row) -> NDArray[np.float64]:
    """The filtered distribution: sets built token by token from the most likely on."""
    x = naive_penalised(logits, row)
    scaled = (x - x.max()) / row.temperature
    p = np.exp(scaled) / np.exp(scaled).sum()
    least = row.min_p * p.max()
    kept = [t for t in np.argsort(-x, kind="stable").tolist() if p[t] >= least]
    if 0 < row.top_k < len(x):
        kept = kept[: row.top_k]
    nucleus = kept
    if row.top_p < 1:
        mass, reached, nucleus = p[kept].sum(), 0.0, []
        for t in kept:
            nucleus.append(t)
            reached += p[t] / mass
            if reached >= row.top_p:
                break
    out: NDArray[np.float64] = np.zeros_like(p)
    out[nucleus] = p[nucleus] / p[nucleus].sum()
    return out


def naive_token(logits: NDArray[np.float32], row: Row) -> int:
    if row.temperature == 0:
        return int(np.argmax(naive_penalised(logits, row)))
    return int(np.searchsorted(np.cumsum(naive_probabilities(logits, row)), row.uniform, "right"))


def run(logits: torch.Tensor, rows: tuple[Row, ...]) -> SampledTokens:
    return sample(logits, batch(rows, logits.shape[-1]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_the_naive_ones(case: Case) -> None:
    logits = case.logits()
    before = logits.clone()
    got = run(logits, tuple(case.rows))
    for i, row in enumerate(case.rows):
        if row.uniform in (0.0, 1 - 2**-53):
            continue  # the first or last token with any weight, and weights end at 2^-44
        assert got.ids_S[i] == naive_token(logits[i].numpy(), row), (i, row)
    assert got.valid_S.all()
    assert torch.equal(before, logits)


@pytest.mark.parametrize(
    "row",
    [
        Row(top_k=1),
        Row(top_k=17),
        Row(top_k=1000),
        Row(top_p=0.01),
        Row(top_p=0.5),
        Row(top_p=0.999),
        Row(min_p=0.02),
        Row(min_p=1.0),
        Row(temperature=0.3, top_k=40, top_p=0.8, min_p=0.001),
        Row(temperature=2.0, top_k=10, top_p=0.5, min_p=0.2),
    ],
)
def test_filters_keep_what_the_naive_ones_keep(row: Row) -> None:
    case = Case("", (row,) * 4, vocab_size=1000)
    logits = case.logits(seed=1)
    filters = batch(case.rows, 1000).filters
    assert filters is not None
    weights = weigh(logits, logits.max(-1).values, filters).double()
    got = (weights / weights.sum(-1, keepdim=True)).numpy()
    for i in range(4):
        want = naive_probabilities(logits[i].numpy(), row)
        # A weight is a float32 exponential cut to 2^-44 of the largest.
        np.testing.assert_allclose(got[i], want, rtol=2e-6, atol=1e-12)
        assert np.array_equal(got[i] > 0, want > 0)


def test_penalties_are_the_naive_ones() -> None:
    seen = {0: 0, 1: 1, 2: 4, 3: 0, 7: 2, 11: 1}
    rows = (
        Row(repetition=1.7, seen=seen),
        Row(frequency=-0.5, seen=seen),
        Row(presence=1.25, seen=seen),
        Row(),
        Row(repetition=0.5, frequency=0.3, presence=-2.0, seen=seen),
    )
    logits = Case("", rows, vocab_size=12).logits(seed=7)
    penalties = batch(rows, 12).penalties
    assert penalties is not None
    got = penalise(logits, penalties)
    for i, row in enumerate(rows):
        want = naive_penalised(logits[i].numpy(), row)
        np.testing.assert_allclose(got[i], want, rtol=1e-6, atol=1e-6)


def test_the_largest_draw_takes_the_last_token_with_any_weight() -> None:
    for vocab_size, last in ((129280, 129270), (129280, 131), (65537, 65535), (3, 1), (2, 0)):
        logits = torch.zeros(1, vocab_size)
        logits[0, last + 1 :] = -math.inf
        assert run(logits, (Row(uniform=1 - 2**-53),)).ids_S == last


def test_top_k_keeps_ties_and_top_p_prefers_lower_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -5.0]])

    def kept(row: Row) -> list[int]:
        filters = batch((row,), 5).filters
        assert filters is not None
        weights = weigh(logits, logits.max(-1).values, filters)
        return [int(i) for i in weights[0].nonzero()[:, 0]]

    assert kept(Row(top_k=2)) == [1, 2, 3]
    assert kept(Row(top_p=0.4)) == [1, 2]
    assert kept(Row(top_k=5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("vocab_size", [5, 64, 1027, 129280])
def test_greedy_ties_go_to_the_lowest_id(vocab_size: int) -> None:
    logits = torch.zeros(3, vocab_size)
    logits[1, [2, vocab_size - 1]] = 1.0
    logits[2, vocab_size - 1] = 1.0
    assert run(logits, (GREEDY,) * 3).ids_S.tolist() == [0, 2, vocab_size - 1]


def test_rows_do_not_depend_on_the_batch() -> None:
    case = Case("", MIXED * 3, vocab_size=4099)
    logits = case.logits(seed=2)
    rows = tuple(case.rows)
    alone = [run(logits[i : i + 1], rows[i : i + 1]) for i in range(len(rows))]
    order = np.random.default_rng(0).permutation(len(rows))
    for size in (2, 3, 7, 16, len(rows)):
        for start in range(0, len(rows), size):
            chosen = order[start : start + size].tolist()
            got = run(logits[chosen], tuple(rows[i] for i in chosen))
            for j, i in enumerate(chosen):
                assert got.ids_S[j] == alone[i].ids_S[0]
                if rows[i].num_top is None:
                    continue
                want = alone[i].logprobs
                assert got.logprobs is not None and want is not None
                num = rows[i].num_top or 0
                assert torch.equal(got.logprobs.token_S[j], want.token_S[0])
                assert torch.equal(got.logprobs.rank_S[j], want.rank_S[0])
                assert torch.equal(got.logprobs.top_SL[j, :num], want.top_SL[0])
                assert torch.equal(got.logprobs.top_ids_SL[j, :num], want.top_ids_SL[0])


def test_threads_change_nothing() -> None:
    case = Case("", MIXED, vocab_size=129280)
    logits = case.logits(seed=3)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run(logits, MIXED).ids_S)
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_is_marked_and_the_others_are_as_before(bad: float) -> None:
    case = Case("", (*MIXED, *MIXED), vocab_size=513)
    logits = case.logits(seed=4)
    want = run(logits, tuple(case.rows))
    spoiled = [0, 1, 3, 6]
    for i in spoiled:
        if bad == -math.inf:
            logits[i] = bad
        else:
            logits[i, 100] = bad
    got = run(logits, tuple(case.rows))
    good = [i for i in range(len(case.rows)) if i not in spoiled]
    assert got.valid_S[good].all() and not got.valid_S[spoiled].any()
    assert torch.equal(got.ids_S[good], want.ids_S[good])
    assert ((got.ids_S >= 0) & (got.ids_S < 513)).all()


def test_excluded_tokens_are_never_drawn() -> None:
    logits = torch.full((400, 6), -math.inf)
    logits[:, 2] = 1.0
    logits[:, 4] = 2.0
    rows = tuple(Row(uniform=u) for u in [0.0, 1 - 2**-53, *np.linspace(0, 0.999, 398)])
    assert set(run(logits, rows).ids_S.tolist()) == {2, 4}


@pytest.mark.parametrize(
    ("vocab_size", "row"),
    [(8, Row()), (16, Row(temperature=0.5)), (16, Row(temperature=3.0)), (256, Row())],
)
def test_draws_follow_the_softmax(vocab_size: int, row: Row) -> None:
    draws = 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5))
    u = uniforms([1234] * draws, range(draws))
    plain = batch((row,), vocab_size)
    assert plain.filters is not None
    filters = replace(plain.filters, rows_R=None, temperature_R=torch.tensor([row.temperature]))
    step = replace(plain, filters=filters, uniform_R=torch.from_numpy(u))
    # One row of logits broadcast over all the draws; min_p_R and temperature_R broadcast too.
    ids = sample(logits.expand(draws, -1).contiguous(), step).ids_S
    expected = draws * np.exp(logits.double().numpy() / row.temperature)
    expected *= draws / expected.sum()
    counts = np.bincount(ids.numpy(), minlength=vocab_size)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < CHI_SQUARE_0_001[vocab_size - 1]


@pytest.mark.parametrize("by", ["step", "seed"])
def test_uniforms_are_uniform_and_independent(by: str) -> None:
    n = 65_536
    zeros = [0] * n
    u = uniforms(zeros, range(n)) if by == "step" else uniforms(range(n), zeros)
    assert (u >= 0).all() and (u < 1).all()
    cells = np.bincount((u * 256).astype(int), minlength=256)
    assert ((cells - n / 256) ** 2 / (n / 256)).sum() < CHI_SQUARE_0_001[255]
    pairs = np.bincount((u[:-1] * 16).astype(int) * 16 + (u[1:] * 16).astype(int), minlength=256)
    assert ((pairs - n / 256) ** 2 / (n / 256)).sum() < CHI_SQUARE_0_001[255]


def test_uniforms_depend_on_seed_and_step_alone() -> None:
    u = uniforms([7, 8, -1, 2**64 - 1, 10**30], [0, 0, 5, 5, 1])
    assert u[2] == u[3]
    assert len(set(u.tolist())) == 4
    assert uniforms([8], [0])[0] == u[1]
    # SplitMix64's published first output for state 0 is 0xE220A8397B1DCDAF: the state of seed 0.
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    z = (0xE220A8397B1DCDAF + golden) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    assert uniforms([0], [0])[0] == ((z ^ (z >> 31)) >> 11) / 2**53


def test_derived_seeds_differ() -> None:
    seeds = {derive_seed(s, i) for s in range(200) for i in range(50)}
    assert len(seeds) == 200 * 50
    assert derive_seed(42, 0) == 42


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = Row(temperature=0.2, top_k=2, repetition=5.0, seen={0: 1, 1: 1}, num_top=4)
    case = Case("", (row, replace(row, num_top=0), replace(row, num_top=None)), vocab_size=50)
    logits = case.logits(seed=6)
    got = run(logits, tuple(case.rows))
    assert got.logprobs is not None
    x = logits.double().numpy()
    want = x - np.log(np.exp(x).sum(-1, keepdims=True))
    for i in (0, 1):
        token = int(got.ids_S[i])
        assert got.logprobs.token_S[i].item() == pytest.approx(want[i, token], abs=1e-6)
        assert got.logprobs.rank_S[i] == (want[i] > want[i, token]).sum() + 1
    order = np.argsort(-want[0], kind="stable")[:4]
    assert got.logprobs.top_ids_SL[0].tolist() == order.tolist()
    np.testing.assert_allclose(got.logprobs.top_SL[0], want[0, order], atol=1e-6)
    assert got.logprobs.top_ids_SL[1].tolist() == [-1] * 4
    assert got.logprobs.token_S[2].isnan() and got.logprobs.rank_S[2] == 0


def test_top_logprobs_order_ties_by_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0]])
    got = run(logits, (replace(GREEDY, num_top=5),)).logprobs
    assert got is not None
    assert got.top_ids_SL[0].tolist() == [1, 3, 5, 2, 4]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cpu_table_s_operator_is_the_definition(case: Case) -> None:
    """Bit for bit, bad rows included."""
    bad = [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf], [2.0, 2.0], [-math.inf, 0.0]]
    greedy = batch([GREEDY] * len(bad), 2)
    for logits, step in (
        (case.logits(), batch(case.rows, case.vocab_size)),
        (torch.tensor(bad), greedy),
        (torch.empty(0, 5), batch([], 5)),
    ):
        found, wanted = cpu_sample(logits, step), sample(logits, step)
        assert torch.equal(found.valid_S, wanted.valid_S)
        assert torch.equal(found.ids_S[found.valid_S], wanted.ids_S[wanted.valid_S])
        assert (found.logprobs is None) == (wanted.logprobs is None)
