"""Builds DeepGEMM's kernels ahead of time: records a model's GEMMs and compiles their kernels.

DeepGEMM chooses a kernel by the shape of a GEMM and compiles it with nvcc at the first call, which
takes 1 to 3 s. It cannot compile a kernel without running it. On SM90 the choice depends on the
weight's shape and on the number of row blocks. A block has 16 or 32 rows if one block holds all
rows, otherwise 64, 128 or 256. So all row counts with the same number of 64-row blocks share a
kernel. `rows_of` gives large steps few different counts.

This module replaces the two GEMM functions of the module deep_gemm, through which
`ops/linear/linear_deepgemm.py` calls them, by wrappers.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from finwhale.extras import named_extras
from finwhale.ops.linear import KERNEL_GROUP
from finwhale.ops.linear.linear_deepgemm import MANY_TOKENS, rows_of
from finwhale.ops.linear.linear_triton import ROUNDED_TOKENS, SHORT_STEPS
from finwhale.ops.linear.quantise_triton import empty_quantised

with named_extras():
    import deep_gemm  # type: ignore[import-not-found,unused-ignore]

BLOCK_ROWS = 64
# A call that takes more host time than this has loaded or compiled a kernel.
SLOW_CALL_S = 0.1
# Up to OWN_KERNEL_ROWS rows, a job compiles one row count; beyond, where neighbouring counts often
# share a kernel, it compiles JOB_ROWS row counts.
JOB_ROWS, OWN_KERNEL_ROWS = 4, 512
Kind = Literal["gemm", "einsum"]
VERSION = str(getattr(deep_gemm, "__version__", "unknown"))
GEMM: Any = deep_gemm.fp8_gemm_nt
EINSUM: Any = deep_gemm.fp8_einsum


def class_of(kind: Kind, weight_shape: tuple[int, ...], rows: int) -> tuple[object, ...]:
    """A key that GEMMs with the same kernel share."""
    small = rows if rows <= 32 else 0
    return kind, weight_shape, small, -(-rows // BLOCK_ROWS)


def needed(kind: Kind, weight_shape: tuple[int, ...], rows: int) -> bool:
    """Whether DeepGEMM runs this GEMM; Finwhale's own kernel runs short ones with few rows."""
    short = weight_shape[-1] <= SHORT_STEPS * KERNEL_GROUP
    return kind == "einsum" or rows > ROUNDED_TOKENS or not short


def call(kind: Kind, weight: Tensor, scale: Tensor, rows: int) -> None:
    """Run one GEMM with `rows` rows of uninitialised values."""
    width = weight.shape[-1]
    groups = weight.shape[0] if kind == "einsum" else 1
    x, x_scale = empty_quantised(rows, groups, width, weight)
    shape = (rows, groups, weight.shape[-2])
    out = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
    if kind == "einsum":
        EINSUM("bhr,hdr->bhd", (x, x_scale), (weight, scale), out)
    else:
        pair = (x.squeeze(1), x_scale.squeeze(1))
        GEMM(pair, (weight, scale), out.squeeze(1), disable_ue8m0_cast=True)


@dataclass(slots=True)
class _RecordedGemm:
    """The weight of a recorded GEMM, and the largest number of rows recorded with it."""

    weight: Tensor
    scale: Tensor
    rows: int


class DeepGemmKernels:
    """Records the GEMMs of a model, and counts kernels that were not built ahead.

    A process has one instance (`of_process`), because DeepGEMM's loaded kernels are global and
    DeepGEMM reads the location of its cache only once.

    Attributes:
        folder: DeepGEMM's cache.
        total: number of kernels that were compiled or loaded at their first call.
    """

    def __init__(self, folder: Path) -> None:
        self.total = 0
        self.folder = folder
        self._recorded: dict[tuple[Kind, tuple[int, ...]], _RecordedGemm] = {}
        self._built: set[tuple[object, ...]] = set()
        self._collecting: int | None = None

    def install(self) -> None:
        """Replace DeepGEMM's GEMM functions by wrappers until the process ends."""
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
            new = _RecordedGemm(weight, scale, rows)
            recorded = self._recorded.setdefault((kind, shape), new)
            recorded.rows = max(recorded.rows, rows)
            return
        gemm_class = class_of(kind, shape, rows)
        begin = time.time()
        run()
        if gemm_class not in self._built:
            self._built.add(gemm_class)
            self.total += 1
        elif time.time() - begin > SLOW_CALL_S and self.folder.stat().st_mtime >= begin:
            # DeepGEMM compiled a kernel although the class was built: `class_of` is too coarse.
            self.total += 1

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Record this thread's GEMMs instead of running them."""
        self._collecting = threading.get_ident()
        try:
            yield
        finally:
            self._collecting = None

    def load(self) -> int:
        """Compile or load the kernels of all recorded GEMMs, and clear the record.

        Returns:
            The number of kernels.
        """
        count = 0
        for (kind, shape), gemm in self._recorded.items():
            for rows in _row_counts(kind, shape, gemm.rows):
                call(kind, gemm.weight, gemm.scale, rows)
                self._built.add(class_of(kind, shape, rows))
                count += 1
        self._recorded.clear()
        return count

    def take_jobs(self) -> list[dict[str, Any]]:
        """The recorded GEMMs as jobs for gemm_worker.py, and clear the record.

        Jobs can run in parallel.
        """
        found = []
        for (kind, shape), gemm in self._recorded.items():
            rows, scale = _row_counts(kind, shape, gemm.rows), list(gemm.scale.shape)
            few = [r for r in rows if r <= OWN_KERNEL_ROWS]
            many = rows[len(few) :]
            parts = [[r] for r in few]
            parts += [many[i : i + JOB_ROWS] for i in range(0, len(many), JOB_ROWS)]
            for part in parts:
                found.append({"kind": kind, "weight": shape, "scale": scale, "rows": part})
        self._recorded.clear()
        # Start the longest jobs first, so that short ones balance the workers at the end.
        return sorted(found, key=lambda job: -len(job["rows"]))


def _row_counts(kind: Kind, shape: tuple[int, ...], most: int) -> list[int]:
    """The row counts to compile: one for each kernel that steps of up to `most` tokens can need."""
    few = {rows_of(n) for n in range(1, min(most, MANY_TOKENS) + 1)}
    many = {rows_of(n) for n in range(MANY_TOKENS + BLOCK_ROWS, most + BLOCK_ROWS, BLOCK_ROWS)}
    return [rows for rows in sorted(few | many) if needed(kind, shape, rows)]


def of_process(folder: Path) -> DeepGemmKernels:
    """The instance of this process. The first call creates it with `folder` as its cache.

    The module deep_gemm keeps it, beside the functions that it replaces there.
    """
    if not hasattr(deep_gemm, "finwhale_kernels"):
        deep_gemm.finwhale_kernels = DeepGemmKernels(folder)
        deep_gemm.finwhale_kernels.install()
    return deep_gemm.finwhale_kernels
