"""Cases of attention: first tokens, whole windows, entries from none to several blocks."""

from dataclasses import dataclass

import torch
from tests.support.checked_case import ROUNDED_FLIPS, CheckedCase
from tests.support.model_cases.attention import EPS, prepare_args
from tests.support.op_arguments import outliers, strided
from tests.support.op_case import (
    Args,
    Chunks,
    Draw,
    entry_rows,
    num_tokens,
    rounded_heads,
    step_tokens,
    window_rows,
)
from torch import Tensor

from finwhale.ops.attention import AllEntries, TopkEntries, Window
from finwhale.ops.paging import CacheRows, PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A step and a layer's widths.

    Attributes:
        chunks: (start, end) of each sequence's tokens.
        entries: number of entries that the last token selected; "all": every complete entry.
        rows_per_page: rows of a page of the window, and of a page of entries.
        rounded: whether the output is rounded to E4M3.
    """

    chunks: Chunks
    heads: int = 8
    head_dim: int = 128
    rope: int = 64
    window: int = 128
    entries: int | str | None = None
    rows_per_page: tuple[int, int] = (64, 64)
    rounded: bool = False
    eps: float | None = EPS

    def __str__(self) -> str:
        shape = (self.window, self.entries, self.heads, self.head_dim, self.rope)
        return f"{self.chunks} {shape}{' rounded' * self.rounded}{' no norm' * (self.eps is None)}"


DECODES = ((0, 1), (63, 64), (64, 65), (127, 128), (128, 129), (500, 501))
LONG = 128 * 131
# No token; the embedded model's sizes; a first token; page edges; odd widths and pages; several
# blocks of entries and a rest; a chunk; rope only; Flash's widths; complete entries from none to
# more than one block; a rank's heads; rounded outputs; the few additional rows of a DSpark block; a
# verification of five drafts.
SIZES = (
    Size(chunks=(), entries=64),
    Size(chunks=((300, 301),)),
    Size(chunks=((0, 1),)),
    Size(chunks=((700, 701),), entries=64),
    Size(chunks=DECODES, entries=40),
    Size(
        chunks=((0, 3), (11, 12), (40, 43)),
        heads=3,
        head_dim=80,
        rope=16,
        window=13,
        entries=5,
        rows_per_page=(5, 3),
    ),
    Size(chunks=((0, 1), (63, 64), (130, 131), (900, 901)), entries=328),
    Size(chunks=((100, 140),), heads=4, head_dim=64, rope=64, entries=128),
    Size(chunks=((0, 9),), heads=1, head_dim=64, rope=64),
    Size(chunks=((5, 6), (200, 201)), heads=16, head_dim=512, entries=512),
    Size(chunks=((7, 9),), heads=64, head_dim=512),
    Size(chunks=(*DECODES, (LONG - 1, LONG)), entries="all", rows_per_page=(64, 2)),
    Size(chunks=((250, 260), (0, 5)), heads=2, head_dim=48, rope=16, entries="all"),
    Size(chunks=((LONG - 3, LONG + 2),), heads=2, head_dim=48, rope=16, entries="all"),
    Size(chunks=((5, 6), (200, 202)), heads=8, head_dim=512, entries=64),
    Size(chunks=((70, 71), (200, 201)), heads=32, head_dim=512, entries="all", rounded=True),
    Size(chunks=(), rounded=True),
    Size(chunks=(*DECODES, (20, 29)), entries=40, rounded=True),
    Size(chunks=((5, 6), (200, 203)), heads=16, head_dim=512, entries="all", rounded=True),
    Size(chunks=((3, 8), (190, 195)), heads=8, head_dim=512, entries=5),
    Size(chunks=((125, 131), (0, 6), (300, 304)), heads=16, head_dim=512, entries=64),
    Size(chunks=((5, 6), (200, 202)), heads=3, head_dim=64, entries=20, eps=None),
)


def _attend(size: Size) -> CheckedCase:
    """With a number of entries, the first token has selected none and the last one all of them."""

    def args() -> Args:
        draw = Draw()
        tokens = step_tokens(size.chunks)
        N, A, C = len(tokens.positions), size.heads, size.head_dim
        table, num_rows = draw.page_table(
            window_rows(size.chunks, size.window), size.rows_per_page[0]
        )
        return (
            strided(draw.normal(N, A, C) + outliers(draw, N, A, C)),
            draw.rotation(tokens.max_len, size.rope),
            size.eps,
            tokens,
            Window(CacheRows(draw.normal(num_rows, C), table), size.window),
            _entries(draw, size, N),
            draw.normal(A),
            C**-0.5 * 3,
            *(rounded_heads(N, A, C) if size.rounded else (torch.full((N, A, C), torch.nan),)),
        )

    return CheckedCase(
        operator="sparse_attention",
        name=str(size),
        args=args,
        by_token=(0, 3, 4, 5, 8, 9),
        written=(8, 9) if size.rounded else (8,),
        flips=ROUNDED_FLIPS if size.rounded else 0.0,
    )


def _entries(draw: Draw, size: Size, N: int) -> TopkEntries | AllEntries | None:
    rows_per_page = size.rows_per_page[1]
    if size.entries is None:
        return None
    if isinstance(size.entries, str):
        table, num_rows = draw.page_table(entry_rows(size.chunks, 128), rows_per_page)
        return AllEntries(CacheRows(draw.normal(num_rows, size.head_dim), table), 128)
    counts = [size.entries * (n + 1) // N for n in range(N)]
    if N > 1:
        counts[0] = 0
    slots = selected_slots(draw, 10 * rows_per_page, counts, size.entries)
    # The slots name the rows, so the operators read no page number of this table.
    table = PageTable(slots, slots[:, 0], rows_per_page)
    return TopkEntries(CacheRows(draw.normal(10 * rows_per_page, size.head_dim), table), slots)


def selected_slots(draw: Draw, num_rows: int, counts: list[int], width: int) -> Tensor:
    """Random slots [N,width] int32. Token n has counts[n] of them, and -1 after them."""
    out = torch.full((len(counts), width), -1, dtype=torch.int32)
    for row, count in enumerate(counts):
        out[row, :count] = draw.integers(num_rows, count)
    return out


def _prepare(
    chunks: Chunks,
    Q: int,
    C: int,
    R: int,
    rows_per_page: int,
    round_nope: bool,
    with_query: bool,
) -> CheckedCase:
    def args() -> Args:
        draw, N = Draw(), num_tokens(chunks)

        def fused() -> Tensor:
            return torch.cat((outliers(draw, N, Q), draw.normal(N, C)), 1)

        found = prepare_args(draw, chunks, fused, (Q, C, R), rows_per_page, round_nope)
        return found if with_query else found[2:]

    return CheckedCase(
        operator="prepare_qkv" if with_query else "store_window_rows",
        name=f"{chunks} {(Q, C, R)}{' rounded' * round_nope}",
        args=args,
        by_token=(0, 2, 4, 5) if with_query else (0, 2, 3),
        written=(5,) if with_query else (3,),
        flips=0.005 if round_nope else 0.0,
    )


# Chunks, Q, C, R, rows per page.
WRITES: tuple[tuple[Chunks, int, int, int, int], ...] = (
    ((), 128, 128, 64, 64),
    (((0, 1),), 128, 128, 64, 64),
    (((700, 701),), 128, 128, 64, 64),
    (((0, 3), (63, 66), (20, 21)), 40, 130, 50, 7),
    (DECODES, 128, 128, 64, 64),
    (((62, 65),), 1024, 512, 64, 64),
    (((300, 450),), 64, 64, 32, 64),
)
CASES = (
    *(
        _prepare(*size, rounded, with_query)
        for size in WRITES
        for rounded in (False, True)
        for with_query in (True, False)
    ),
    *(_attend(size) for size in SIZES),
)
