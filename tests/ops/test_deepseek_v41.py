"""DeepSeek-V4.1's operators against loops over plain numbers."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.model_cases.compressor import state_rows
from tests.support.op_case import Chunks, Draw, entry_rows, step_tokens
from torch import Tensor

from finwhale.ops.attention.ref import apply_rope
from finwhale.ops.deepseek_v41 import IndexRule, RowRounding, cpu, ref
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.mhc.ref import mhc_post, mhc_pre, mixes
from finwhale.ops.paging import CacheRows, Tokens
from finwhale.ops.rounding import round_e4m3, scaled_fp4, unscaled_fp4

CHUNKS: Chunks = ((254, 258), (7, 8), (0, 5), (511, 512), (40, 80), (2, 3))
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def each_token(tokens: Tokens) -> list[tuple[int, int]]:
    """(sequence, position) of each token."""
    return list(zip(tokens.sequence.tolist(), tokens.positions.tolist(), strict=True))


def slot(rows: CacheRows, sequence: int, number: int) -> int:
    page, offset = divmod(number, rows.table.rows_per_page)
    first = int(rows.table.first[sequence])
    return int(rows.table.pages[sequence, page - first]) * rows.table.rows_per_page + offset


# --- Rounding -------------------------------------------------------------------------------------


def test_rows_of_fp4_with_an_e4m3_scale() -> None:
    draw = Draw()
    x = torch.cat((draw.normal(40, 64) * 3, torch.zeros(1, 64), draw.normal(20, 64) * 2.0**-12))
    x[0, :16] = torch.tensor([*E2M1, *(-v for v in E2M1)])  # exact, with scale 1
    x[1, :3] = torch.tensor([6.0, 2.5, -0.25])  # two ties, to even codes
    x[1, 3:16] = 0
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist()
    found = ref.round_fp4(x)
    assert torch.equal(found[0, :16], x[0, :16])
    assert found[1, :3].tolist() == [6.0, 2.0, 0.0]
    assert not found[40].any()
    for row, wanted in zip(x.double().tolist(), found.tolist(), strict=True):
        for start in range(0, 64, 16):
            group = row[start : start + 16]
            amax = max(6 * 2.0**-9, *map(abs, group))
            scale = min(e4m3, key=lambda s: abs(s - float(np.float32(amax) / np.float32(6))))
            for value, rounded in zip(group, wanted[start : start + 16], strict=True):
                error = min(abs(abs(value) - v * scale) for v in E2M1)
                assert abs(abs(value) - abs(rounded)) <= error * (1 + 1e-6) + 1e-12
                assert rounded * value >= 0 and any(abs(rounded) == v * scale for v in E2M1)


# --- Rows and pairs -------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["none", "e4m3", "fp4", "key"])
@pytest.mark.parametrize("ratio", [1, 2])
def test_rows_are_stored_where_they_complete(ratio: int, rounding: RowRounding) -> None:
    draw, tokens = Draw(), step_tokens(CHUNKS)
    table, num_rows = draw.page_table(entry_rows(CHUNKS, ratio), 64)
    rows = CacheRows(torch.full((num_rows, 64), torch.nan), table)
    rotary = draw.quarter_turns(tokens.max_len, 16)
    values = draw.integers(40, len(tokens.positions), 64, low=-40).float()
    # The first tokens of the step write no rows.
    positions = torch.cat((tokens.positions[:2] * 0 - 1, tokens.positions[2:]))
    writing = replace(tokens, positions=positions)
    ref.store_rows(values, rows, rotary, writing, ratio, rounding)
    written = set()
    for n, (sequence, position) in enumerate(each_token(tokens)):
        if n < 2 or (position + 1) % ratio:
            continue
        number = position // ratio
        wanted = values[n].clone()
        for i, (cos, sin) in enumerate(rotary[number * ratio].tolist()):
            a, b = values[n, 48 + 2 * i].item(), values[n, 49 + 2 * i].item()
            wanted[48 + 2 * i], wanted[49 + 2 * i] = a * cos - b * sin, b * cos + a * sin
        rounded = {
            "none": lambda x: x,
            "e4m3": lambda x: round_e4m3(x, 32),
            "fp4": ref.round_fp4,
            "key": lambda x: unscaled_fp4(*scaled_fp4(x)),
        }[rounding](wanted)
        at = slot(rows, sequence, number)
        assert torch.equal(rows.pool[at], rounded)
        written.add(at)
    others = [i for i in range(num_rows) if i not in written]
    assert written and torch.isnan(rows.pool[others]).all()


def merged(rows: Tensor, norm: Tensor, eps: float) -> list[float]:
    """The latent of two projected rows [2,2C], in float64."""
    width, both = rows.shape[1] // 2, rows.double().tolist()
    out = []
    for c in range(width):
        weights = [math.exp(row[width + c] - both[0][width + c]) for row in both]
        out.append(sum(w * row[c] for w, row in zip(weights, both, strict=True)) / sum(weights))
    rms = math.sqrt(sum(v * v for v in out) / width + eps)
    return [v / rms * g for v, g in zip(out, norm.double().tolist(), strict=True)]


def test_pairs_are_merged_across_steps() -> None:
    draw, width, eps = Draw(), 32, 1e-20
    norm = draw.normal(width)
    text = draw.normal(9, 2 * width)
    table, num_rows = draw.page_table([(range(9),)], 8)
    for ends in ((9,), (1, 2, 3, 4, 5, 6, 7, 8, 9), (3, 4, 8, 9), (1, 5, 9)):
        state = CacheRows(torch.full((num_rows, 2 * width), torch.nan), table)
        found: dict[int, Tensor] = {}
        for start, end in itertools.pairwise((0, *ends)):
            tokens = step_tokens(((start, end),))
            part = text[start:end]
            latents = ref.merge_pairs(part, norm, state, tokens, eps, 1)
            for n, position in enumerate(range(start, end)):
                if position % 2:
                    found[position] = latents[n]
                else:
                    assert not latents[n].any()
        assert sorted(found) == [1, 3, 5, 7]
        for position, latent in found.items():
            wanted = torch.tensor(merged(text[position - 1 : position + 1], norm, eps))
            assert (latent - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_the_state_of_open_pairs_is_kept() -> None:
    draw, tokens = Draw(), step_tokens(CHUNKS)
    table, num_rows = draw.page_table(state_rows(CHUNKS, 2, 3), 64)
    state = CacheRows(draw.normal(num_rows, 8), table)
    before, projected = state.pool.clone(), draw.normal(len(tokens.positions), 8)
    ref.merge_pairs(projected, draw.normal(4), state, tokens, 1e-20, 3)
    kept = set()
    first = 0
    for sequence, (start, end) in enumerate(CHUNKS):
        settled = end if end - start > 3 else start + 1
        for position in range(max(start, settled // 2 * 2), end):
            at = slot(state, sequence, position)
            assert torch.equal(state.pool[at], projected[first + position - start])
            kept.add(at)
        first += end - start
    others = [i for i in range(num_rows) if i not in kept]
    assert torch.equal(state.pool[others], before[others])


def test_the_last_ids_of_a_sequence() -> None:
    draw = Draw()
    table, num_rows = draw.page_table([(range(9),), (range(4),)], 8)
    rows = CacheRows(torch.full((num_rows, 1), torch.nan), table)
    texts = draw.integers(99092, 9).tolist(), draw.integers(99092, 4).tolist()
    for chunks in (((0, 3), (0, 1)), ((3, 4), (1, 4)), ((4, 9), (3, 4))):
        tokens = step_tokens(chunks)
        ids = [i for text, (start, end) in zip(texts, chunks, strict=True) for i in text[start:end]]
        found = ref.recall_ids(torch.tensor(ids), 4, 7, rows, tokens)
        for row, (sequence, position) in zip(found.tolist(), each_token(tokens), strict=True):
            before = texts[sequence][: position + 1][::-1][:4]
            assert row == [*before, *[7] * (4 - len(before))]


# --- Selection ------------------------------------------------------------------------------------


def best(scores: dict[int, float], most: int) -> list[int]:
    return sorted(sorted(scores, key=lambda e: (-scores[e], e))[:most])


@pytest.mark.parametrize("within", [False, True], ids=["all", "within-blocks"])
@pytest.mark.parametrize("keeps", [0, 3, 100])
@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("table", ["ref", "cpu"])
def test_selected_entries_and_blocks(table: str, ratio: int, keeps: int, within: bool) -> None:
    """Scores are exact integers with many ties, so the selection is compared exactly."""
    select = (ref if table == "ref" else cpu).OPS.select
    draw, chunks = Draw(), ((254, 258), (0, 9), (90, 91), (30, 31), (0, 1))
    tokens = step_tokens(chunks)
    N, heads, width = len(tokens.positions), 3, 16
    pages, num_rows = draw.page_table(entry_rows(chunks, ratio), 64)
    keys = CacheRows(draw.integers(2, num_rows, width, low=-1).float(), pages)
    q = draw.integers(2, N, heads, width, low=-1).float()
    weights, rotary = draw.integers(3, N, heads, low=-2).float(), draw.quarter_turns(300, 8)
    rule = IndexRule(ratio=ratio, topk=11, scale=0.5, round_query=False, block=4, keeps=keeps)
    blocks = None
    if within:
        whole = replace(rule, keeps=5)
        blocks = select(q, weights, keys, rotary, tokens, whole).blocks
    found = select(q, weights, keys, rotary, tokens, rule, blocks)
    assert (found.blocks is None) == (keeps == 0)
    for n, (sequence, position) in enumerate(each_token(tokens)):
        count = (position + 1) // ratio
        turned = q[n].clone()
        for i, (cos, sin) in enumerate(rotary[position].tolist()):
            a, b = q[n, :, 8 + 2 * i], q[n, :, 9 + 2 * i]
            turned[:, 8 + 2 * i], turned[:, 9 + 2 * i] = a * cos - b * sin, b * cos + a * sin
        scores = {}
        for entry in range(count):
            if blocks is not None and entry // 4 not in blocks[n].tolist():
                continue
            products = turned @ keys.pool[slot(keys, sequence, entry)]
            scores[entry] = float((products.clamp(min=0) * weights[n] * 0.5).sum())
        wanted = [slot(keys, sequence, entry) for entry in best(scores, 11)]
        assert filled(found.slots[n], wanted)
        if found.blocks is not None:
            of_block: dict[int, float] = {}
            for entry, score in scores.items():
                of_block[entry // 4] = max(score, of_block.get(entry // 4, -math.inf))
            if count:
                of_block[(count - 1) // 4] = math.inf
            assert filled(found.blocks[n], best(of_block, keeps))


def filled(row: Tensor, wanted: Sequence[int]) -> bool:
    return row.tolist() == [*wanted, *[-1] * (len(row) - len(wanted))]


def test_a_rounded_query_selects_by_rounded_scores() -> None:
    draw = Draw()
    tokens = step_tokens(((80, 81),))
    table, num_rows = draw.page_table(entry_rows(((80, 81),), 1), 64)
    keys = CacheRows(draw.normal(num_rows, 32), table)
    q, rotary = draw.normal(1, 2, 32), draw.rotation(100, 16)
    rule = IndexRule(ratio=1, topk=8, scale=1.0, round_query=True)
    weights = torch.ones(1, 2)
    found = ref.select_shared(q, weights, keys, rotary, tokens, rule).slots[0]
    turned = apply_rope(q, rotary[80:81])[0]
    rows = [slot(keys, 0, entry) for entry in range(81)]
    scores = torch.relu(unscaled_fp4(*scaled_fp4(turned)) @ keys.pool[rows].T).sum(0)
    assert found.tolist() == [rows[e] for e in sorted(scores.topk(8).indices.tolist())]


# --- Residual streams -----------------------------------------------------------------------------


def test_the_input_is_collapsed_with_other_mixes() -> None:
    draw, N, H, D = Draw(), 5, 4, 48
    w = MhcWeight(
        *(draw.normal(2 * H + H * H, H * D), draw.normal(2 * H + H * H)),
        *(draw.normal(2 * H + H * H), draw.normal(D)),
    )
    params, streams = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-20), draw.normal(N, H, D)
    own, _, _ = mixes(streams, w, params)
    x, same, parts = ref.mhc_input(None, streams, own, w, params)
    pre, post, res = ref.mhc_mixes(same, parts, w, params)
    assert same is streams
    for found, wanted in zip((x, post, res), mhc_pre(streams, w, params), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(pre, own)
    first = torch.tensor([1.0, 0, 0, 0]).expand(N, H)
    x, _, _ = ref.mhc_input(None, streams, first, w, params)
    row = streams[:, 0].double()
    wanted = row / (row.square().mean(-1, keepdim=True) + 1e-20).sqrt() * w.norm.double()
    assert (x - wanted).abs().max() < 1e-5
    after = mhc_post(x, post, res, streams)
    y, both, _ = ref.mhc_input((x, post, res), streams, own, w, params)
    assert torch.equal(both, after)
    assert torch.equal(y, ref.mhc_input(None, after, own, w, params)[0])


def test_the_gate_of_engram() -> None:
    draw, N, H, D, eps = Draw(), 6, 4, 20, 1e-20
    streams, key, value = draw.normal(N, H, D), draw.normal(N, H, D), draw.normal(N, D)
    q, k = draw.normal(H, D), draw.normal(H, D)
    key[0] = 0  # a score of 0 gives a gate of 1/2
    given = streams.clone()
    found = ref.engram_gate(streams, key, value, q, k, eps)
    assert torch.equal(streams, given)
    for n, h in itertools.product(range(N), range(H)):
        x, y = streams[n, h].double().tolist(), key[n, h].double().tolist()
        rms = [math.sqrt(sum(v * v for v in t) / D + eps) for t in (x, y)]
        terms = zip(x, q[h].tolist(), k[h].tolist(), y, strict=True)
        score = sum(a * b * c * d for a, b, c, d in terms) / rms[0] / rms[1] / math.sqrt(D)
        power = math.copysign(math.sqrt(max(abs(score), 1e-6)), score) if score else 0.0
        gate = 1 / (1 + math.exp(-power))
        wanted = torch.tensor(x) + gate * value[n].double()
        assert (found[n, h] - wanted).abs().max() < 1e-5
