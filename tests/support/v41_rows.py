"""Packed pools of DeepSeek-V4.1's records, and attention over them beside the reference."""

from dataclasses import replace
from typing import Literal

import torch
from tests.support.op_arguments import strided
from tests.support.op_case import Args, Chunks, Draw, entry_rows, step_tokens, window_rows
from torch import Tensor

from finwhale.number_formats import e2m1_values
from finwhale.ops.attention import TopkEntries, Window, ref
from finwhale.ops.deepseek_v41.layout import ScaledRow, entry, window_row
from finwhale.ops.paging import CacheRows, PageTable, StepCache, Tokens

ENTRY_ROWS = 16  # of a page


def padded(tokens: Tokens, count: int = 2) -> Tokens:
    return replace(
        tokens,
        positions=torch.cat((tokens.positions, torch.full((count,), -1))),
        sequence=torch.cat((tokens.sequence, torch.zeros(count, dtype=torch.int32))),
        cache=StepCache(),
    )


def unpack(rows: CacheRows, record: ScaledRow) -> Tensor:
    """The dense float32 rows of a packed pool, by the words of layout.py."""
    P, pool = rows.table.rows_per_page, rows.pool
    values = pool[:, : P * record.value_bytes].reshape(-1, record.value_bytes)
    scales = pool[:, P * record.value_bytes :].reshape(len(values), -1)
    if record.value_bits == 8:
        numbers = values.view(torch.float8_e4m3fn).float()
    else:
        codes = torch.stack((values & 15, values >> 4), -1).flatten(1)
        numbers = e2m1_values(codes.device)[codes.long()]
    if record.group == 16:
        scale = scales.view(torch.float8_e4m3fn).float()
    else:
        scale = torch.exp2(scales.float() - 127)
    return numbers * scale.repeat_interleave(record.group, 1)


def dense(rows: CacheRows, record: ScaledRow) -> CacheRows:
    return replace(rows, pool=unpack(rows, record))


def empty(table: tuple[PageTable, int], record: ScaledRow) -> CacheRows:
    """A pool of zeros, its pages apart as in a cache of layers."""
    rows = table[0].rows_per_page
    pool = torch.zeros(table[1] // rows, record.page_bytes(rows), dtype=torch.uint8)
    return CacheRows(strided(pool), table[0])


Entries = Literal["none", "fp4", "window"]


def random_rows(draw: Draw, table: tuple[PageTable, int], record: ScaledRow) -> CacheRows:
    """A pool of any E4M3 or e2m1 values; the scales of a row differ."""
    rows = empty(table, record)
    values = rows.table.rows_per_page * record.value_bytes
    codes = draw.integers(256, *rows.pool.shape).to(torch.uint8)
    if record.value_bits == 8:
        codes = torch.where(codes & 127 == 127, 0, codes)
        scales = draw.integers(124, *rows.pool.shape, low=116)
    else:
        scales = draw.integers(72, *rows.pool.shape, low=1)
    rows.pool.copy_(codes)
    rows.pool[:, values:] = scales[:, values:].to(torch.uint8)
    return rows


class Case:
    """The arguments of sparse_attention over packed pools, and the result over dense ones."""

    def __init__(
        self, chunks: Chunks, heads: int, width: int, W: int, kind: Entries, K: int = 0
    ) -> None:
        draw = Draw()
        self.tokens = tokens = step_tokens(chunks)
        N = len(tokens.positions)
        self.q = strided(draw.normal(N, heads, width).to(torch.bfloat16))
        self.rotary = draw.rotation(max(end for _, end in chunks), 64 if width > 64 else 32)
        self.sink, self.scale = draw.normal(heads), width**-0.5 / 8
        table = draw.page_table(window_rows(chunks, W), 8)
        self.window = Window(random_rows(draw, table, window_row(width)), W)
        self.entries: TopkEntries | None = None
        if kind != "none":
            rows = self.window.rows
            if kind == "fp4":
                table = draw.page_table(entry_rows(chunks, 2), ENTRY_ROWS)
                rows = random_rows(draw, table, entry(width))
            slots = torch.full((N, K), -1, dtype=torch.int32)
            for n, count in enumerate(((tokens.positions + 1) // 2).tolist()):
                seen = min(K, count)
                slots[n, :seen] = draw.distinct(table[1], seen).sort().values.int()
            self.entries = TopkEntries(rows, slots)

    def wanted(self) -> Tensor:
        width, entries = self.q.shape[2], self.entries
        window = replace(self.window, rows=dense(self.window.rows, window_row(width)))
        if entries is not None:
            four = entries.rows.table.rows_per_page == ENTRY_ROWS
            record = entry(width) if four else window_row(width)
            entries = replace(entries, rows=dense(entries.rows, record))
        # The kernel rounds the rotated query to bfloat16, as the reference does for such a query.
        q = ref.prepare_query(self.q, self.tokens.rotation(self.rotary), None).float()
        out = torch.empty(q.shape)
        still = torch.stack((torch.ones(1, 1), torch.zeros(1, 1)), -1)
        still = still.expand(len(self.rotary), -1, -1)
        args = (q, still, None, self.tokens, window, entries, self.sink, self.scale, out)
        ref.sparse_attention(*args)
        rotation = self.tokens.rotation(self.rotary)
        return ref.apply_rope(out, rotation, inverse=True)

    def arguments(self, out: Tensor, tokens: Tokens | None = None) -> Args:
        """The arguments of sparse_attention, of this step or another one."""
        head = (self.q, self.rotary, None, tokens or self.tokens, self.window, self.entries)
        return (*head, self.sink, self.scale, out)


def check(found: Tensor, wanted: Tensor) -> None:
    """Weights and outputs are rounded to bfloat16: 2^-9 of the largest term each."""
    assert found.isfinite().all()
    worst = (found - wanted).abs().amax() / wanted.abs().amax()
    assert worst < 2.0**-7, worst.item()
