"""Attention's Triton kernels in the interpreter, over packed pools, against the reference."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from tests.support.op_arguments import outliers, strided
from tests.support.op_case import Chunks, Draw, entry_rows, step_tokens, window_rows
from tests.support.packed_pools import pack_rows
from tests.support.packing import unpack_rows
from torch import Tensor

from finwhale.ops.attention import (
    AllEntries,
    RowForm,
    TopkEntries,
    Window,
    ref,
    sparse_attention_triton,
)
from finwhale.ops.attention import prepare_qkv_triton as kernels
from finwhale.ops.attention.sparse_attention_triton import (
    AttendPlan,
    AttentionProblem,
    attend,
    sparse_attention,
)
from finwhale.ops.linear.quantise_triton import empty_quantised, quantise
from finwhale.ops.paging import CacheRows, PageTable, StepCache, Tokens
from finwhale.ops.rounding import scaled_e4m3
from finwhale.ops.slots import window_slots

from .kernels_support import assert_close

EPS = 1e-6
Entries = Literal["none", "selected", "complete"]


def packed_rows(draw: Draw, table: tuple[PageTable, int], width: int, rope: int) -> Tensor:
    """A packed pool for a table from Draw.page_table, its pages apart as in a cache of layers."""
    rows = draw.normal(table[1], width).to(torch.bfloat16)
    return strided(pack_rows(rows, table[0].rows_per_page, rope))


def padded(tokens: Tokens) -> Tokens:
    """The same with one token of padding behind."""
    return replace(
        tokens,
        positions=torch.cat((tokens.positions, torch.tensor([-1]))),
        sequence=torch.cat((tokens.sequence, torch.zeros(1, dtype=torch.int32))),
        cache=StepCache(),
    )


class Case:
    """The arguments of sparse_attention over packed pools, and the same over dense ones."""

    def __init__(
        self, chunks: Chunks, heads: int, width: int, rope: int, W: int, kind: Entries, K: int = 0
    ) -> None:
        draw = Draw()
        self.tokens = tokens = step_tokens(chunks)
        num_tokens = tokens.positions.shape[0]
        self.q = strided(draw.normal(num_tokens, heads, width).to(torch.bfloat16))
        self.rotary = draw.rotation(max(end for _, end in chunks), rope)
        self.sink, self.scale = draw.normal(heads), width**-0.5 * 3
        table = draw.page_table(window_rows(chunks, W), 8)
        pool = packed_rows(draw, table, width, rope)
        self.window = Window(CacheRows(pool, table[0]), W)
        self.entries: TopkEntries | AllEntries | None = None
        if kind != "none":
            rows = 8 if kind == "selected" else 2
            table = draw.page_table(entry_rows(chunks, 4 if kind == "selected" else 128), rows)
            pool = packed_rows(draw, table, width, rope)
            held = CacheRows(pool, table[0])
            self.entries = AllEntries(held, 128)
            if kind == "selected":
                slots = torch.full((num_tokens, K), -1, dtype=torch.int32)
                for n, count in enumerate((tokens.positions + 1) // 4):
                    seen = min(K, int(count))
                    slots[n, :seen] = draw.distinct(table[1], seen).sort().values.int()
                self.entries = TopkEntries(held, slots)
        self.width, self.rope = width, rope

    def dense(self, rows: CacheRows) -> CacheRows:
        pool = unpack_rows(rows.pool, rows.table.rows_per_page, self.width, self.rope)
        return replace(rows, pool=pool)

    def wanted(self) -> Tensor:
        window = replace(self.window, rows=self.dense(self.window.rows))
        entries = self.entries
        if entries is not None:
            entries = replace(entries, rows=self.dense(entries.rows))
        q = ref.prepare_query(self.q, self.tokens.rotation(self.rotary), EPS)
        out = torch.empty(q.shape)
        # The kernel rounds the prepared query to bfloat16, as the reference does for such a query.
        ref_attend(q.float(), self, window, entries, out)
        return out

    def found(
        self,
        plan: AttendPlan | None = None,
        tokens: Tokens | None = None,
        invariant: bool = False,
    ) -> Tensor:
        out = strided(torch.full(self.q.shape, torch.nan).to(torch.bfloat16))
        self.attend(out, None, plan, tokens, invariant)
        return out.float()

    def found_rounded(
        self,
        plan: AttendPlan | None = None,
        tokens: Tokens | None = None,
        invariant: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Values [N,A,C] and scales [N,S] in the layout that DeepGEMM reads."""
        num_tokens, heads, width = self.q.shape
        out, scales = empty_quantised(num_tokens + 3, heads, width, self.q)
        scales.fill_(torch.nan)
        out, scales = out[:num_tokens], scales[:num_tokens].flatten(1)
        self.attend(out, scales, plan, tokens, invariant)
        return out, scales

    def attend(
        self,
        out: Tensor,
        scales: Tensor | None,
        plan: AttendPlan | None,
        tokens: Tokens | None,
        invariant: bool,
    ) -> None:
        problem = AttentionProblem(
            q=self.q,
            rotary=self.rotary,
            eps=EPS,
            tokens=tokens or self.tokens,
            window=self.window,
            entries=self.entries,
            sink=self.sink,
            scale=self.scale,
            out=out,
            scales=scales,
        )
        if plan is None:
            head = (self.q, self.rotary, EPS, problem.tokens, self.window, self.entries)
            tail = (self.sink, self.scale, out, scales)
            sparse_attention(*head, *tail, invariant=invariant)
        else:
            attend(problem, plan)


def ref_attend(
    q: Tensor, case: Case, window: Window, entries: TopkEntries | AllEntries | None, out: Tensor
) -> None:
    """The reference behind the query's preparation."""
    rows = window.rows
    slots = [(rows.pool, window_slots(case.tokens, rows.table, window.size))]
    seen = ref.visible_slots(case.tokens, entries)
    if entries is not None and seen is not None:
        slots.append((entries.rows.pool, seen))
    ref._attend(q * case.scale, slots, case.sink, out)
    rotation = case.tokens.rotation(case.rotary)
    out.copy_(ref.apply_rope(out, rotation, inverse=True))


def check(found: Tensor, wanted: Tensor) -> None:
    """Weights and outputs are rounded to bfloat16: 2^-9 of the largest term each."""
    assert found.isfinite().all()
    worst = (found - wanted).abs().amax() / wanted.abs().amax()
    assert worst < 2.0**-7, worst.item()


def check_rounded(found: tuple[Tensor, Tensor], wanted: Tensor) -> None:
    """Bit for bit what rounding the output afterwards gives: as defined, and as our kernel does."""
    o_NK = wanted.bfloat16().flatten(1)
    for values, scales in (scaled_e4m3(o_NK, 128), quantise(o_NK)):
        assert torch.equal(found[0].flatten(1).view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(found[1], scales)


def plan(block_h: int, block_k: int, splits: int) -> AttendPlan:
    return AttendPlan(block_h=block_h, block_k=block_k, splits=splits, num_warps=4)


DECODE = ((4, 5), (0, 1), (70, 71), (299, 300))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["none", "selected", "complete"])
def test_decode(kind: Entries, splits: int) -> None:
    case = Case(DECODE, 8, 128, 64, 32, kind, 40)
    check(case.found(plan(16, 16, splits)), case.wanted())


@pytest.mark.parametrize("block_h, splits", [(16, 1), (16, 2), (32, 1)])
def test_head_of_flash(block_h: int, splits: int) -> None:
    case = Case(((259, 260),), 20, 512, 64, 32, "selected", 40)
    check(case.found(plan(block_h, 32, splits)), case.wanted())


# Head widths: two tiles of columns, one, and one with columns and a group behind the head.
@pytest.mark.parametrize(
    ("width", "splits"),
    [
        *((512, 1), (512, 3), (128, 1), (384, 3)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((128, 3), (384, 1))),
    ],
)
def test_rounding_by_the_kernel_that_writes_the_output(width: int, splits: int) -> None:
    """With a first token, padding, and heads of very different sizes."""
    case = Case(((259, 260), (0, 1), (7, 9)), 18, width, 64, 32, "selected", 40)
    case.sink *= torch.logspace(0, 2, 18)
    tokens = padded(case.tokens)
    case.q = torch.cat((case.q, case.q[:1]))
    assert isinstance(case.entries, TopkEntries)
    slots = torch.cat((case.entries.slots, case.entries.slots[:1]))
    case.entries = replace(case.entries, slots=slots)
    whole = case.found(plan(16, 32, splits), tokens)
    check_rounded(case.found_rounded(plan(16, 32, splits), tokens), whole)


@pytest.mark.parametrize("invariant", [False, True])
def test_rounding_of_a_real_step(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attention_triton, "FIXED_KEYS", 64)
    monkeypatch.setattr(sparse_attention_triton, "INVARIANT_TOKENS", 3)
    case = Case(DECODE, 4, 128, 64, 32, "complete")
    whole = case.found(invariant=invariant)
    check_rounded(case.found_rounded(invariant=invariant), whole)


def test_chunks_of_a_prefill() -> None:
    case = Case(((3, 9), (126, 132)), 4, 128, 64, 32, "complete")
    check(case.found(plan(16, 32, 1)), case.wanted())


def test_widths_that_are_no_power_of_two() -> None:
    case = Case(((5, 8),), 3, 96, 16, 16, "selected", 5)
    check(case.found(plan(16, 16, 2)), case.wanted())


def test_the_plan_of_a_real_step() -> None:
    case = Case(((20, 21),), 8, 128, 64, 32, "selected", 8)
    check(case.found(), case.wanted())


def test_padding_sees_no_row_and_gives_finite_values() -> None:
    case = Case(((20, 21),), 2, 128, 64, 32, "selected", 8)
    alone = case.found(plan(16, 16, 2))
    case.q = torch.cat((case.q, case.q))
    assert isinstance(case.entries, TopkEntries)
    case.entries = replace(case.entries, slots=torch.cat((case.entries.slots,) * 2))
    found = case.found(plan(16, 16, 2), padded(case.tokens))
    assert torch.equal(found[:1], alone)
    assert not found[1].any()


@pytest.mark.parametrize("kind", ["none", "selected", "complete"])
def test_invariant_shares_give_a_token_its_own_bits(
    kind: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch, alone, in slices, and in steps that could see more entries or none."""
    monkeypatch.setattr(sparse_attention_triton, "FIXED_KEYS", 64)
    monkeypatch.setattr(sparse_attention_triton, "INVARIANT_TOKENS", 3)
    case = Case(DECODE, 4, 128, 64, 32, kind, 96)
    case.rotary = torch.cat((case.rotary, case.rotary))
    together = case.found(invariant=True)
    check(together, case.wanted())
    every, slots = case.tokens, case.entries
    for n in range(len(DECODE)):
        part = slice(n, n + 1)
        alone = replace(
            every, positions=every.positions[part], sequence=every.sequence[part], cache=StepCache()
        )
        if isinstance(slots, TopkEntries):
            case.entries = replace(slots, slots=slots.slots[part])
        q, case.q = case.q, case.q[part]
        found = case.found(tokens=replace(alone, max_len=500 * n + 5), invariant=True)
        case.q = q
        assert torch.equal(found[0], together[n])


def test_scales_of_any_size() -> None:
    """Rows of 2^-40 to 2^60 and zero."""
    case = Case(((30, 31),), 2, 128, 64, 32, "none")
    rows = torch.zeros(case.window.rows.pool.shape[0] * 8, 128)
    rows[:, :64] = Draw().normal(len(rows), 64) * torch.logspace(-40, 60, len(rows), 2.0)[:, None]
    rows[3] = 0
    case.window = Window(CacheRows(pack_rows(rows, 8, 64), case.window.rows.table), 32)
    case.scale = 0.0
    check(case.found(plan(16, 16, 1)), case.wanted())


@pytest.mark.parametrize("size", [(512, 64, 1024), (128, 64, 128), (80, 16, 96)], ids=str)
def test_rows_are_stored_and_latents_normalised(size: tuple[int, int, int]) -> None:
    width, rope, latent = size
    draw = Draw()
    chunks = ((5, 9), (30, 31))
    tokens = step_tokens(chunks)
    both = strided(outliers(draw, 5, latent + width).to(torch.bfloat16))
    q_lora, kv = both.split((latent, width), 1)
    q_norm, kv_norm, rotary = draw.normal(latent), draw.normal(width), draw.rotation(40, rope)
    table, num_rows = draw.page_table(window_rows(chunks, 16), 8)
    dense = torch.zeros(num_rows, width)
    pool = strided(pack_rows(dense, 8, rope))
    args = (q_lora, q_norm, kv, RowForm(kv_norm, rotary, EPS, True), tokens)
    wanted = ref.prepare_qkv(*args, CacheRows(dense, table))
    alone = strided(pack_rows(dense.new_zeros(num_rows, width), 8, rope))
    assert_close(kernels.prepare_qkv(*args, CacheRows(pool, table)), wanted)
    kernels.store_window_rows(*args[2:], CacheRows(alone, table))
    assert torch.equal(alone, pool)
    found = unpack_rows(pool, 8, width, rope)
    # A last bit of the norm may carry a value over to the next E4M3 one.
    wanted = unpack_rows(pack_rows(dense, 8, rope), 8, width, rope)
    assert (found != wanted).sum() <= 8
    assert ((found - wanted).abs() <= 2.0**-3 * wanted.abs() + 1e-5).all()


def test_padding_stores_nothing() -> None:
    draw = Draw()
    tokens = padded(step_tokens(((3, 4),)))
    table, num_rows = draw.page_table([(range(8),)], 8)
    pool = pack_rows(torch.zeros(num_rows, 128), 8, 64)
    kv = draw.normal(2, 128).to(torch.bfloat16)
    norm, form = draw.normal(128), RowForm(draw.normal(128), draw.rotation(8, 64), EPS, True)
    kernels.prepare_qkv(kv, norm, kv, form, tokens, CacheRows(pool, table))
    rows = unpack_rows(pool, 8, 128, 64)
    stored = int(table.pages[0, 0]) * 8 + 3
    assert rows[stored].any()
    rows[stored] = 0
    assert not rows.any()


def test_unsupported_arguments_are_refused() -> None:
    draw = Draw()
    tokens = step_tokens(((0, 1),))
    table, _ = draw.page_table([(range(1),)], 8)
    kv, norm, rotary = draw.normal(1, 128), draw.normal(128), draw.rotation(8, 64)
    dense, pool = torch.zeros(64, 128), pack_rows(torch.zeros(64, 128), 8, 64)
    with pytest.raises(ValueError, match=r"must be uint8 \[num_pages, 1600\]"):
        form = RowForm(norm, rotary, EPS, True)
        kernels.prepare_qkv(kv, norm, kv, form, tokens, CacheRows(dense, table))
    with pytest.raises(ValueError, match="rows are rounded"):
        form = RowForm(norm, rotary, EPS, False)
        kernels.store_window_rows(kv, form, tokens, CacheRows(pool, table))
    case = Case(((5, 6),), 4, 96, 16, 16, "none")
    with pytest.raises(ValueError, match=r"a multiple of 128 values, got torch.bfloat16 and 96"):
        tail = (case.sink, 1.0, case.q, case.sink[None])
        sparse_attention(case.q, case.rotary, EPS, case.tokens, case.window, None, *tail)
    case = Case(((5, 6),), 4, 128, 16, 16, "none")
    head = (case.q, case.rotary, EPS, case.tokens, case.window, None, case.sink, 1.0)
    for out, scales in ((case.q, case.sink[None]), (case.q.to(torch.float8_e4m3fn), None)):
        with pytest.raises(ValueError, match="E4M3 if and only if it has scales"):
            sparse_attention(*head, out, scales)
    with pytest.raises(ValueError, match="normalise every head"):
        sparse_attention(*head[:2], None, *head[3:], case.q)
    late = replace(case.tokens, windows_begin=torch.tensor([3]))
    with pytest.raises(ValueError, match="begin at position 0"):
        sparse_attention(*head[:3], late, *head[4:], case.q)
