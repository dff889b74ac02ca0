"""The references against plain formulas: float64, one token, head and key at a time.

Written from the operators' contracts and the technical report, with loops instead of tensors, so
that they share no code and no shape tricks with what they check. float32 rounds each step to
2^-24, and results come out within a few hundred of those, times the largest value.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.ops import load_ops
from finwhale.ops.attention import cases as attention_cases
from finwhale.ops.case import Draw, OpCase
from finwhale.ops.compressor import cases as compressor_cases
from finwhale.ops.indexer import cases as indexer_cases
from finwhale.ops.linear import cases as linear_cases
from finwhale.ops.mhc import cases as mhc_cases
from finwhale.ops.moe import cases as moe_cases
from finwhale.ops.norm import cases as norm_cases
from finwhale.ops.rounding import power_of_two_at_least, round_e4m3
from finwhale.platform import Platform

REFERENCE = load_ops(Platform.cpu(), reference=True)
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
    """To the nearest E4M3 value at each group's scale, ties to the even mantissa."""
    out = np.zeros_like(x)
    table = np.array(E4M3)
    middles = (table[1:] + table[:-1]) / 2
    for start in range(0, len(x), group):
        part = x[start : start + group]
        amax = max(1e-4, max(abs(v) for v in part))
        scale = 2.0 ** math.ceil(math.log2(amax / 448))
        for i, value in enumerate(part / scale):
            place = int(np.searchsorted(middles, value))
            if place < len(middles) and value == middles[place]:
                place += _odd(table[place])
            out[start + i] = table[place] * scale
    return out


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
    return [np.array([product(rounded(r, 128) if w.round_input else r, weight) for r in x])]


def naive_grouped_linear(x: Floats, w: Any) -> list[Floats]:
    weight = f64(w.weight)
    parts = [
        [product(rounded(g, 128) if w.round_input else g, weight[i]) for i, g in enumerate(row)]
        for row in x
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


def naive_prepare_query(q: Floats, rotation: Floats, eps: float) -> list[Floats]:
    out = np.zeros_like(q)
    for n, a in np.ndindex(*q.shape[:2]):
        out[n, a] = rope(rms_norm(q[n, a], 1.0, eps), rotation[n])
    return [out]


def naive_inverse_rope(o: Floats, rotation: Floats) -> list[Floats]:
    out = np.zeros_like(o)
    for n, a in np.ndindex(*o.shape[:2]):
        out[n, a] = rope(o[n, a], rotation[n], back=True)
    return [out]


def naive_store_window(
    kv: Floats,
    norm: Floats,
    rotation: Floats,
    eps: float,
    round_nope: bool,
    rows: Floats,
    slots: Floats,
) -> list[Floats]:
    for n, slot in enumerate(slots):
        row = rope(rms_norm(kv[n], norm, eps), rotation[n])
        nope = len(row) - 2 * len(rotation[n])
        if round_nope:
            row[:nope] = rounded(row[:nope], 64)
        rows[int(slot)] = row
    return [rows]


def naive_sparse_attention(
    q: Floats,
    window: Floats,
    window_slots: Floats,
    entries: Floats | None,
    entry_slots: Floats | None,
    sink: Floats,
    scale: float,
    out: Floats,
) -> list[Floats]:
    for n, a in np.ndindex(*q.shape[:2]):
        keys = [window[int(s)] for s in window_slots[n] if s >= 0]
        if entries is not None and entry_slots is not None:
            keys += [entries[int(s)] for s in entry_slots[n] if s >= 0]
        scores = [float(q[n, a] @ key) * scale for key in keys]
        top = max([*scores, sink[a]])
        weights = [math.exp(score - top) for score in scores]
        total = sum(weights) + math.exp(sink[a] - top)
        out[n, a] = sum(w * key for w, key in zip(weights, keys, strict=True)) / total
    return [out]


def naive_compress(
    projected: Floats,
    w: Any,
    step: Any,
    rotation: Floats,
    eps: float,
    rounding: str,
    state: Floats,
    entries: Floats,
) -> list[Floats]:
    C, ape, norm = w.norm.shape[0], f64(w.ape), f64(w.norm)
    kept = [state[slot] for slot in step.history_slots.tolist()]
    rows = [*kept, *projected]
    for m, sources in enumerate(step.entry_sources.tolist()):
        entry = np.zeros(C)
        for c in range(C):
            gates, values = [], []
            for s, source in enumerate(sources):
                if source < 0:
                    continue
                # Ratio 4: [Ca | Cb] of kv, then of the gate; the first 4 tokens in Ca.
                half = C if w.ratio == 4 and s >= 4 else 0
                gate = 2 * C if w.ratio == 4 else C
                values.append(rows[source][half + c])
                gates.append(rows[source][gate + half + c] + ape[s, c])
            top = max(gates)
            weights = [math.exp(g - top) for g in gates]
            entry[c] = sum(e * v for e, v in zip(weights, values, strict=True)) / sum(weights)
        entry = rope(rms_norm(entry, norm, eps), rotation[m])
        nope = C - 2 * rotation.shape[1]
        if rounding == "nope":
            entry[:nope] = rounded(entry[:nope], 64)
        elif rounding == "whole":
            entry = rounded(entry, 128)
        entries[int(step.entry_slots[m])] = entry
    state = state.copy()
    for source, slot in zip(step.state_sources.tolist(), step.state_slots.tolist(), strict=True):
        state[slot] = projected[source]
    return [state, entries]


def naive_prepare_index_query(q: Floats, rotation: Floats, round_query: bool) -> list[Floats]:
    out = np.zeros_like(q)
    for n, i in np.ndindex(*q.shape[:2]):
        out[n, i] = rope(q[n, i], rotation[n])
        if round_query:
            out[n, i] = rounded(out[n, i], 128)
    return [out]


def naive_select_entries(
    q: Floats, weights: Floats, keys: Floats, step: Any, topk: int
) -> list[Floats]:
    chosen = []
    for n, count in enumerate(step.num_entries.tolist()):
        slots = step.entry_slots[int(step.sequence[n])].tolist()
        scores = [
            sum(
                w * max(0.0, float(head @ keys[slots[e]]))
                for w, head in zip(weights[n], q[n], strict=True)
            )
            for e in range(count)
        ]
        best = sorted(range(count), key=lambda e: (-scores[e], e))[:topk]
        chosen.append([slots[e] for e in sorted(best)])
    most = max(step.max_entries)
    width = min(topk, -(-most // 128) * 128)
    return [np.array([row + [-1] * (width - len(row)) for row in chosen], np.float64)]


def expert_scores(x: Floats, gate: Floats) -> list[float]:
    return [math.sqrt(math.log1p(math.exp(z))) for z in product(x, gate)]


def naive_route_by_score(
    x: Floats, gate: Floats, bias: Floats, topk: int, scaling: float
) -> list[Floats]:
    ids, weights = [], []
    for row in x:
        scores = expert_scores(row, gate)
        best = sorted(range(len(scores)), key=lambda e: -(scores[e] + bias[e]))[:topk]
        ids.append(best)
        weights.append([scores[e] / sum(scores[b] for b in best) * scaling for e in best])
    return [np.array(ids, np.float64), np.array(weights)]


def naive_route_by_hash(
    x: Floats, gate: Floats, table: Floats, token_ids: Floats, scaling: float
) -> list[Floats]:
    ids = [[int(e) for e in table[int(t)]] for t in token_ids]
    weights = []
    for row, best in zip(x, ids, strict=True):
        scores = expert_scores(row, gate)
        weights.append([scores[e] / sum(scores[b] for b in best) * scaling for e in best])
    return [np.array(ids, np.float64), np.array(weights)]


def expert(x: Floats, w13: Floats, w2: Floats, limit: float, rounds: bool) -> Floats:
    both = product(rounded(x, 128) if rounds else x, w13)
    width = len(both) // 2
    hidden = np.zeros(width)
    for i in range(width):
        gate, up = min(both[i], limit), max(-limit, min(both[width + i], limit))
        hidden[i] = gate * sigmoid(gate) * up if gate > -700 else 0.0
    return product(rounded(hidden, 128) if rounds else hidden, w2)


def naive_experts(x: Floats, ids: Floats, weights: Floats, w: Any, limit: float) -> list[Floats]:
    w13, w2 = f64(w.w13), f64(w.w2)
    out = np.zeros_like(x)
    for n, k in np.ndindex(*ids.shape):
        e = int(ids[n, k])
        if e >= 0:
            out[n] += weights[n, k] * expert(x[n], w13[e], w2[e], limit, w.round_input)
    return [out]


def naive_swiglu_mlp(x: Floats, w: Any, limit: float) -> list[Floats]:
    w13, w2 = f64(w.w13), f64(w.w2)
    return [np.array([expert(row, w13, w2, limit, w.round_input) for row in x])]


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


def size(case: OpCase) -> int:
    """Multiplications, roughly: values of the arguments that have a row for each token."""
    args = case.args()
    total = sum(arg.numel() for arg in args if isinstance(arg, Tensor))
    for arg in args:
        for name in ("weight", "w13", "w2", "fn"):
            if hasattr(arg, name):
                total += getattr(arg, name).numel() * max(1, args[0].shape[0])
    return total


SMALL = [case for case in CASES if case.args()[0].shape[0] > 0 and size(case) < LARGE]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_against_plain_formulas(case: OpCase) -> None:
    naive = globals()[f"naive_{case.operator}"]
    wanted = naive(*(f64(arg) if isinstance(arg, Tensor) else arg for arg in case.args()))
    args = case.args()
    returned = getattr(REFERENCE, case.operator)(*args)
    if returned is None:
        returned = ()
    elif isinstance(returned, Tensor):
        returned = (returned,)
    found = [f64(result) for result in (*returned, *(args[i] for i in case.written))]
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        unit = np.abs(other).max(initial=0.0)
        error = np.abs(one - other)
        assert (error > TOLERANCE * unit).sum() <= case.flips * error.size
        assert error.max(initial=0.0) <= (case.flip if case.flips else TOLERANCE) * unit


def test_every_operator_is_covered() -> None:
    covered = {case.operator for case in SMALL}
    uncovered = {name for name, _ in REFERENCE.implementations()} - covered
    assert uncovered == {"prepare_linear", "prepare_experts", "sample"}
    ratios = {case.args()[1].ratio for case in SMALL if case.operator == "compress"}
    assert ratios == {4, 128}


def test_e4m3_of_a_grid_and_of_random_values() -> None:
    draw = Draw()
    grid = torch.tensor(E4M3)
    middles = (grid[1:] + grid[:-1]) / 2
    for group, x in (
        (128, torch.cat((grid, middles))),
        (64, draw.normal(320)),
        (64, draw.normal(100) * 1e-5),
        (64, draw.normal(100) * 1e-9),
        (128, draw.outliers(3, 300)[0]),
        (128, torch.zeros(5)),
    ):
        assert np.array_equal(f64(round_e4m3(x, group)), rounded(f64(x), group))


def test_scales_are_the_next_power_of_two() -> None:
    x = torch.tensor([1.0, 1.5, 2.0, 2.0000002, 3.9999998, 1e-20, 448 / 448, 3e38])
    wanted = [2.0 ** math.ceil(math.log2(v)) for v in x.double().tolist()]
    assert power_of_two_at_least(x)[:-1].tolist() == wanted[:-1]
