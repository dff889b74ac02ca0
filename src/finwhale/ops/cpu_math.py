"""Building blocks of the CPU table, in numpy.

For the small arrays of a decode step, a numpy call costs a fraction of a torch call. The CPU table
is batch-invariant: no bit of a row depends on the other rows or on their number. So every matrix
multiplication has a fixed shape per row (matmul of [N,1,K] by [K,M] is one GEMV a row, for any N),
sums run in order or over an axis of fixed length, and all other functions work element by element.

numpy calls a BLAS library for matrix multiplication. `blas_keeps_bits` checks that library once on
each machine. If the library is not batch-invariant, `matmul` uses a slower path instead.

Legend: N rows, K input width, M output width, D width, R rope dimensions.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import threadpoolctl

# Import this module now: numpy imports it lazily, and an interrupt during that import is lost.
from numpy.random import default_rng
from numpy.typing import NDArray
from torch import Tensor

from finwhale.number_formats import E4M3_MAX
from finwhale.ops.host_forms import once_per_tensor
from finwhale.ops.paging import contiguous_rows
from finwhale.ops.rounding import MIN_AMAX
from finwhale.platform import usable_cores

F32 = NDArray[np.float32]
C64 = NDArray[np.complex64]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

NUM_WORKERS = usable_cores() or 1
# The least number of multiplications that is worth another thread: about a millisecond of work.
# Waking a thread takes microseconds on an idle machine and milliseconds on a busy one.
PARALLEL_WORK = 2**25


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    """The process's worker threads. The first large step creates them."""
    return ThreadPoolExecutor(NUM_WORKERS, "finwhale-cpu")


# A forked child does not have its parent's threads.
os.register_at_fork(after_in_child=_pool.cache_clear)


@lru_cache(maxsize=1)
def limit_blas_threads() -> None:
    """Limit numpy's own OpenBLAS to one thread in this process; torch's threads do not change.

    `prepare_linear` calls this for the first weight, so an import alone has no effect. A GEMV is
    too short to divide between threads, and its bits must not depend on the number of threads.
    Instead, `split_rows` divides the rows of large steps.
    """
    for library in threadpoolctl.ThreadpoolController().lib_controllers:
        if library.internal_api == "openblas" and "numpy" in library.filepath:
            library.set_num_threads(1)


def split_rows(num_rows: int, work_per_row: int, fn: Callable[[slice], object]) -> None:
    """Call `fn` with slices that cover all rows, on several threads if the work is large enough.

    Args:
        work_per_row: approximate number of multiplications per row.
    """
    parts = min(NUM_WORKERS, num_rows, num_rows * work_per_row // PARALLEL_WORK)
    if parts <= 1:
        fn(slice(0, num_rows))
        return
    bounds = [num_rows * i // parts for i in range(parts + 1)]
    own, *others = [slice(start, end) for start, end in pairwise(bounds)]
    running = [_pool().submit(fn, rows) for rows in others]
    fn(own)
    for part in running:
        part.result()


@once_per_tensor
def view(tensor: Tensor) -> Any:
    """The tensor's memory as an array."""
    return tensor.numpy()


@once_per_tensor
def rows(pool: Tensor) -> tuple[Any, int]:
    """A dense pool as a contiguous array and a step (see `paging.contiguous_rows`).

    To gather rows of a strided array, numpy would first copy the whole array.
    """
    flat, step = contiguous_rows(pool)
    return flat.numpy(), step


@lru_cache(maxsize=256)
def constant(value: float) -> F32:
    """A float32 array without dimensions, which is numpy's fastest operand."""
    array = np.array(value, np.float32)
    array.flags.writeable = False
    return array


# (rows, K, M) of the GEMMs that `blas_keeps_bits` tries: widths of whole blocks of a BLAS kernel,
# slightly more, and odd ones. One row uses a GEMV, more rows a GEMM.
_TRIED = (
    *((1, K, M) for K in (24, 100, 256, 1027) for M in (4, 24, 75, 256, 321)),
    *((rows, K, M) for rows in (4, 16) for K, M in ((24, 32), (64, 128), (128, 24), (128, 96))),
    (4, 4, 256),
)


@lru_cache(maxsize=1)
def blas_keeps_bits() -> bool:
    """Whether numpy's BLAS gives a matrix the same bits alone and within any stack.

    The check computes each GEMM within a stack, alone, and at another alignment. numpy's own
    OpenBLAS with one thread passed with every kernel that was tried.
    """
    stack = 3
    numbers = default_rng(0).standard_normal(2**20, np.float32)
    for rows, K, M in _TRIED:
        x = numbers[: stack * rows * K].reshape(stack, rows, K)
        weights = numbers[-stack * K * M :].reshape(stack, K, M)
        for order in ("C", "F"):
            shared: F32 = np.asarray(weights[0], order=order)
            among = (np.matmul(x, shared), np.matmul(x, weights))
            for i in range(stack):
                moved = np.empty(rows * K + 1, np.float32)[1:].reshape(rows, K)  # another alignment
                moved[...] = x[i]
                alone = [(moved @ shared, moved @ weights[i])]
                if rows == 1:
                    alone.append((moved[0].dot(shared)[None], x[i, 0].dot(weights[i])[None]))
                pairs = (pair for one in alone for pair in zip(one, among, strict=True))
                if not all(np.array_equal(one, whole[i]) for one, whole in pairs):
                    return False
        squares = np.vecdot(x[:, 0], x[:, 0])
        if any(float(x[i, 0].dot(x[i, 0])) != float(squares[i]) for i in range(stack)):
            return False
    return True


def matmul(a: F32, b: F32, out: F32 | None = None) -> F32:
    """a [...,N,K] @ b [...,K,M]; a matrix's bits do not depend on the rest of the stack."""
    if blas_keeps_bits():
        return np.matmul(a, b, out)
    return _matmul_in_order(a, b, out)


def _matmul_in_order(a: F32, b: F32, out: F32 | None) -> F32:
    """Add the terms of each element in order, without a BLAS library."""
    total: F32 = np.multiply(a[..., :1], b[..., :1, :], out)
    for k in range(1, a.shape[-1]):
        np.add(total, a[..., k : k + 1] * b[..., k : k + 1, :], total)
    return total


def matmul_rows(x_NK: F32, weight_KM: F32) -> F32:
    """x [N,K] @ weight [K,M], with one GEMV per row."""
    num_rows = x_NK.shape[0]
    if num_rows == 1 and blas_keeps_bits():
        one: F32 = x_NK[0].dot(weight_KM)
        return one[None]
    out_NM = np.empty((num_rows, weight_KM.shape[1]), np.float32)

    def run(rows: slice) -> None:
        matmul(x_NK[rows, None], weight_KM, out_NM[rows, None])

    split_rows(num_rows, weight_KM.size, run)
    return out_NM


def inverse_rms(x: F32, eps: float) -> F32 | np.float32:
    """1 / sqrt(mean(x^2) + eps) over the last axis: [...,D] -> [...,1], or a scalar for one row.

    The computation is in float64 from the sum on, so that scalars and arrays give the same bits.
    """
    share = 1.0 / x.shape[-1]
    if x.ndim == 1 and blas_keeps_bits():
        return np.float32(1.0 / math.sqrt(float(x.dot(x)) * share + eps))
    squares = np.vecdot(x, x) if blas_keeps_bits() else np.add.reduce(np.square(x), -1)
    mean = squares[..., None].astype(np.float64)
    mean *= share
    mean += eps
    np.sqrt(mean, mean)
    return np.reciprocal(mean, mean).astype(np.float32)


def rms_norm(x: F32, weight_D: F32, eps: float) -> F32:
    """x / rms(x) * weight, a new array."""
    # Drop the first dimension of a single row, because numpy is faster with equal shapes.
    rows = x[0] if len(x) == 1 and x.ndim == 2 else x
    out = np.multiply(rows, inverse_rms(rows, eps))
    np.multiply(out, weight_D, out)
    return out.reshape(x.shape)


@once_per_tensor
def turns(rotation_NR: Tensor) -> C64:
    """cos + i sin [N,R/2] of a rotation [N,R/2,2] of (cos, sin)."""
    return rotation_NR.numpy().view(np.complex64)[..., 0]


def rotate(x: F32, turn_NR: C64) -> None:
    """Rotate the interleaved pairs of x's last R values in place; x [N,C] or [N,A,C], R >= 4.

    A pair (a, b) is the complex number a + bi, and a complex multiplication rotates it.
    """
    pairs = x[..., -2 * turn_NR.shape[1] :].view(np.complex64)
    np.multiply(pairs, turn_NR if x.ndim == 2 else turn_NR[:, None], pairs)


_EXPONENT = np.array(0x7F800000, np.int32)
# Adding this and masking with _EXPONENT rounds a scale up to a power of two and divides it by 2^6:
# E4M3 values below 2^-6 are subnormal.
_TO_LOWEST = np.array(0x007FFFFF - (6 << 23), np.int32)
_MAGIC = np.array((20 << 23) + 0x400000, np.int32)


def round_e4m3(x: F32, group: int) -> F32:
    """Like rounding.round_e4m3, for |x| < 2^100; a rounded zero is +0. Returns a new array.

    A value x with exponent e is rounded to a multiple of 2^(e-3), or of 2^-9 times the scale if
    that is larger. Adding and subtracting 1.5 * 2^(e+20) rounds this way, with ties to even.
    """
    out = np.empty(x.shape, np.float32)
    width = x.shape[-1]
    rest = width % group
    if rest == 0:
        _round_groups(x, group, out)
        return out
    if width > rest:
        _round_groups(x[..., :-rest], group, out[..., :-rest])
    _round_groups(x[..., -rest:], rest, out[..., -rest:])
    return out


def _round_groups(x: F32, group: int, out: F32) -> None:
    shape = (*x.shape[:-1], x.shape[-1] // group, group)
    values, rounded = x.reshape(shape), out.reshape(shape)
    np.absolute(values, rounded)
    amax = np.maximum.reduce(rounded, -1)[..., None]
    np.maximum(amax, constant(MIN_AMAX), out=amax)
    np.multiply(amax, constant(1.0 / E4M3_MAX), amax)
    lowest: I32 = amax.view(np.int32)
    np.add(lowest, _TO_LOWEST, lowest)
    np.bitwise_and(lowest, _EXPONENT, lowest)
    shift: I32 = np.bitwise_and(values.view(np.int32), _EXPONENT)
    np.maximum(shift, lowest, out=shift)
    np.add(shift, _MAGIC, shift)
    magic: F32 = shift.view(np.float32)
    np.add(values, magic, rounded)
    np.subtract(rounded, magic, rounded)
