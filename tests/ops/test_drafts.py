"""The definitions of the operators around drafts, against loops."""

import math

import pytest
import torch
from tests.support.op_case import Draw

from finwhale.ops.drafts import BlockShape, ref
from finwhale.platform import Platform

from .draft_cases import (
    LAST,
    PARAMS,
    STEPS,
    confidence_weight,
    continuation,
    one_each,
    verification,
    window_table,
)

CPU = Platform("cpu", "cpu")


@pytest.mark.parametrize("rows, width", [(1, 2), (5, 4), (3, 8)])
def test_continued_tokens(rows: int, width: int) -> None:
    planned, last, ids, positions = continuation(17, rows, width)
    ref.continue_tokens(planned, last, ids, positions)
    for n, link in enumerate(planned.links_N.tolist()):
        row, column = divmod(link, width)
        known = int(planned.ids_S[planned.sources_N[n]])
        assert int(ids[n]) == (known if row == rows else int(last[0, row, column]))
        assert int(positions[n]) == int(planned.positions_N[n] + last[1, row, column])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_accepted_drafts(step: tuple[tuple[int, ...], int, int, int], seed: int) -> None:
    lengths, width, num_tokens, num_seqs = step
    case = verification(lengths, width, num_tokens, num_seqs, seed)
    chosen, given, next_ids, advanced = case.args()
    last, positions = ref.accept_drafts(chosen, given, next_ids, advanced)
    starts = [sum(lengths[:row]) for row in range(len(lengths))]
    starts += [num_tokens - 1] * (num_seqs - len(lengths))
    for row, (start, accepted) in enumerate(zip(starts, case.accepted, strict=True)):
        assert int(last[row]) == start + accepted
        padding = row >= len(lengths) and num_tokens > sum(lengths)
        assert int(positions[row]) == (-1 if padding else given.positions_N[start + accepted])
        assert next_ids[row].tolist() == [
            int(chosen[start + accepted]),
            *case.next_ids[row, 1:].tolist(),
        ]
        assert advanced[row].tolist() == [accepted] * width


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_blocks(rows: int) -> None:
    window, per_page = 128, 64
    table = window_table(LAST, per_page, window, rows)
    newest = torch.arange(len(LAST)) + 3
    found = ref.make_blocks(newest, one_each(LAST), table, BlockShape(rows, 17, window))
    assert found.tokens.query_start.tolist() == [rows * b for b in range(len(LAST) + 1)]
    assert found.tokens.query_start.dtype == found.tokens.sequence.dtype == torch.int32
    assert found.tokens.max_len == 1100 + rows and found.tokens.max_query == rows
    for n in range(rows * len(LAST)):
        b, k = divmod(n, rows)
        assert int(found.ids[n]) == (17 if k else b + 3)
        assert int(found.tokens.sequence[n]) == b
        assert int(found.tokens.positions[n]) == (-1 if LAST[b] < 0 else LAST[b] + 1 + k)
        slots = found.extra_kv_slots[n].tolist()
        if LAST[b] < 0:
            assert slots == [-1] * rows
            continue
        begin, own = LAST[b] + 1, LAST[b] + 1 + k
        seen = range(begin - window, begin + rows)
        further = [p for p in seen if p > own] + [p for p in reversed(seen) if p <= own - window]
        assert len(further) == rows
        wanted = []
        for p in further:
            page = int(table.pages[b, p // per_page - int(table.first[b])]) if p >= 0 else 0
            wanted.append(page * per_page + p % per_page if p >= 0 else -1)
        assert slots == wanted
        assert -1 not in slots[: sum(p >= 0 for p in further)]


@pytest.mark.parametrize("markov", [0, 6])
def test_confidences(markov: int) -> None:
    width, draw = 10, Draw()
    streams, w = 2 * draw.normal(3, 2, 4, width), confidence_weight(width, markov)
    newest, ids = draw.integers(40, 3), draw.integers(40, 3, 2)
    found = ref.draft_confidences(streams, newest, ids, w, PARAMS)
    assert found.shape == (3, 2) and found.dtype == torch.float32
    for b in range(3):
        for k in range(2):
            x = streams[b, k].double()
            rms = math.sqrt(float(x.square().mean()) + PARAMS.rms_eps)
            score = 0.0
            for i in range(4):
                mix = float(w.hc_head.fn[i].double() @ x.flatten()) / rms
                mix = mix * float(w.hc_head.scale) + float(w.hc_head.base[i])
                share = 1 / (1 + math.exp(-mix)) + PARAMS.eps
                score += share * float(w.proj[0, :width].double() @ x[i])
            if w.markov_w1 is not None:
                before = int(ids[b, k - 1]) if k else int(newest[b])
                score += float(w.proj[0, width:].double() @ w.markov_w1[before].double())
            assert float(found[b, k]) == pytest.approx(1 / (1 + math.exp(-score)), abs=1e-5)
