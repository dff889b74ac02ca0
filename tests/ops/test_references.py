"""The references against plain formulas: float64, one token, head and key at a time.

Written from the operators' contracts and the technical report, with loops instead of tensors, so
that they share no code and no shape tricks with what they check. float32 rounds each step to
2^-24, and results come out within a few hundred of those, times the largest value.
"""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tests.support.cases import attention as attention_cases
from tests.support.cases import compressor as compressor_cases
from tests.support.cases import indexer as indexer_cases
from tests.support.cases import linear as linear_cases
from tests.support.cases import mhc as mhc_cases
from tests.support.cases import moe as moe_cases
from tests.support.cases import norm as norm_cases
from tests.support.checked_case import CheckedCase
from tests.support.op_arguments import outliers, results
from tests.support.op_case import Args, Chunks, Draw, entry_rows, step_tokens
from torch import Tensor

from finwhale.ops import Ops, load_ops
from finwhale.ops.attention import AllEntries, RowForm, TopkEntries, Window
from finwhale.ops.compressor import CompressPart
from finwhale.ops.linear import LinearWeight
from finwhale.ops.paging import CacheRows, PageTable, Tokens
from finwhale.ops.rounding import power_of_two_at_least, round_e4m3, scaled_e4m3
from finwhale.platform import Platform

CPU, REFERENCE = load_ops(Platform.cpu()), load_ops(Platform.cpu(), reference=True)
LARGE = 800_000  # values of the arguments beyond which loops take too long
TOLERANCE = 2e-5
Floats = NDArray[np.float64]

E4M3 = sorted(
    {
        sign * (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        for sign in (-1, 1)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    }
)


def rounded(x: Floats, group: int) -> Floats:
    """To the nearest E4M3 value at each group's scale, ties to the even mantissa; group 0: x."""
    if not group:
        return x
    out = np.zeros_like(x)
    table = np.array(E4M3)
    middles = (table[1:] + table[:-1]) / 2
    for start in range(0, len(x), group):
        part = x[start : start + group]
        amax = max(1e-4, max(abs(v) for v in part))
        scale = 2.0 ** math.ceil(math.log2(amax / 448))
        for i, value in enumerate(part / scale):
            index = int(np.searchsorted(middles, value))
            if index < len(middles) and value == middles[index]:
                index += _odd(table[index])
            out[start + i] = table[index] * scale
    return out


def naive_fp4(x: Floats) -> Floats:
    """Round to the nearest e2m1 value at the scale of each 32 values, ties to the even code."""
    out = np.zeros_like(x)
    for start in range(0, len(x), 32):
        part = x[start : start + 32]
        amax = max(6 * 2.0**-126, max(abs(v) for v in part))
        scale = 2.0 ** math.ceil(math.log2(amax / 6))
        for i, value in enumerate(part / scale):
            distances = [(abs(abs(value) - e2m1), code % 2, e2m1) for code, e2m1 in E2M1]
            out[start + i] = math.copysign(min(distances)[2], value) * scale
    return out


# (code, value): 2 bits of exponent with a bias of 1, one of mantissa.
E2M1 = [
    (2 * exponent + mantissa, (mantissa / 2 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 1))
    for exponent in range(4)
    for mantissa in range(2)
]


def naive_hadamard(x: Floats) -> Floats:
    """The entry at (i, j) is negative where i and j share an odd number of bits."""
    indices = range(len(x))
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in indices] for i in indices])
    rotated: Floats = signs @ x / math.sqrt(len(x))
    return rotated


def _odd(value: float) -> bool:
    step = 2.0 ** (max(math.floor(math.log2(abs(value))), -6) - 3) if value else 1.0
    return round(value / step) % 2 == 1


def rms_norm(x: Floats, weight: Floats | float, eps: float) -> Floats:
    return x / math.sqrt(sum(v * v for v in x) / len(x) + eps) * weight


def rope(x: Floats, rotation: Floats, *, back: bool = False) -> Floats:
    out = x.copy()
    first = len(x) - 2 * len(rotation)
    for i, (cos, sin) in enumerate(rotation):
        a, b = x[first + 2 * i], x[first + 2 * i + 1]
        sin = -sin if back else sin
        out[first + 2 * i], out[first + 2 * i + 1] = a * cos - b * sin, b * cos + a * sin
    return out


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def product(x: Floats, weight: Floats) -> Floats:
    return np.array([math.fsum(row * x) for row in weight])


# --- One function an operator: arguments as arrays, what it returns or writes as a list ----------


def naive_rms_norm(x: Floats, weight: Floats, eps: float) -> list[Floats]:
    rows = x.reshape(-1, x.shape[-1])
    return [np.array([rms_norm(row, weight, eps) for row in rows]).reshape(x.shape)]


def naive_linear(x: Floats, w: Any) -> list[Floats]:
    weight = f64(w.weight)
    return [np.array([product(rounded(row, w.input_group), weight) for row in x])]


def naive_grouped_linear(x: Floats, w: Any) -> list[Floats]:
    weight = f64(w.weight)
    parts = [
        [product(rounded(g, w.input_group), weight[i]) for i, g in enumerate(row)] for row in x
    ]
    return [np.array(parts)]


def mixes(streams: Floats, w: Any, params: Any) -> Floats:
    flat = streams.reshape(-1)
    m = product(flat, f64(w.fn)) / math.sqrt(np.mean(flat**2) + params.rms_eps)
    out: Floats = m * f64(w.scale) + f64(w.base)
    return out


def naive_mhc_pre(residual: Floats, w: Any, params: Any) -> list[Floats]:
    xs, posts, matrices = [], [], []
    for streams in residual:
        m = mixes(streams, w, params)
        pre = [sigmoid(v) + params.eps for v in m[:4]]
        matrix = np.exp(m[8:].reshape(4, 4))
        for row in range(4):
            matrix[row] = matrix[row] / sum(matrix[row]) + params.eps
        for step in range(params.num_iters):
            if step:
                for row in range(4):
                    matrix[row] /= sum(matrix[row]) + params.eps
            for column in range(4):
                matrix[:, column] /= sum(matrix[:, column]) + params.eps
        block = sum(p * stream for p, stream in zip(pre, streams, strict=True))
        xs.append(rms_norm(np.asarray(block), f64(w.norm), params.rms_eps))
        posts.append([2 * sigmoid(v) for v in m[4:8]])
        matrices.append(matrix)
    return [np.array(xs), np.array(posts), np.array(matrices)]


def naive_mhc_post(x: Floats, post: Floats, res: Floats, residual: Floats) -> list[Floats]:
    out = np.zeros_like(residual)
    for n, k in np.ndindex(*post.shape):
        out[n, k] = post[n, k] * x[n]
        for j in range(4):
            out[n, k] += res[n, j, k] * residual[n, j]
    return [out]


def naive_mhc_post_pre(
    x: Floats, post: Floats, res: Floats, residual: Floats, w: Any, params: Any
) -> list[Floats]:
    (streams,) = naive_mhc_post(x, post, res, residual)
    return [*naive_mhc_pre(streams, w, params), streams]


def naive_hc_head(residual: Floats, w: Any, params: Any) -> list[Floats]:
    out = []
    for streams in residual:
        pre = [sigmoid(v) + params.eps for v in mixes(streams, w, params)]
        block = np.asarray(sum(p * stream for p, stream in zip(pre, streams, strict=True)))
        out.append(rms_norm(block, f64(w.norm), params.rms_eps))
    return [np.array(out)]


def slot(table: PageTable, sequence: int, row: int) -> int:
    """Where a row lies, by the contract; its page must be one."""
    number = row // table.rows_per_page - int(table.first[sequence])
    assert number >= 0
    page = int(table.pages[sequence, number])
    assert page > 0
    return page * table.rows_per_page + row % table.rows_per_page


def token_positions(tokens: Tokens) -> list[tuple[int, int, int]]:
    """(token, its sequence, its position)."""
    pairs = zip(tokens.sequence.tolist(), tokens.positions.tolist(), strict=True)
    return [(n, b, p) for n, (b, p) in enumerate(pairs)]


def naive_store_window_rows(
    kv: Floats, form: RowForm, tokens: Tokens, window: CacheRows
) -> list[Floats]:
    norm, rotary, pool = f64(form.norm), f64(form.rotary), f64(window.pool)
    for n, b, position in token_positions(tokens):
        row = rope(rms_norm(kv[n], norm, form.eps), rotary[position])
        nope = len(row) - 2 * rotary.shape[1]
        if form.round_nope:
            row[:nope] = rounded(row[:nope], 64)
        pool[slot(window.table, b, position)] = row
    return [pool]


def naive_prepare_qkv(
    q_lora: Floats, q_norm: Floats, kv: Floats, form: RowForm, tokens: Tokens, window: CacheRows
) -> list[Floats]:
    latents = np.array([rms_norm(row, q_norm, form.eps) for row in q_lora])
    return [latents, *naive_store_window_rows(kv, form, tokens, window)]


def naive_sparse_attention(
    q: Floats,
    rotary: Floats,
    eps: float | None,
    tokens: Tokens,
    window: Window,
    entries: TopkEntries | AllEntries | None,
    sink: Floats,
    scale: float,
    out: Floats,
    scales: Floats | None = None,
) -> list[Floats]:
    rows = f64(window.rows.pool)
    for n, b, position in token_positions(tokens):
        seen = range(max(0, position - window.size + 1), position + 1)
        keys = [rows[slot(window.rows.table, b, p)] for p in seen]
        pool = rows if entries is None else f64(entries.rows.pool)
        if isinstance(entries, TopkEntries):
            keys += [pool[s] for s in entries.slots[n].tolist() if s >= 0]
        elif isinstance(entries, AllEntries):
            complete = range((position + 1) // entries.ratio)
            keys += [pool[slot(entries.rows.table, b, w)] for w in complete]
        for a in range(q.shape[1]):
            query = q[n, a] if eps is None else rms_norm(q[n, a], 1.0, eps)
            query = rope(query, rotary[position])
            scores = [float(query @ key) * scale for key in keys]
            top = max([*scores, sink[a]])
            weights = [math.exp(score - top) for score in scores]
            total = sum(weights) + math.exp(sink[a] - top)
            mixed = sum(w * key for w, key in zip(weights, keys, strict=True)) / total
            mixed = rope(mixed, rotary[position], back=True)
            out[n, a] = mixed if scales is None else rounded(mixed, 128)
    return [out]


def naive_compress(
    parts: tuple[CompressPart, ...],
    tokens: Tokens,
    rotary: Floats,
    eps: float,
    max_verify_tokens: int,
) -> list[Floats]:
    return [
        pool for part in parts for pool in _compressed(part, tokens, rotary, eps, max_verify_tokens)
    ]


def _compressed(
    part: CompressPart,
    tokens: Tokens,
    rotary: Floats,
    eps: float,
    max_verify_tokens: int,
) -> list[Floats]:
    w, projected = part.weight, f64(part.projected)
    states, entries = part.state.table, part.entries.table
    before, state, out = f64(part.state.pool), f64(part.state.pool), f64(part.entries.pool)
    norm, ape = f64(w.norm), f64(w.ape)
    token_at = {(b, position): n for n, b, position in token_positions(tokens)}
    ends = {b: position + 1 for _, b, position in token_positions(tokens)}
    counts = Counter(b for _, b, _ in token_positions(tokens))
    # A step that verifies drafts may be undone but for its first token.
    ends = {
        b: end if counts[b] > max_verify_tokens else end - counts[b] + 1 for b, end in ends.items()
    }
    mixed = {4: 8, 128: 128}[w.ratio]
    for n, b, position in token_positions(tokens):
        has_page = states.has_pages(np.array([b]), np.array([position]))
        at_block_end = w.ratio == 4 and position % 256 >= 252 and has_page.all()
        if position >= kept_from(ends[b], w.ratio) or at_block_end:
            state[slot(states, b, position)] = projected[n]
        if (position + 1) % w.ratio:
            continue
        rows = {
            j: projected[token_at[b, p]] if (b, p) in token_at else before[slot(states, b, p)]
            for j, p in enumerate(range(position + 1 - mixed, position + 1))
            if p >= 0
        }
        entry = mix(rows, ape, w.ratio)
        number = position // w.ratio
        entry = rope(rms_norm(entry, norm, eps), rotary[number * w.ratio])
        nope = len(entry) - 2 * rotary.shape[1]
        if part.rounding == "nope":
            entry[:nope] = rounded(entry[:nope], 64)
        elif part.rounding == "key":
            entry = naive_fp4(naive_hadamard(entry))
        out[slot(entries, b, number)] = entry
    return [state, out]


def kept_from(end: int, ratio: int) -> int:
    """The first position whose state outlives a step that ends at `end`."""
    return end // 4 * 4 - 4 if ratio == 4 else end // 128 * 128


def mix(rows: dict[int, Floats], ape: Floats, ratio: int) -> Floats:
    """The gated average of an entry's tokens, by their index among those that it mixes."""
    C = ape.shape[1]
    entry = np.zeros(C)
    for c in range(C):
        gates, values = [], []
        for j, row in rows.items():
            # Ratio 4: [Ca | Cb] of kv, then of the gate; the first 4 tokens in Ca.
            half = C if ratio == 4 and j >= 4 else 0
            gate = 2 * C if ratio == 4 else C
            values.append(row[half + c])
            gates.append(row[gate + half + c] + ape[j, c])
        top = max(gates)
        weights = [math.exp(g - top) for g in gates]
        entry[c] = sum(e * v for e, v in zip(weights, values, strict=True)) / sum(weights)
    return entry


def entry_scores(
    q: Floats, weights: Floats, keys: Floats, rotation: Floats, scale: float, round_query: bool
) -> Floats:
    """[E]: how well a token's index query [I,C] fits each key [E,C]."""
    total = np.zeros(len(keys))
    for w, head in zip(weights, q, strict=True):
        head = rope(head, rotation)
        head = naive_fp4(naive_hadamard(head)) if round_query else head
        total += [w * scale * max(0.0, float(head @ key)) for key in keys]
    return total


def naive_select_entries(
    q: Floats,
    weights: Floats,
    keys: CacheRows,
    rotary: Floats,
    tokens: Tokens,
    topk: int,
    scale: float,
    round_query: bool,
) -> list[Floats]:
    pool, table = f64(keys.pool), keys.table
    chosen = np.full((len(q), topk), -1.0)
    for n, b, position in token_positions(tokens):
        slots = [slot(table, b, e) for e in range((position + 1) // 4)]
        scores = entry_scores(q[n], weights[n], pool[slots], rotary[position], scale, round_query)
        best = sorted(range(len(slots)), key=lambda e: (-scores[e], e))[:topk]
        chosen[n, : len(best)] = [slots[e] for e in sorted(best)]
    return [chosen]


def expert_scores(x: Floats, gate: Floats) -> list[float]:
    return [math.sqrt(math.log1p(math.exp(z))) for z in product(x, gate)]


def naive_route_by_score(
    x: Floats, gate: Floats, bias: Floats, topk: int, scaling: float, positions: Floats
) -> list[Floats]:
    ids, weights = [], []
    for row in x:
        scores = expert_scores(row, gate)
        best = sorted(range(len(scores)), key=lambda e: -(scores[e] + bias[e]))[:topk]
        ids.append(best)
        weights.append([scores[e] / sum(scores[b] for b in best) * scaling for e in best])
    return [np.array(ids, np.float64), np.array(weights)]


def naive_route_by_hash(
    x: Floats,
    gate: Floats,
    table: Floats,
    token_ids: Floats,
    scaling: float,
    positions: Floats,
) -> list[Floats]:
    ids = [[int(e) for e in table[int(t)]] for t in token_ids]
    weights = []
    for row, best in zip(x, ids, strict=True):
        scores = expert_scores(row, gate)
        weights.append([scores[e] / sum(scores[b] for b in best) * scaling for e in best])
    return [np.array(ids, np.float64), np.array(weights)]


def expert(
    x: Floats, w13: Floats, w2: Floats, limit: float, group: int, weight: float = 1.0
) -> Floats:
    """The routing weight multiplies what enters w2, before it is rounded."""
    both = product(rounded(x, group), w13)
    width = len(both) // 2
    hidden = np.zeros(width)
    for i in range(width):
        gate, up = min(both[i], limit), max(-limit, min(both[width + i], limit))
        hidden[i] = gate * sigmoid(gate) * up * weight if gate > -700 else 0.0
    return product(rounded(hidden, group), w2)


def naive_experts(
    x: Floats,
    ids: Floats,
    weights: Floats,
    w: Any,
    limit: float,
    shared: Floats | None = None,
) -> list[Floats]:
    w13, w2 = f64(w.w13), f64(w.w2)
    out = np.zeros_like(x) if shared is None else shared.copy()
    for n, k in np.ndindex(*ids.shape):
        e = int(ids[n, k])
        if e >= 0:
            out[n] += expert(x[n], w13[e], w2[e], limit, w.input_group, weights[n, k])
    return [out]


def naive_experts_combine(each: Floats, ids: Floats, shared: Floats | None = None) -> list[Floats]:
    out = np.zeros_like(each[:, 0]) if shared is None else shared.copy()
    for n, k in np.ndindex(*ids.shape):
        if ids[n, k] >= 0:
            out[n] += each[n, k]
    return [out]


def naive_swiglu_mlp(x: Floats, w: Any, limit: float) -> list[Floats]:
    w13, w2 = f64(w.w13), f64(w.w2)
    return [np.array([expert(row, w13, w2, limit, w.input_group) for row in x])]


# --------------------------------------------------------------------------------------------------

CASES = [
    *norm_cases.CASES,
    *linear_cases.CASES,
    *mhc_cases.CASES,
    *attention_cases.CASES,
    *compressor_cases.CASES,
    *indexer_cases.CASES,
    *moe_cases.CASES,
]


def f64(x: Tensor) -> Floats:
    array: Floats = x.double().numpy()
    return array


def size(case: CheckedCase, args: Args) -> int:
    """Multiplications, roughly: values of the arguments that have a row for each token."""
    total = 0
    for arg in args:
        if isinstance(arg, Tensor) and not (case.operator == "select_entries" and arg.dim() == 2):
            total += arg.numel()
        for name in ("weight", "w13", "w2", "fn"):
            if hasattr(arg, name):
                total += getattr(arg, name).numel() * max(1, args[0].shape[0])
    return total


def is_small(case: CheckedCase) -> bool:
    args = case.args()
    rows = args[0][0].projected if isinstance(args[0], tuple) else args[0]
    return len(rows) > 0 and size(case, args) < LARGE


SMALL = [case for case in CASES if is_small(case)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_against_plain_formulas(case: CheckedCase) -> None:
    naive = globals()[f"naive_{case.operator}"]
    wanted = naive(*(f64(arg) if isinstance(arg, Tensor) else arg for arg in case.args()))
    returned = results(getattr(REFERENCE, case.operator), case.args(), case.written)
    if case.operator == "select_entries":
        assert returned[0].dtype == torch.int32
        returned = [widened(returned[0], case.args()[5])]
    found = [f64(result) for result in returned]
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        unit = np.abs(other).max(initial=0.0)
        error = np.abs(one - other)
        assert (error > TOLERANCE * unit).sum() <= case.flips * error.size
        assert error.max(initial=0.0) <= (case.flip if case.flips else TOLERANCE) * unit


def widened(slots: Tensor, topk: int) -> Tensor:
    """[N,topk]: selections are narrower where no token has that many entries."""
    return F.pad(slots, (0, topk - slots.shape[1]), value=-1)


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("experts", [8, 37, 256])
def test_the_lowest_expert_wins_ties(ops: Ops, num_tokens: int, experts: int) -> None:
    """Scores of a zero input are equal, so the bias alone decides; most of its values are equal."""
    draw = torch.Generator().manual_seed(experts)
    bias = torch.randint(3, (experts,), generator=draw).float()
    gate = torch.randn(experts, 32, generator=draw)
    order = sorted(range(experts), key=lambda i: (-float(bias[i]), i))
    where = torch.arange(num_tokens)
    for topk in (1, 6, experts):
        ids, weights = ops.route_by_score(torch.zeros(num_tokens, 32), gate, bias, topk, 1.5, where)
        assert ids.tolist() == [order[:topk]] * num_tokens
        assert torch.allclose(weights, torch.full_like(weights, 1.5 / topk), rtol=1e-6, atol=0)


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("chunks", [((900, 901), (0, 300), (477, 483)), ((1500, 1501),)], ids=str)
def test_selections_of_real_values(ops: Ops, rounds: bool, chunks: Chunks) -> None:
    """Scores differ by their sums' order, and so may the choice between two that are as near.

    Angles are random, or quarter turns where queries are rounded. A rotation is summed in float64
    here: the last bits differ, but no value of these queries falls on the other side of a boundary.
    """
    draw, topk, scale = Draw(), 50, 0.37
    tokens = step_tokens(chunks)
    table, num_rows = draw.page_table(entry_rows(chunks, 4), 64)
    rotary = (draw.quarter_turns if rounds else draw.rotation)(tokens.max_len, 64)
    N = len(tokens.positions)
    q, weights = outliers(draw, N, 4, 128), draw.normal(N, 4)
    pool = draw.normal(num_rows, 128)
    args = (q, weights, CacheRows(pool, table), rotary, tokens, topk, scale, rounds)
    (found,) = results(ops.select_entries, args, ())
    for n, b, position in token_positions(tokens)[::7]:
        slots = [slot(table, b, e) for e in range((position + 1) // 4)]
        chosen = [s for s in found[n].tolist() if s >= 0]
        assert len(chosen) == min(topk, len(slots)) == len(set(chosen))
        assert found[n].tolist()[: len(chosen)] == sorted(chosen, key=slots.index)
        keys = f64(pool)[slots]
        rotation = f64(rotary)[position]
        scores = entry_scores(f64(q)[n], f64(weights)[n], keys, rotation, scale, rounds)
        least = np.sort(scores)[-topk:].min(initial=np.inf)
        unit = np.abs(scores).max(initial=0.0)
        assert all(scores[slots.index(s)] >= least - TOLERANCE * unit for s in chosen)


def test_every_operator_is_covered() -> None:
    covered = {case.operator for case in SMALL}
    assert "experts" in covered
    covered |= {"experts_dispatch", "experts_compute"}  # with "experts", in every case of it
    uncovered = {name for name, _ in REFERENCE.implementations()} - covered
    others = {"prepare_linear", "prepare_experts", "finish_experts", "sample", "grouped_form"}
    others |= {"best_candidates", "merge_candidates"}  # with "sample", in test_sampling.py
    others.add("prepare_index_queries")  # with "select_entries", which calls it
    # In test_drafts.py.
    others |= {"continue_tokens", "accept_drafts", "make_blocks", "draft_confidences"}
    assert uncovered == others
    compressed = [case.args()[0] for case in SMALL if case.operator == "compress"]
    assert {parts[0].weight.ratio for parts in compressed} == {4, 128}
    assert {len(parts) for parts in compressed} == {1, 2}
    attended = [case.args()[5] for case in SMALL if case.operator == "sparse_attention"]
    assert {type(entries) for entries in attended} == {type(None), TopkEntries, AllEntries}


def test_a_grouped_linear_takes_what_was_rounded_before() -> None:
    draw = Draw()
    x, w = outliers(draw, 5, 2, 384), LinearWeight(draw.normal(2, 24, 384), 128)
    assert REFERENCE.grouped_form(w, 128) is None
    values, scales = scaled_e4m3(x.flatten(1), 128)
    found = REFERENCE.grouped_linear(values.view(x.shape), w, scales)
    assert torch.equal(found, REFERENCE.grouped_linear(x, w))


def test_e4m3_of_a_grid_and_of_random_values() -> None:
    draw = Draw()
    grid = torch.tensor(E4M3)
    middles = (grid[1:] + grid[:-1]) / 2
    for group, x in (
        (128, torch.cat((grid, middles))),
        (64, draw.normal(320)),
        (64, draw.normal(100) * 1e-5),
        (64, draw.normal(100) * 1e-9),
        (128, outliers(draw, 3, 300)[0]),
        (128, torch.zeros(5)),
    ):
        assert np.array_equal(f64(round_e4m3(x, group)), rounded(f64(x), group))


def test_scales_are_the_next_power_of_two() -> None:
    x = torch.tensor([1.0, 1.5, 2.0, 2.0000002, 3.9999998, 1e-20, 448 / 448, 3e38])
    wanted = [2.0 ** math.ceil(math.log2(v)) for v in x.double().tolist()]
    assert power_of_two_at_least(x)[:-1].tolist() == wanted[:-1]
