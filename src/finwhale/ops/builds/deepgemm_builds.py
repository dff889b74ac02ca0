"""Build DeepGEMM's kernels ahead: find which GEMMs a model asks for, compile them, count late ones.

DeepGEMM chooses a kernel by the shape of a GEMM and compiles it with nvcc at the first call, 1 to
3 s each. It cannot be asked to compile alone. On SM90 it chooses by the weight's shape and by the
number of blocks of rows: of 16 or 32 rows if one block holds them all, else of 64, 128 and 256. So
all numbers of rows with the same number of blocks of 64 share a kernel.

This module wraps DeepGEMM's two GEMMs in DeepGEMM's module, where
`ops/linear/linear_deepgemm.py` calls them.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deep_gemm  # type: ignore[import-not-found,unused-ignore]
import torch
from torch import Tensor

from finwhale.ops.linear.linear_deepgemm import MANY_TOKENS, rows_of
from finwhale.ops.linear.linear_triton import ROUNDED_TOKENS, SHORT_STEPS
from finwhale.ops.linear.quantise_triton import empty_quantised

BLOCK_ROWS = 64
K_GROUP = 128
# No launch takes so long on the host; loading a kernel does, compiling one takes seconds.
SLOW_CALL_S = 0.1
# Numbers of rows that one process takes at a time. Beyond OWN_KERNEL_ROWS, neighbours often share
# a kernel.
JOB_ROWS, OWN_KERNEL_ROWS = 4, 512
Kind = Literal["gemm", "einsum"]
VERSION = str(getattr(deep_gemm, "__version__", "unknown"))
GEMM: Any = deep_gemm.fp8_gemm_nt
EINSUM: Any = deep_gemm.fp8_einsum


def classes_of_rows(most: int) -> list[int]:
    """A number of rows for each kernel that steps of up to `most` tokens can need."""
    few = {rows_of(n) for n in range(1, min(most, MANY_TOKENS) + 1)}
    many = range(MANY_TOKENS + BLOCK_ROWS, most + BLOCK_ROWS, BLOCK_ROWS)
    return sorted(few | set(many if most > MANY_TOKENS else ()))


def class_of(kind: Kind, weight_shape: tuple[int, ...], rows: int) -> tuple[object, ...]:
    small = rows if rows <= 32 else 0
    return kind, weight_shape, small, -(-rows // BLOCK_ROWS)


def needed(kind: Kind, weight_shape: tuple[int, ...], rows: int) -> bool:
    """Whether DeepGEMM is called at all: our own kernel takes few rows of a short GEMM."""
    return kind == "einsum" or rows > ROUNDED_TOKENS or weight_shape[-1] > SHORT_STEPS * K_GROUP


def call(kind: Kind, weight: Tensor, scale: Tensor, rows: int) -> None:
    """Run one GEMM of `rows` rows of any contents."""
    width = weight.shape[-1]
    groups = weight.shape[0] if kind == "einsum" else 1
    x, x_scale = empty_quantised(rows, groups, width, False, weight)
    shape = (rows, groups, weight.shape[-2])
    out = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
    if kind == "einsum":
        EINSUM("bhr,hdr->bhd", (x, x_scale), (weight, scale), out)
    else:
        pair = (x.squeeze(1), x_scale.squeeze(1))
        GEMM(pair, (weight, scale), out.squeeze(1), disable_ue8m0_cast=True)


@dataclass(slots=True)
class _Asked:
    """A weight of a GEMM that was asked for, and the most rows of it."""

    weight: Tensor
    scale: Tensor
    rows: int


class DeepGemmKernels:
    """The GEMMs that were asked for, and how many of their kernels were not built ahead.

    A process has one (`of_process`), because DeepGEMM keeps its kernels and reads the place of its
    cache once.

    Attributes:
        folder: DeepGEMM's cache.
        total: kernels that were compiled or loaded when they were first called.
    """

    def __init__(self, folder: Path) -> None:
        self.total = 0
        self.folder = folder
        self._asked: dict[tuple[Kind, tuple[int, ...]], _Asked] = {}
        self._built: set[tuple[object, ...]] = set()
        self._collecting: int | None = None

    def install(self) -> None:
        """Wrap DeepGEMM's GEMMs from now on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        os.environ["DG_JIT_CACHE_DIR"] = str(self.folder.parent)

        def gemm(x: Any, w: Any, out: Any, *args: Any, **kwargs: Any) -> None:
            self._run("gemm", w, len(out), lambda: GEMM(x, w, out, *args, **kwargs))

        def einsum(expression: str, x: Any, w: Any, out: Any, *args: Any, **kwargs: Any) -> None:
            self._run("einsum", w, len(out), lambda: EINSUM(expression, x, w, out, *args, **kwargs))

        deep_gemm.fp8_gemm_nt, deep_gemm.fp8_einsum = gemm, einsum

    def _run(self, kind: Kind, w: Any, rows: int, run: Callable[[], None]) -> None:
        weight, scale = w
        shape = tuple(weight.shape)
        if self._collecting == threading.get_ident():
            asked = self._asked.setdefault((kind, shape), _Asked(weight, scale, rows))
            asked.rows = max(asked.rows, rows)
            return
        this = class_of(kind, shape, rows)
        begin = time.time()
        run()
        if this not in self._built:
            self._built.add(this)
            self.total += 1
        elif time.time() - begin > SLOW_CALL_S and self.folder.stat().st_mtime >= begin:
            # Its kernel was not that of its class.
            self.total += 1

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Note this thread's GEMMs instead of computing them."""
        self._collecting = threading.get_ident()
        try:
            yield
        finally:
            self._collecting = None

    def load(self) -> int:
        """Compile or load every kernel of the noted GEMMs, then forget these; returns how many."""
        count = 0
        for (kind, shape), asked in self._asked.items():
            for rows in _wanted(kind, shape, asked.rows):
                call(kind, asked.weight, asked.scale, rows)
                self._built.add(class_of(kind, shape, rows))
                count += 1
        self._asked.clear()
        return count

    def jobs(self) -> list[dict[str, Any]]:
        """The noted GEMMs as jobs for gemm_worker.py, which may run at the same time."""
        found = []
        for (kind, shape), asked in self._asked.items():
            rows, scale = _wanted(kind, shape, asked.rows), list(asked.scale.shape)
            few = [r for r in rows if r <= OWN_KERNEL_ROWS]
            many = rows[len(few) :]
            parts = [[r] for r in few]
            parts += [many[i : i + JOB_ROWS] for i in range(0, len(many), JOB_ROWS)]
            for part in parts:
                found.append({"kind": kind, "weight": shape, "scale": scale, "rows": part})
        # The longest first; the short ones at the end fill what time is left.
        return sorted(found, key=lambda job: -len(job["rows"]))

    def num_built(self) -> int:
        """Kernels in the cache."""
        return len(list(self.folder.iterdir()))


def _wanted(kind: Kind, shape: tuple[int, ...], most: int) -> list[int]:
    return [rows for rows in classes_of_rows(most) if needed(kind, shape, rows)]


_OF_PROCESS: list[DeepGemmKernels] = []


def of_process(folder: Path) -> DeepGemmKernels:
    """The kernels of this process; the first caller's `folder` is their cache."""
    if not _OF_PROCESS:
        _OF_PROCESS.append(DeepGemmKernels(folder))
        _OF_PROCESS[0].install()
    return _OF_PROCESS[0]
