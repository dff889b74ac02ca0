"""The sampling operator against a naive per-row numpy version, and its statistics."""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.support.cases.sampling import CASES, GREEDY, MIXED, Case, Row, batch

from finwhale.ops.sampling import SampledTokens, noise_cpu
from finwhale.ops.sampling.cpu import sample as cpu_sample
from finwhale.ops.sampling.noise import MASK, gumbel, of_bits, philox
from finwhale.ops.sampling.ref import best_candidates, keep, merge_candidates, penalise, sample

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
        x[~row.allowed(np.arange(len(x)))] = -np.inf
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
    with np.errstate(divide="ignore"):
        kept = np.log(naive_probabilities(logits, row))
    return int(np.argmax(kept + naive_noise(len(logits), row.seed, row.index, row.position)))


@lru_cache
def naive_noise(vocab_size: int, seed: int, index: int, position: int) -> NDArray[np.float64]:
    """Philox in Python's integers, token by token."""
    noise = []
    for token in range(vocab_size):
        block, offset = divmod(token, 256)
        c = [block * 128 + offset % 128, position, index, 0]
        k = [seed & MASK, seed >> 32 & MASK]
        for _ in range(10):
            p0, p1 = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
            c = [p1 >> 32 ^ c[1] ^ k[0], p1 & MASK, p0 >> 32 ^ c[3] ^ k[1], p0 & MASK]
            k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
        high, low = c[:2] if offset < 128 else c[2:]
        noise.append(-math.log(-math.log1p(-((high << 32 | low) + 0.5) / 2**64)))
    return np.array(noise)


def run(logits: torch.Tensor, rows: tuple[Row, ...]) -> SampledTokens:
    return sample(logits, batch(rows, logits.shape[-1]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tokens_are_the_naive_ones(case: Case) -> None:
    logits = case.logits()
    before = logits.clone()
    got = run(logits, tuple(case.rows))
    for i, row in enumerate(case.rows):
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
    got = keep(logits, logits.max(-1).values, filters)
    for i in range(4):
        want = naive_probabilities(logits[i].numpy(), row)
        assert np.array_equal(got[i], want > 0)


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


def test_top_k_keeps_ties_and_top_p_prefers_lower_ids() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -5.0]])

    def kept(row: Row) -> list[int]:
        filters = batch((row,), 5).filters
        assert filters is not None
        return [int(i) for i in keep(logits, logits.max(-1).values, filters)[0].nonzero()[:, 0]]

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
def test_a_bad_row_is_marked_and_changes_no_other_row(bad: float) -> None:
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
    rows = tuple(Row(position=i) for i in range(400))
    assert set(run(logits, rows).ids_S.tolist()) == {2, 4}


DISTRIBUTIONS = [(8, Row()), (16, Row(temperature=0.5)), (16, Row(temperature=3.0)), (256, Row())]
DRAWN_BY = ("position", "seed", "index")


def draw_cases() -> list[Any]:
    """All pairs of a distribution and a number. Two of three pairs are marked long."""
    return [
        pytest.param(*case, by, id=f"{n}-{by}", marks=[pytest.mark.long] if (n - i) % 3 else [])
        for n, case in enumerate(DISTRIBUTIONS)
        for i, by in enumerate(DRAWN_BY)
    ]


@pytest.mark.parametrize(("vocab_size", "row", "by"), draw_cases())
def test_draws_follow_the_softmax(vocab_size: int, row: Row, by: str) -> None:
    draws = 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5))
    rows = [replace(row, **{"seed": 1234, by: i}) for i in range(draws)]
    step = batch(rows, vocab_size)
    ids = sample(logits.expand(draws, -1).contiguous(), step).ids_S
    expected = draws * np.exp(logits.double().numpy() / row.temperature)
    expected *= draws / expected.sum()
    counts = np.bincount(ids.numpy(), minlength=vocab_size)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < CHI_SQUARE_0_001[vocab_size - 1]
    # Successive draws are independent.
    quarter = ids.numpy() // (vocab_size // 4)
    pairs = np.bincount(quarter[:-1] * 4 + quarter[1:], minlength=16)
    quarters = expected.reshape(4, -1).sum(1)
    chances = np.outer(quarters, quarters).ravel() / draws
    assert ((pairs - chances) ** 2 / chances).sum() < CHI_SQUARE_0_001[15]


def test_a_token_of_a_whole_vocabulary_is_as_likely_as_it_should_be() -> None:
    """The top of the noise of 129,280 tokens decides: here half of the probability is theirs."""
    draws = 200
    logits = torch.zeros(20, 129280)
    logits[:, 77777] = math.log(129279)
    chosen = 0
    for start in range(0, draws, 20):
        rows = [Row(position=start + i) for i in range(20)]
        chosen += int((run(logits, tuple(rows)).ids_S == 77777).sum())
    assert abs(chosen - draws / 2) < 3.3 * math.sqrt(draws / 4)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([MASK] * 4, [MASK] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_has_the_published_words(counter: list[int], key: list[int], words: str) -> None:
    """The known answers of Random123, its authors' library."""
    found = philox(tuple(map(torch.tensor, counter)), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert " ".join(f"{int(word):08x}" for word in found) == words


def bits_and_edges() -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """64 random bits, many times, and numbers about the powers of two; and their two words."""
    edges = [2**i + d for i in range(65) for d in (-1, 0, 1)]
    edges = sorted({n for e in edges for n in (e, 2**64 - 1 - e) if 0 <= n < 2**64})
    rng = np.random.default_rng(0)
    bits = edges + [int(n) for n in rng.integers(0, 2**64, 20_000, np.uint64)]
    high, low = (torch.tensor(part) for part in zip(*(divmod(n, 2**32) for n in bits), strict=True))
    return bits, high, low


def test_the_noise_is_precise_at_both_ends() -> None:
    bits, high, low = bits_and_edges()
    found = of_bits(high, low).double().numpy()
    assert np.isfinite(found).all()
    for n, got in zip(bits, found.tolist(), strict=True):
        w, u = (n + 0.5) / 2**64, (2**64 - n - 0.5) / 2**64
        # Of a fraction near 1 the other one has the digits.
        want = -math.log(-math.log1p(-w) if w < 0.5 else -math.log(u))
        assert got == pytest.approx(want, rel=2.5e-7, abs=2.5e-7), n


def test_the_cpu_s_noise_has_the_definition_s_bits() -> None:
    _, high, low = bits_and_edges()
    words = torch.stack((high, low)).numpy().astype(np.uint32)
    assert torch.equal(torch.from_numpy(-noise_cpu.of_bits(words)), of_bits(high, low))
    most = 2**32 - 1
    seeds = torch.tensor([0, -1, 7, 2**63 - 1, -(2**63), most, -most, 1 << 32])
    indices, positions = torch.tensor([0, most, 1, 2, most - 1, 0, 5, most]), torch.arange(8) * most
    positions //= 7
    for first, count in ((0, 4096), (0, 1), (77, 5000), (2**20 + 255, 2), (300, 256)):
        asked = seeds, indices, positions, count, first
        assert torch.equal(noise_cpu.gumbel(*asked), gumbel(*asked))
    none = torch.empty(0, dtype=torch.int64)
    assert noise_cpu.gumbel(none, none, none, 5).shape == (0, 5)


def test_noise_belongs_to_seed_continuation_position_and_token() -> None:
    def noise(seed: int = 7, index: int = 0, position: int = 0, **part: int) -> torch.Tensor:
        of = (torch.tensor([x]) for x in (seed, index, position))
        return gumbel(*of, **{"num_tokens": 1000, **part})[0]

    whole = noise()
    assert whole.unique().numel() == 1000
    for first, count in ((0, 1), (127, 2), (128, 128), (255, 300), (999, 1)):
        assert torch.equal(noise(first=first, num_tokens=count), whole[first : first + count])
    others = [noise(seed=8), noise(seed=7 + 2**32), noise(index=1), noise(position=1)]
    for other in others:
        assert not (other == whole).any()
    # Philox has no relation between neighbours that a correlation could find.
    for other in (*others, whole.roll(1), whole.roll(128)):
        assert abs(np.corrcoef(other.numpy(), whole.numpy())[0, 1]) < 0.12


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_candidates_of_shards_give_the_token_of_the_whole_row(shards: int) -> None:
    rows = [
        replace(row, seed=i) for i, row in enumerate([Row(), GREEDY, Row(temperature=0.01)] * 5)
    ]
    step = batch(rows, 2008)
    logits = Case("", rows, 2008).logits(seed=8)
    logits[3] = 1.0
    logits[4] = 2.0  # greedy, all equal
    logits[5, 100:] = -math.inf
    logits[6] = -math.inf
    logits[7, 2000] = math.nan
    logits[8, 5] = math.inf
    parts = [
        best_candidates(part, step, first)
        for part, first in zip(logits.chunk(shards, 1), range(0, 2008, 2008 // shards), strict=True)
    ]
    found, wanted = merge_candidates(torch.cat(parts, 1)), sample(logits, step)
    assert torch.equal(found.valid_S, wanted.valid_S)
    assert torch.equal(found.ids_S[found.valid_S], wanted.ids_S[found.valid_S])
    assert ((found.ids_S >= 0) & (found.ids_S < 2008)).all()
    assert found.valid_S.tolist() == [True] * 6 + [False] * 3 + [True] * 6


def test_equal_values_of_two_shards_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, 8)
    logits[:, :4] = -0.0
    parts = [best_candidates(logits[:, i : i + 4], batch([GREEDY], 8), i) for i in (4, 0)]
    assert merge_candidates(torch.cat(parts, 1)).ids_S == 0


@pytest.mark.parametrize(
    "row",
    [
        Row(top_k=2), Row(top_p=0.5), Row(min_p=0.1), Row(bias={1: 1.0}), Row(num_top=0),
        Row(seen={1: 1}), Row(allowed=lambda ids: ids > 2),
    ],
)  # fmt: skip
def test_rows_that_need_their_whole_logits(row: Row) -> None:
    step = batch([Row(), row], 8)
    assert step.needs_whole_rows and not batch([Row(), GREEDY], 8).needs_whole_rows
    with pytest.raises(ValueError, match="part of the vocabulary"):
        best_candidates(torch.zeros(2, 8), step, 0)


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
