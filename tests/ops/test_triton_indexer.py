"""The indexer's Triton kernels in the interpreter, against the reference on dense keys.

Scores of the shared cases are exact in any order of summation and full of ties, so that selections
are compared exactly. E4M3 holds the keys, and the queries after rounding, as they are; the
reference gets what the packed keys stand for. What the interpreter cannot run, the assembler that
unpacks keys, runs here in an emulator of its instructions.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.support.cases.indexer import CASES
from tests.support.checked_case import CheckedCase
from tests.support.op_arguments import strided
from tests.support.op_case import Args, Draw
from tests.support.packed_pools import pack_keys
from tests.support.packing import unpack_keys
from tests.support.ptx import run_ptx
from torch import Tensor

from finwhale.distributed.rank import Rank
from finwhale.ops.attention.ref import apply_rope
from finwhale.ops.indexer import IndexQueries, ref, topk_long_triton, topk_triton
from finwhale.ops.indexer import select_entries_triton as kernels
from finwhale.ops.indexer.prepare_queries_triton import prepare_index_queries
from finwhale.ops.paging import MAX_DECODE_QUERY, CacheRows, PageTable, StepCache, Tokens
from finwhale.ops.rounding import hadamard, rotate_to_fp4, unscaled_fp4

from . import kernels_support as kernels_support

WIDTHS = (32, 64, 128)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are split between some programs, not between those that fill a GPU."""
    one = partial(kernels.select_entries, num_multiprocessors=1)
    monkeypatch.setattr(kernels, "select_entries", one)
    monkeypatch.setattr(kernels, "DECODE_PROGRAMS", 6)
    monkeypatch.setattr(kernels, "PREFILL_PROGRAMS", 6)


def selected(args: Args) -> tuple[Tensor, Tensor]:
    """What the kernels select, and the reference."""
    q, weights, keys, *rest = args
    packed = packed_keys(keys)
    dense = unpack_keys(packed.pool, keys.table.rows_per_page, keys.pool.shape[1])
    found = kernels.select_entries(q.clone(), weights, packed, *rest)
    return found, ref.select_entries(q, weights, CacheRows(dense, keys.table), *rest)


def packed_keys(keys: CacheRows) -> CacheRows:
    return CacheRows(strided(pack_keys(keys.pool, keys.table.rows_per_page)), keys.table)


def agree(found: Tensor, wanted: Tensor) -> bool:
    width = min(found.shape[1], wanted.shape[1])
    rest = torch.cat((found[:, width:], wanted[:, width:]), 1)
    return torch.equal(found[:, :width].long(), wanted[:, :width].long()) and bool(
        (rest == -1).all()
    )


SELECTING = [c for c in CASES if c.args()[-1] and c.args()[0].shape[2] in WIDTHS]


@pytest.mark.parametrize("case", SELECTING, ids=str)
def test_shared_cases(case: CheckedCase) -> None:
    assert agree(*selected(case.args()))


def test_parts_of_the_tokens() -> None:
    """Each of three ranks selects for its rows: together what one selects for all, in every bit."""
    compared = 0
    for case in SELECTING[::2]:
        q, weights, *rest = case.args()
        keys, rotary, tokens, *numbers = rest
        packed = packed_keys(keys)
        whole = kernels.select_entries(q, weights, packed, rotary, tokens, *numbers)
        for index in range(3):
            rows = Rank(index, 3).rows(len(q))
            part = (q[rows], weights[rows], packed, rotary, tokens.part(rows), *numbers)
            assert torch.equal(kernels.select_entries(*part), whole[rows]), str(case)
            compared += len(whole[rows])
    assert compared > 20


@pytest.mark.parametrize("score_bytes", (2**20, 2**13), ids=("at once", "in parts"))
def test_verifications_of_up_to_8_tokens(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They run as decodes, and select what a prefill selects."""
    monkeypatch.setattr(kernels, "MAX_DECODE_BYTES", score_bytes)
    case = next(c for c in CASES if c.args()[-1] and c.args()[4].max_query == 8)
    args = list(case.args())
    positions = torch.cat((args[4].positions[:-2], torch.full((2,), -1)))
    both = []
    for max_query in (MAX_DECODE_QUERY, MAX_DECODE_QUERY + 1):
        args[4] = replace(args[4], positions=positions, max_query=max_query, cache=StepCache())
        found, wanted = selected(tuple(args))
        assert agree(found, wanted)
        both.append(found)
    assert torch.equal(*both)


KINDS = ("equal", "zero", "negative", "wide", "few", "together", "not finite")


def scores_of_kind(kind: str, length: int) -> Tensor:
    """Scores with ties everywhere, both zeros, every exponent, or the best ones side by side."""
    draw = Draw()
    position = torch.arange(length)
    special = torch.tensor((torch.inf, -torch.inf, torch.nan, -3e38, -0.0, 0.0, 1.0))
    return {
        "equal": torch.full((length,), -3.25),
        "zero": torch.where(draw.integers(2, length) > 0, 0.0, -0.0),
        "negative": -draw.normal(length).abs() - 1,
        "wide": draw.normal(length) * 10.0 ** draw.integers(39, length, low=-38),
        "few": draw.integers(3, length).float(),
        "together": draw.normal(length) + 9 * ((position > 397) & (position < 490)),
        "not finite": special[draw.integers(7, length)],
    }[kind]


def check_selection(
    scores: Tensor, visible: Tensor, topk: int, max_query: int, select: Callable[..., None]
) -> None:
    """Compare what `select` selects for tokens that see `visible` of the scores."""
    length, count = len(scores), len(visible)
    pages = torch.arange(length // 64 + 1, dtype=torch.int32).flip(0)
    tokens = Tokens(
        positions=4 * visible - 1,
        sequence=torch.zeros(count, dtype=torch.int32),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        max_len=4 * length,
        max_query=max_query,
    )
    table = PageTable(pages[None], torch.zeros(1, dtype=torch.int32), 64)
    # Entries that a token does not see would win.
    padded = torch.full((count, 64 * len(pages)), torch.inf)
    for row, n in zip(padded, visible, strict=True):
        row[:n] = scores[:n]
    out = torch.full((count, topk), -7, dtype=torch.int32)
    select(padded, out, tokens, table, 0, topk, length, 4)
    slots = (pages[:, None] * 64 + torch.arange(64)).flatten()[None]
    wanted = ref._top(padded, visible, slots.expand(count, -1), topk)
    assert torch.equal(out, wanted)


def for_kinds(*settings: tuple[int, ...]) -> list[Any]:
    """(kind, *setting): all kinds with the first setting, and a third of them with each other one.

    The rest is marked long.
    """
    return [
        pytest.param(kind, *setting, marks=pytest.mark.long if i and (i + k) % 3 else [])
        for i, setting in enumerate(settings)
        for k, kind in enumerate(KINDS)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_thresholds(kind: str) -> None:
    """Scores alone."""
    visible = torch.tensor((703, 99, 100, 101, 255, 257, 511, 512, 513, 514, 610))
    check_selection(scores_of_kind(kind, 703), visible, 100, 11, topk_triton.select_topk)


@pytest.mark.parametrize(("kind", "tile", "maxima"), for_kinds((512, 64), (512, 256), (256, 64)))
def test_thresholds_of_few_tokens(
    kind: str, tile: int, maxima: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one tile, of two and of more; candidates that a program holds, and more; maxima of
    one group, of two and of several; rows of fewer groups than topk.
    """
    rows, topk = topk_long_triton, 30
    for name, value in (("TILE", tile), ("MAXIMA", maxima)):
        monkeypatch.setattr(rows, name, value)

    def select(scores: Tensor, *rest: Any) -> None:
        rows.select_topk_long(scores, maxima_of(scores, rest[1].positions), *rest)

    visible = torch.tensor((703, 29, 30, 31, 127, 128, 129, 247, 256, 257, 610))
    check_selection(scores_of_kind(kind, 703), visible, topk, 1, select)


@pytest.mark.parametrize("kind", ["equal", "together", "wide", "not finite"])
def test_few_tokens_and_tiles_of_the_models_size(kind: str) -> None:
    """The counts of a full line fill their byte."""

    def select(scores: Tensor, *rest: Any) -> None:
        topk_long_triton.select_topk_long(scores, maxima_of(scores, rest[1].positions), *rest)

    tile = topk_long_triton.TILE
    scores = scores_of_kind(kind, 2 * tile + 300)
    visible = torch.tensor((tile, tile + 1, 2 * tile, 2 * tile + 1, 2 * tile + 300, 4500))
    check_selection(scores, visible, 512, 1, select)


@pytest.mark.parametrize("visible", [(703, 690, 257)])
def test_a_floor_that_rises(visible: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Maxima that are compared as one keep too many groups; the second floor keeps few enough."""
    rows, topk = topk_long_triton, 12
    for name, value in (("TILE", 256), ("MAXIMA", 32)):
        monkeypatch.setattr(rows, name, value)
    searches: list[str] = []
    for name in ("_search_row", "_select_streamed"):
        monkeypatch.setattr(rows, name, counting(getattr(rows, name), name, searches))

    def select(scores: Tensor, *rest: Any) -> None:
        rows.select_topk_long(scores, maxima_of(scores, rest[1].positions), *rest)

    entry = torch.arange(703)
    # One high score in each group; groups that are compared as one have about the same score.
    high = 10.0 * (31 - entry // 8 % 32) + torch.rand(
        703, generator=torch.Generator().manual_seed(0)
    )
    scores = torch.where(entry % 8 == 3, high, high - 1000)
    check_selection(scores, torch.tensor(visible), topk, 1, select)
    assert "_search_row" in searches and "_select_streamed" not in searches


def counting(function: Any, name: str, calls: list[str]) -> Any:
    """The function; each call appends its name."""

    def call(*args: Any, **options: Any) -> Any:
        calls.append(name)
        return function(*args, **options)

    return call


def maxima_of(scores: Tensor, positions: Tensor) -> Tensor:
    """The largest key of every GROUP adjacent scores that a token sees."""
    bits = (scores + 0.0).view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    seen = torch.arange(scores.shape[1])[None] < ((positions + 1) // 4)[:, None]
    keys = torch.where(seen, keys, -(2**31))
    return keys.unflatten(1, (-1, topk_long_triton.GROUP)).amax(2)


def test_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the scores gives the maxima, of a decode and of a prefill."""
    monkeypatch.setattr(topk_triton, "BLOCK", 32)
    monkeypatch.setattr(topk_triton, "MIN_BLOCK", 32)
    for name, value in (("TILE", 512), ("MAXIMA", 256)):
        monkeypatch.setattr(topk_long_triton, name, value)
    taken = set()
    select = topk_long_triton.select_topk_long

    def counted(scores: Tensor, *rest: Any, num_warps: int) -> None:
        assert num_warps == topk_long_triton.FEWER_WARPS  # any GPU's, without inline assembly
        taken.add(rest[2].max_query > MAX_DECODE_QUERY)
        select(scores, *rest)

    monkeypatch.setattr(topk_long_triton, "select_topk_long", counted)
    for case in SELECTING:
        assert agree(*selected(case.args())), str(case)
    assert taken == {False, True}


def test_largest_scores_are_of_entries_that_a_token_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tokens of a program, only the last one sees the entry with the highest score. The
    others need the twelfth highest, which is far below the eleventh.
    """
    monkeypatch.setattr(topk_triton, "BLOCK", 32)
    monkeypatch.setattr(topk_triton, "MIN_BLOCK", 32)
    width, topk, last = 64, 12, 203
    chunk = (4 * last - 12, 4 * (last + 1))
    tokens = Draw().tokens((chunk,))
    _, table = one_row(chunk[1])
    scores = torch.zeros(table.pages.shape[1] * 64)
    scores[16 * torch.arange(topk)] = 2.0 ** torch.tensor((*range(20, 20 - topk + 1, -1), -6))
    scores[last] = 2.0**25
    first = torch.eye(width)[0]
    still = torch.stack((torch.ones(chunk[1], 16), torch.zeros(chunk[1], 16)), -1)
    q = first.expand(len(tokens.positions), 16, width).bfloat16()
    keys = CacheRows(rotate_to_fp4(scores[:, None] * first), table)
    args = (q, torch.ones(len(q), 16), keys, still, tokens, topk, 1.0, True)
    assert agree(*selected(args))


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
    q, weights, keys, rotary, tokens, topk, scale, _ = case.args()
    positions = tokens.positions.clone()
    positions[2] = -1
    wide = Tokens(positions, tokens.sequence, tokens.query_start, 2**13, 1)
    packed = packed_keys(keys)
    found = kernels.select_entries(q, weights, packed, rotary, wide, topk, scale, True)
    plain = kernels.select_entries(q, weights, packed, rotary, tokens, topk, scale, True)
    plain[2] = -1
    assert torch.equal(found, plain)


@pytest.mark.parametrize("width", WIDTHS)
def test_random_queries_select_what_the_reference_does(width: int) -> None:
    """Scores in another order of summation differ by 2^-20: near-ties may change, not more. A last
    bit of a rotated query may decide how it rounds: that changes one value in millions, none here.
    """
    draw = Draw()
    heads, topk, length = 16, 64, 1200
    tokens, table = one_row(length)
    keys = rotate_to_fp4(draw.normal(table.pages.shape[1] * 64, width))
    args = (
        draw.normal(1, heads, width).bfloat16(),
        draw.normal(1, heads),
        CacheRows(keys, table),
        draw.rotation(length, 32),
        tokens,
        topk,
        0.1,
        True,
    )
    found, wanted = selected(args)
    both = set(found[0].tolist()) & set(wanted[0].tolist())
    assert len(both) >= topk - 1


def scores_of(
    q: Tensor, weights: Tensor, keys: CacheRows, rotary: Tensor, tokens: Tokens
) -> Tensor:
    """The scores that the selection gets, with weights times 0.5."""
    scores: list[Tensor] = []

    def keep(found: Tensor, *_: object) -> None:
        scores.append(found.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topk_triton, "select_topk", keep)
        kernels.select_entries(q, weights, keys, rotary, tokens, 8, 0.5, True)
    return scores[0]


def test_queries_whose_largest_values_are_exactly_six() -> None:
    """They need no rounding at their own scale, and lose their halves at the next one."""
    draw, width, length = Draw(), 64, 512
    tokens, table = one_row(length)
    codes = draw.integers(16, 4, width).to(torch.uint8)
    codes[:, ::32] = 7
    values = unscaled_fp4(codes, torch.ones(4, 2))
    rows = table.pages.shape[1] * 64
    pool = pack_keys(rotate_to_fp4(draw.normal(rows, width)), 64)
    still = torch.stack((torch.ones(length, 16), torch.zeros(length, 16)), -1)
    q, weights = hadamard(values)[None], torch.ones(1, 4)
    found = scores_of(q, weights, CacheRows(pool, table), still, tokens)[0, : length // 4]
    keys = unpack_keys(pool, 64, width)[table.slots(0, torch.arange(length // 4).numpy())]
    assert torch.equal(found, 0.5 * (values @ keys.T).relu().sum(0))


def test_queries_and_keys_of_every_magnitude() -> None:
    """Scores themselves: what is folded into E4M3, and what into the factors of heads and keys.

    Groups of a key differ by up to 2^11, heads and keys by up to 2^60. One head and one key of
    zeros.
    """
    draw = Draw()
    heads, width, length = 16, 128, 512
    tokens, table = one_row(length)
    rows = table.pages.shape[1] * 64
    spread = 2.0 ** draw.integers(12, rows, 4).float()
    keys = (draw.normal(rows, 4, 32).clamp(-3, 3) * spread[..., None]).flatten(1)
    keys *= 2.0 ** draw.integers(61, rows, 1, low=-30)
    keys[5] = 0
    size = 2.0 ** draw.integers(61, 1, heads, low=-30)
    q, turns = draw.normal(1, heads, width) * size[..., None], draw.quarter_turns(length, 64)
    q[0, 3] = 0
    weights = draw.normal(1, heads) / size  # so that every head counts
    pool = strided(pack_keys(keys, 64))
    dense = unpack_keys(pool, 64, width)
    scores = scores_of(q.bfloat16(), weights, CacheRows(pool, table), turns, tokens)
    rotated = apply_rope(q.bfloat16(), tokens.rotation(turns))
    rotated = rotate_to_fp4(rotated)[0].double()
    count = length // 4
    by_head = (rotated @ dense[table.slots(0, torch.arange(count).numpy())].double().T).relu()
    wanted = (weights[0].double() * 0.5) @ by_head
    unit = (weights[0].double().abs() * 0.5) @ by_head
    assert (unit > 0).sum() == count - 1
    error = (scores[0, :count].double() - wanted).abs()
    assert (error <= 2.0**-20 * unit).all()


@pytest.mark.parametrize("below", range(12))
def test_the_assembler_unpacks_every_code_exactly(below: int) -> None:
    """Eight codes of a word, each code at each index: 64 / 2^below of their values, in order."""
    one = torch.ones(1)
    for shift in range(16):
        codes = [(code + shift) % 16 for code in (0, 1, 2, 3, 4, 5, 6, 7)]
        word = sum((code & 7) << 4 * i for i, code in enumerate(codes))
        word += sum((codes[i] >> 3) << (8 * i + 7) for i in range(4))
        word += sum((codes[4 + i] >> 3) << (8 * i + 3) for i in range(4))
        found = run_ptx(kernels.UNPACK.value, torch.tensor(word), torch.tensor(below))
        data = b"".join(int(each).to_bytes(4, "little") for each in found)
        values = torch.tensor(list(data), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        wanted = unscaled_fp4(torch.tensor(codes, dtype=torch.uint8), one)
        assert torch.equal(values * 2.0 ** (below - 6), wanted)


def test_unpacked_keys_are_refused() -> None:
    q, weights, keys, *rest = next(c for c in CASES if c.args()[0].shape[2] == 128).args()
    with pytest.raises(ValueError, match="packed keys"):
        kernels.select_entries(q, weights, keys, *rest)


def prepared_values(queries: IndexQueries) -> Tensor:
    """The values that prepared queries stand for: a factor is half of its head's."""
    assert queries.factors is not None
    return queries.values.view(torch.float8_e4m3fn).float() * queries.factors[..., None] * 2


@pytest.mark.parametrize("width", WIDTHS)
def test_prepared_queries(width: int) -> None:
    """The reference's values, of strided queries. Padding and tokens of few entries need none."""
    draw, heads, topk = Draw(), 12, 64
    positions = torch.tensor((-1, 4 * topk + 2, 4 * topk + 3, 1199, 7))
    count = len(positions)
    ints = torch.zeros(count, dtype=torch.int32)
    tokens = Tokens(positions, ints, torch.tensor([0, count], dtype=torch.int32), 1200, 5)
    projected = draw.normal(count, 40 + heads * width).bfloat16()
    q = projected[:, 40:].unflatten(1, (heads, width))
    rotary = draw.quarter_turns(1200, 16)
    found = prepare_index_queries(q, rotary, tokens, topk, True)
    wanted = ref.prepare_index_queries(q, rotary, tokens, topk, True)
    scored = [2, 3]
    assert torch.equal(prepared_values(found)[scored], wanted.values[scored].float())


def test_short_sequences_need_no_prepared_queries() -> None:
    """No kernel runs, and the selection takes the result."""
    case = next(c for c in CASES if c.args()[-1] and c.args()[4].max_len // 4 <= c.args()[5])
    q, weights, keys, rotary, tokens, topk, scale, _ = case.args()
    queries = prepare_index_queries(q, rotary, tokens, topk, True)
    assert queries.values is q and queries.factors is None
    packed = packed_keys(keys)
    rest = (weights, packed, rotary, tokens, topk, scale, True)
    found, wanted = (kernels.select_entries(given, *rest) for given in (queries, q))
    assert torch.equal(found, wanted)


def test_queries_prepared_before() -> None:
    """They select what projected queries do, with bounds of a captured batch too."""
    compared = 0
    cases = SELECTING[::2]
    for case in cases:
        q, weights, keys, rotary, tokens, topk, scale, _ = case.args()
        packed = packed_keys(keys)
        wide = replace(tokens, max_len=2**13, cache=StepCache())
        for given in (tokens, wide) if case is cases[-1] else (tokens,):
            queries = prepare_index_queries(q, rotary, given, topk, True)
            found, wanted = (
                kernels.select_entries(x, weights, packed, rotary, given, topk, scale, True)
                for x in (queries, q)
            )
            assert torch.equal(found, wanted), str(case)
            compared += len(found)
    assert compared > 30


def test_keys_that_are_loaded_before_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """No token of the step writes into their pages. Most pages of a decode are loaded so early."""
    pages: dict[str, list[int]] = {"before": [], "later": []}
    load = kernels._load_keys

    def recorded(keys_ptr: Any, page: Any, there: Any, *rest: Any) -> Any:
        early = not isinstance(there, bool)
        if not early or bool(there.handle.data.item()):
            pages["before" if early else "later"].append(int(page.handle.data.item()))
        return load(keys_ptr, page, there, *rest)

    monkeypatch.setattr(kernels, "_load_keys", recorded)
    monkeypatch.setattr(kernels, "DECODE_PROGRAMS", 10**6)
    for case in [c for c in CASES if c.args()[-1] and c.args()[4].max_query in (1, 8)]:
        q, weights, keys, rotary, tokens, *rest = case.args()
        table = keys.table
        if q.shape[2] not in WIDTHS:
            continue
        for seen in pages.values():
            seen.clear()
        packed = packed_keys(keys)
        kernels.select_entries(q, weights, packed, rotary, tokens, *rest)
        first = [tokens.host_positions[start] for start in tokens.host_query_start[:-1]]
        complete = {
            int(table.pages[b, page])
            for b, position in enumerate(first)
            for page in range(position // 4 // table.rows_per_page)
        }
        assert set(pages["before"]) <= complete
        if tokens.max_query == 1 and max(tokens.host_positions) > 600:
            assert len(pages["before"]) > len(pages["later"]) > 0
