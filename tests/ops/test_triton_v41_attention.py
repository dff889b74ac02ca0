"""DeepSeek-V4.1's records and attention in the interpreter, against the reference on dense pools.

Stored records are compared bit for bit: the interpreter fuses no product with a sum, so the rope
gives the reference's bits.
"""

from dataclasses import replace

import pytest
import torch
from tests.support.model_cases.compressor import state_rows
from tests.support.op_arguments import outliers, strided
from tests.support.op_case import Chunks, Draw, entry_rows, step_tokens
from tests.support.ptx import halves, run_ptx
from tests.support.v41_rows import (
    ENTRY_ROWS,
    Case,
    Entries,
    check,
    dense,
    empty,
    padded,
    unpack,
)
from torch import Tensor

from finwhale.number_formats import e2m1_values
from finwhale.ops.attention import AllEntries, Window
from finwhale.ops.attention.sparse_attention_triton import AttendPlan, AttentionProblem
from finwhale.ops.deepseek_v41 import RowRounding, attention_triton, ref
from finwhale.ops.deepseek_v41 import merge_pairs_triton as pairs
from finwhale.ops.deepseek_v41 import store_rows_triton as stores
from finwhale.ops.deepseek_v41.attention_triton import attend, sparse_attention
from finwhale.ops.deepseek_v41.layout import entry, index_key, window_row
from finwhale.ops.launch.sizes import ModelSizes
from finwhale.ops.paging import CacheRows, StepCache, Tokens

from .kernels_support import DTYPES, assert_close

CHUNKS: Chunks = ((254, 258), (7, 8), (0, 5), (511, 512), (40, 80), (2, 3))
RECORDS = {"e4m3": window_row, "fp4": entry, "key": index_key}


# --- Storing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["e4m3", "fp4", "key"])
@pytest.mark.parametrize(
    ("ratio", "width", "dtype"),
    [(1, 512, torch.bfloat16), (2, 64, torch.float32), (1, 128, torch.float32)],
)
def test_rows_are_stored(rounding: RowRounding, ratio: int, width: int, dtype: torch.dtype) -> None:
    """Outliers, small rows, zeros and exact ties; padding stores nothing."""
    draw, tokens = Draw(), step_tokens(CHUNKS)
    record = RECORDS[rounding](width)
    table = draw.page_table(entry_rows(CHUNKS, ratio), 64)
    rows = empty(table, record)
    rotary = draw.rotation(tokens.max_len, 32)
    values = outliers(draw, len(tokens.positions), width)
    values[3] *= 2.0**-14
    values[4] *= 2.0**-9
    values[7, :16] = torch.tensor([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25] * 2)
    values[9, 16:32] = -values[7, :16]
    values = values.to(dtype)
    wanted = dense(rows, record)
    ref.store_rows(values, wanted, rotary, tokens, ratio, rounding)
    run = strided(torch.cat((values, torch.full((2, width), torch.nan).to(dtype))))
    stores.store_rows(run, rows, rotary, padded(tokens), ratio, rounding)
    found = unpack(rows, record)
    assert torch.equal(found, wanted.pool)
    assert found.any(1).sum() >= len(values) // ratio - 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_latents_are_normalised_and_stored(dtype: torch.dtype) -> None:
    draw, tokens = Draw(), step_tokens(((0, 7), (5, 6)))
    rows = empty(draw.page_table([(range(7),), (range(6),)], 64), window_row(64))
    num_tokens, rotary = len(tokens.positions), draw.rotation(tokens.max_len, 16)
    q, kv = (strided(draw.normal(num_tokens + 2, n).to(dtype)) for n in (40, 64))
    norms, wanted = (draw.normal(40), draw.normal(64)), dense(rows, window_row(64))
    own = q[:-2], kv[:-2]
    normed = ref.prepare_qkv(own, norms, 1e-6, wanted, rotary, tokens, "e4m3")
    found = stores.prepare_qkv((q, kv), norms, 1e-6, rows, rotary, padded(tokens), "e4m3")
    assert_close(found[:-2], normed)
    # The sum of a row may be added in another order.
    differ = unpack(rows, window_row(64)) != wanted.pool
    assert differ.float().mean() < 0.01 and wanted.pool.any()


def test_exponents_of_a_key_that_lie_far_apart() -> None:
    """V4's keys would lose what is 2^12 times smaller than the largest group."""
    draw, tokens = Draw(), step_tokens(((0, 1),))
    rows = empty(draw.page_table([(range(1),)], 4), index_key(128))
    values = draw.normal(1, 128) * torch.tensor([1e9, 1.0, 1e-9, 1e-30]).repeat_interleave(32)
    wanted = dense(rows, index_key(128))
    still = torch.stack((torch.ones(1, 16), torch.zeros(1, 16)), -1)
    ref.store_rows(values, wanted, still, tokens, 1, "key")
    stores.store_rows(values, rows, still, tokens, 1, "key")
    found = unpack(rows, index_key(128))
    assert torch.equal(found, wanted.pool)
    assert found.unflatten(1, (4, 32)).any(2).sum() == 4


# --- Pairs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_verify_tokens", [1, 4, 8])
def test_pairs_are_merged(max_verify_tokens: int) -> None:
    """In prefills, decodes and verifications, with padding and strided rows."""
    draw, tokens, width = Draw(), step_tokens(CHUNKS), 96
    table, num_rows = draw.page_table(state_rows(CHUNKS, 2, max_verify_tokens), 8)
    wanted = CacheRows(draw.normal(num_rows, 2 * width), table)
    found = replace(wanted, pool=strided(wanted.pool))
    before, norm = wanted.pool.clone(), draw.normal(width)
    projected = draw.normal(len(tokens.positions), 2 * width, scale=3.0)
    latents = ref.merge_pairs(projected, norm, wanted, tokens, 1e-20, max_verify_tokens)
    run = strided(torch.cat((projected, torch.full((2, 2 * width), torch.nan))))
    merged = pairs.merge_pairs(run, norm, found, padded(tokens), 1e-20, max_verify_tokens)
    assert_close(merged[:-2], latents)
    assert not merged[:-2][tokens.positions % 2 == 0].any() and not merged[-2:].any()
    assert torch.equal(found.pool, wanted.pool)
    assert not torch.equal(found.pool, before)


def test_a_sequence_continues_after_any_verified_token() -> None:
    """Verify four tokens, accept `kept` of them, and go on: latents as of the whole text."""
    draw, width, eps = Draw(), 32, 1e-20
    norm, text = draw.normal(width), draw.normal(12, 2 * width)
    table, num_rows = draw.page_table([(range(12),)], 8)
    whole = CacheRows(torch.zeros(num_rows, 2 * width), table)
    wanted = pairs.merge_pairs(text, norm, whole, step_tokens(((0, 12),)), eps, 1)
    for start in (5, 6):
        for kept in (1, 2, 3, 4):
            state = CacheRows(torch.full((num_rows, 2 * width), torch.nan), table)
            pairs.merge_pairs(text[:start], norm, state, step_tokens(((0, start),)), eps, 4)
            verified, go_on = text[start : start + 4].clone(), start + kept
            verified[kept:] = 9.0  # drafts that are rejected
            step = step_tokens(((start, start + 4),))
            pairs.merge_pairs(verified, norm, state, step, eps, 4)
            found = pairs.merge_pairs(
                text[go_on : go_on + 2], norm, state, step_tokens(((go_on, go_on + 2),)), eps, 4
            )
            assert torch.equal(found, wanted[go_on : go_on + 2])


# --- Attention ------------------------------------------------------------------------------------


def attention(
    case: Case,
    plan: AttendPlan | None = None,
    tokens: Tokens | None = None,
    invariant: bool = False,
) -> Tensor:
    out = strided(torch.full(case.q.shape, torch.nan).to(torch.bfloat16))
    args = case.arguments(out, tokens)
    if plan is None:
        sparse_attention(*args, invariant=invariant)
    else:
        attend(AttentionProblem(*args), plan)
    return out.float()


def plan(block_h: int, block_k: int, splits: int) -> AttendPlan:
    return AttendPlan(block_h=block_h, block_k=block_k, splits=splits, num_warps=4)


DECODE = ((4, 5), (0, 1), (70, 71), (299, 300))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["none", "fp4", "window"])
def test_decode(kind: Entries, splits: int) -> None:
    case = Case(DECODE, 8, 128, 32, kind, 40)
    check(attention(case, plan(16, 16, splits)), case.wanted())


@pytest.mark.parametrize(
    ("heads", "block_h", "block_k", "splits"), [(20, 16, 32, 1), (20, 16, 32, 2), (64, 64, 64, 1)]
)
def test_heads_of_flash(heads: int, block_h: int, block_k: int, splits: int) -> None:
    case = Case(((259, 260),), heads, 512, 64, "fp4", 70)
    check(attention(case, plan(block_h, block_k, splits)), case.wanted())


def test_chunks_of_a_prefill() -> None:
    case = Case(((3, 9), (126, 132)), 4, 64, 32, "fp4", 48)
    check(attention(case, plan(16, 32, 1)), case.wanted())


@pytest.mark.parametrize("kind", ["none", "fp4", "window"])
def test_the_plan_of_a_real_step(kind: Entries) -> None:
    case = Case(((299, 300), (20, 21)), 8, 128, 128, kind, 5 if kind == "window" else 64)
    check(attention(case), case.wanted())


def test_no_entry_is_selected_yet() -> None:
    case = Case(((0, 1),), 8, 128, 32, "fp4", 0)
    check(attention(case), case.wanted())


@pytest.mark.parametrize("splits", [1, 3])
def test_padding_sees_no_row_and_gives_zeros(splits: int) -> None:
    case = Case(((20, 21),), 2, 128, 32, "fp4", 8)
    alone = attention(case, plan(16, 16, splits))
    assert case.entries is not None
    case.q = torch.cat((case.q, case.q))
    case.entries = replace(case.entries, slots=torch.cat((case.entries.slots,) * 2))
    found = attention(case, plan(16, 16, splits), padded(case.tokens, 1))
    assert torch.equal(found[:1], alone)
    assert not found[1].any()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["none", "fp4", "window"])
def test_windows_that_begin_later(kind: Entries, splits: int) -> None:
    """Before position 0, within a window, at a token, and after tokens that then see no row."""
    case = Case(((3, 5), (20, 21), (126, 129), (299, 300)), 4, 128, 32, kind, 40)
    whole = case.wanted()
    begin = torch.tensor([-5, 10, 128, 299])
    case.tokens = replace(case.tokens, windows_begin=begin, cache=StepCache())
    wanted = case.wanted()
    check(attention(case, plan(16, 16, splits)), wanted)
    check(attention(case, invariant=True), wanted)
    assert [n for n, same in enumerate((whole == wanted).flatten(1).all(1)) if same] == [0, 1]
    if kind == "none":
        assert not wanted[3:5].any()


@pytest.mark.parametrize("kind", ["none", "fp4"])
def test_invariant_shares_give_a_token_its_own_bits(kind: Entries) -> None:
    case = Case(DECODE, 4, 128, 32, kind, 200)
    together = attention(case, invariant=True)
    check(together, case.wanted())
    every, entries = case.tokens, case.entries
    for n in range(len(DECODE)):
        part = slice(n, n + 1)
        alone = replace(
            every, positions=every.positions[part], sequence=every.sequence[part], cache=StepCache()
        )
        if entries is not None:
            case.entries = replace(entries, slots=entries.slots[part])
        q, case.q = case.q, case.q[part]
        assert torch.equal(attention(case, tokens=alone, invariant=True)[0], together[n])
        case.q = q


def test_scales_of_any_size() -> None:
    """Window rows whose values reach from 2^-31 to 2^64, and the least scales of entries."""
    case = Case(((30, 31),), 2, 128, 32, "fp4", 12)
    values = 8 * window_row(128).value_bytes
    scales = case.window.rows.pool[:, values:]
    scales.copy_(torch.linspace(105, 180, scales.numel()).view(scales.shape).to(torch.uint8))
    assert case.entries is not None
    case.entries.rows.pool[:, ENTRY_ROWS * entry(128).value_bytes :] = 1
    case.scale = 0.0
    check(attention(case, plan(16, 16, 1)), case.wanted())


def test_unsupported_arguments_are_refused() -> None:
    case = Case(((5, 6),), 4, 128, 32, "fp4", 4)
    q, rotary, tokens, window, entries = (
        *(case.q, case.rotary, case.tokens, case.window, case.entries),
    )
    tail = (case.sink, 1.0, q)
    for eps, rows, more in (
        (1e-6, entries, ()),
        (None, AllEntries(window.rows, 128), ()),
        (None, entries, (case.sink[None],)),
    ):
        with pytest.raises(ValueError, match="neither normalise heads"):
            sparse_attention(q, rotary, eps, tokens, window, rows, *tail, *more)
    wrong = Window(dense(window.rows, window_row(128)), 32)
    with pytest.raises(ValueError, match=r"must be uint8 \[num_pages, 1056\], got torch.float32"):
        sparse_attention(q, rotary, None, tokens, wrong, entries, *tail)
    with pytest.raises(ValueError, match="a power of two of values, 64 or more"):
        sparse_attention(q[..., :96], rotary, None, tokens, window, entries, *tail)
    with pytest.raises(ValueError, match="rounding 'none' needs a dense pool"):
        stores.store_rows(q[:, 0], window.rows, rotary, tokens, 1, "none")
    with pytest.raises(ValueError, match="bfloat16"):
        sparse_attention(q.float(), rotary, None, tokens, window, entries, *tail)
    state = CacheRows(torch.zeros(8, 64), window.rows.table)
    with pytest.raises(ValueError, match="projected must be float32 rows of 64"):
        pairs.merge_pairs(torch.zeros(1, 64).bfloat16(), torch.ones(32), state, tokens, 0.0, 1)


def register(*data: int) -> Tensor:
    """A register of these four bytes."""
    return torch.tensor(int.from_bytes(bytes(data), "little"))


def values_of(words: list[Tensor]) -> Tensor:
    """The bfloat16 values of pairs, in order."""
    return halves(words).flatten().double()


@pytest.mark.parametrize("high", [False, True])
def test_the_ptx_of_every_byte(high: bool) -> None:
    """Exact values times 2^-120 and 2^-126 times the factors."""
    powers = torch.tensor([2.0**100, 2.0**60]).bfloat16()
    pair = register(*powers.view(torch.uint8).tolist())
    every = [byte for byte in range(256) if byte & 127 != 127]
    ptx = attention_triton.E4M3_HIGH if high else attention_triton.E4M3_LOW
    for byte in every:
        others = every[-1 - byte % 100], every[byte % 50]
        word = [others[0], byte, others[1], 255 - byte] if high else [byte, *others, 0][:2] * 2
        found = values_of(run_ptx(ptx.value, register(*word), pair))
        values = torch.tensor(word[high::2], dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        if not values.isnan().any():
            assert torch.equal(found, values * 2.0**-120 * powers.double())
    ptx = attention_triton.E2M1_HIGH if high else attention_triton.E2M1_LOW
    for byte in range(256):
        word = [byte, 255 - byte, byte ^ 0x5A, byte ^ 0xC3]
        found = values_of(run_ptx(ptx.value, register(*word), pair, pair))
        codes = torch.tensor([b >> 4 if high else b & 15 for b in word])
        values = e2m1_values(codes.device)[codes].double()
        wanted = values * 2.0**-126 * powers.double().repeat(2)
        assert torch.equal(found, wanted)


def test_launches_change_at_published_numbers_of_tokens() -> None:
    """The launch classes name the last number of tokens before each change of the plan."""
    for heads in (64, 32, 16, 8):
        sizes = ModelSizes(
            vocab_size=64,
            num_heads=heads,
            head_dim=512,
            window=128,
            index_topk=512,
            complete_ratios=(),
            num_experts=8,
            experts_per_token=2,
            linears=frozenset(),
        )
        named = attention_triton.LAUNCH_CLASSES.tokens(sizes, 300)
        for keys in (128, 133, 640):
            plans = [AttendPlan.of(attention_triton.tiles, n, heads, keys) for n in range(1, 301)]
            changes = {n for n in range(1, 300) if plans[n - 1] != plans[n]}
            assert changes <= named
