"""The indexer's Triton kernels in the interpreter, against the reference on dense keys.

Scores of the shared cases are small whole numbers, exact in any order of summation and full of
ties, so that selections are compared exactly. E4M3 holds the keys, and the queries after rounding,
as they are; the reference gets what the packed keys stand for.
"""

import pytest
import torch
from torch import Tensor

from finwhale.ops.case import Args, Draw, OpCase
from finwhale.ops.indexer import ref, triton_topk
from finwhale.ops.indexer import triton as kernels
from finwhale.ops.indexer.cases import CASES
from finwhale.ops.indexer.layout import pack_keys, unpack_keys
from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.rounding import round_e4m3

from . import kernels_support as kernels_support

WIDTHS = (32, 64, 128)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are split between some programs, not between those that fill a GPU."""
    monkeypatch.setattr(kernels, "DECODE_PROGRAMS", 6)
    monkeypatch.setattr(kernels, "PREFILL_PROGRAMS", 6)
    monkeypatch.setattr(triton_topk, "BLOCK", 512)


def selected(args: Args) -> tuple[Tensor, Tensor]:
    """What the kernels select, and the reference."""
    q, weights, keys, rotary, tokens, table, topk, scale, round_query = args
    pool = pack_keys(keys, table.rows_per_page)
    dense = unpack_keys(pool, table.rows_per_page, keys.shape[1])
    rest = (rotary, tokens, table, topk, scale, round_query)
    found = kernels.select_entries(q.clone(), weights, pool, *rest)
    return found, ref.select_entries(q, weights, dense, *rest)


def agree(found: Tensor, wanted: Tensor) -> bool:
    width = min(found.shape[1], wanted.shape[1])
    rest = torch.cat((found[:, width:], wanted[:, width:]), 1)
    return torch.equal(found[:, :width].long(), wanted[:, :width].long()) and bool(
        (rest == -1).all()
    )


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.args()[-1] and c.args()[0].shape[2] in WIDTHS], ids=str
)
def test_shared_cases(case: OpCase) -> None:
    assert agree(*selected(case.args()))


def test_rows_of_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of few entries: whole ones, a last one of less than topk, rows of one chunk."""
    monkeypatch.setattr(triton_topk, "BLOCK", 32)
    monkeypatch.setattr(triton_topk, "MIN_BLOCK", 32)
    cases = [c for c in CASES if c.args()[-1] and c.args()[0].shape[2] in WIDTHS]
    assert agree(*selected(next(c for c in cases if c.args()[6] == 16).args()))


@pytest.mark.parametrize("kind", ("equal", "zero", "negative", "wide", "few"))
def test_thresholds(kind: str) -> None:
    """Scores alone: ties everywhere, both zeros, every exponent."""
    length, topk = 700, 100
    draw = Draw()
    scores = {
        "equal": torch.full((1, length), -3.25),
        "zero": torch.where(draw.whole(2, 1, length) > 0, 0.0, -0.0),
        "negative": -draw.normal(1, length).abs() - 1,
        "wide": draw.normal(1, length) * 10.0 ** draw.whole(39, 1, length, low=-38),
        "few": draw.whole(3, 1, length).float(),
    }[kind]
    tokens, table = one_row(4 * length)
    out = torch.full((1, topk), -7, dtype=torch.int32)
    triton_topk.select_topk(scores, out, tokens, table, 0, topk, length, 4)
    best = (-(scores[0] + 0.0)).argsort(stable=True)[:topk].sort().values
    assert torch.equal(out[0].long(), best)


def one_row(length: int) -> tuple[Tokens, PageTable]:
    pages = torch.arange(length // 256 + 1, dtype=torch.int32)[None]
    tokens = Tokens(
        positions=torch.tensor([length - 1]),
        sequence=torch.zeros(1, dtype=torch.int32),
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        max_len=length,
        max_query=1,
    )
    return tokens, PageTable(pages, torch.zeros(1, dtype=torch.int32), 64)


def test_padding_and_wide_bounds_of_a_captured_batch() -> None:
    case = next(c for c in CASES if c.args()[-1] and len(c.args()[4].positions) == 3)
    q, weights, keys, rotary, tokens, table, topk, scale, _ = case.args()
    positions = tokens.positions.clone()
    positions[2] = -1
    wide = Tokens(positions, tokens.sequence, tokens.query_start, 2**13, 1)
    pool = pack_keys(keys, table.rows_per_page)
    found = kernels.select_entries(q, weights, pool, rotary, wide, table, topk, scale, True)
    plain = kernels.select_entries(q, weights, pool, rotary, tokens, table, topk, scale, True)
    plain[2] = -1
    assert torch.equal(found, plain)


def test_random_queries_select_what_the_reference_does() -> None:
    """Scores in another order of summation differ by 2^-20: near-ties may change, not more."""
    draw = Draw()
    heads, width, topk, length = 16, 128, 64, 1200
    tokens, table = one_row(length)
    keys = round_e4m3(draw.normal(table.pages.shape[1] * 64, width), 128)
    args = (
        draw.normal(1, heads, width).bfloat16(),
        draw.normal(1, heads),
        keys,
        draw.rotation(length, 64),
        tokens,
        table,
        topk,
        0.1,
        True,
    )
    found, wanted = selected(args)
    both = set(found[0].tolist()) & set(wanted[0].tolist())
    assert len(both) >= topk - 1


def test_what_it_cannot_read_raises() -> None:
    q, weights, keys, *rest = next(c for c in CASES if c.args()[0].shape[2] == 128).args()
    with pytest.raises(ValueError, match="packed keys"):
        kernels.select_entries(q, weights, keys, *rest)
