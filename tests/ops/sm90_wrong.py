"""Launches of kernels whose indices wrap, and of such whose indices do not.

test_index_arithmetic.py must tell one from the other.
"""

import torch
import triton
import triton.language as tl

from .sm90_compile import meta

ROWS, WIDTH = 2**20, 4096


@triton.jit
def _rows_kernel(x_ptr, stride_x, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if WIDE:
        row = row.to(tl.int64)
    at = x_ptr + row * stride_x + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) + 1)


@triton.jit
def _pages_kernel(x_ptr, pages_ptr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    page = tl.load(pages_ptr + tl.arange(0, BLOCK))
    if WIDE:
        page = page.to(tl.int64)
    tl.store(x_ptr + page * 64, 0)


@triton.jit
def _loop_kernel(x_ptr, rows, step, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    offset = tl.zeros([BLOCK], tl.int64 if WIDE else tl.int32)
    for _ in range(rows):
        tl.store(x_ptr + offset, 0)
        offset += step


@triton.jit
def _while_kernel(x_ptr, rows, step, WIDE: tl.constexpr):
    low = 0
    high = rows
    while low < high:
        middle = (low + high) // 2
        row = middle.to(tl.int64) if WIDE else middle
        if tl.load(x_ptr + row * step) > 0:
            low = middle + 1
        else:
            high = middle
    tl.store(x_ptr, low)


@triton.jit
def _narrow_kernel(x_ptr, slots_ptr, WIDE: tl.constexpr):
    slot = tl.load(slots_ptr)
    if not WIDE:
        slot = slot.to(tl.int32)
    tl.store(x_ptr + slot, 0)


@triton.jit
def _select_kernel(x_ptr, y_ptr, pages_ptr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    page = tl.load(pages_ptr + lane)
    if WIDE:
        page = page.to(tl.int64)
    is_x = lane < tl.program_id(0)
    offset = tl.where(is_x, lane.to(tl.int64), page * 4096)
    tl.store(tl.where(is_x, x_ptr, y_ptr) + offset, 0)


def rows(wide: bool) -> None:
    x = meta(ROWS, WIDTH)
    _rows_kernel[(ROWS,)](x, x.stride(0), wide, 64)


def pages(wide: bool) -> None:
    _pages_kernel[(1,)](meta(64), meta(64, dtype=torch.int32), wide, 64)


def loop(wide: bool) -> None:
    _loop_kernel[(1,)](meta(ROWS, WIDTH), ROWS, WIDTH, wide, 64)


def search(wide: bool) -> None:
    _while_kernel[(1,)](meta(ROWS, WIDTH), ROWS, WIDTH, wide)


def narrow(wide: bool) -> None:
    _narrow_kernel[(1,)](meta(64), meta(64, dtype=torch.int64), wide)


def select(wide: bool) -> None:
    x, pages = meta(64), meta(64, dtype=torch.int32)
    _select_kernel[(64,)](x, x, pages, wide, 64)


KINDS = (rows, pages, loop, search, narrow, select)
CALLS = {
    f"{kind.__name__}-{wide}": lambda kind=kind, wide=wide: kind(wide)
    for kind in KINDS
    for wide in (False, True)
}
