"""Compiles Triton's and DeepGEMM's kernels in worker processes and counts late compilations."""

import logging
import platform as python_platform
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
import triton
from triton.runtime import driver

from finwhale.artefacts import Artefacts, default_directory, digest
from finwhale.errors import ResourceError
from finwhale.ops import table_name
from finwhale.ops.builds import Builds, Built, triton_cache
from finwhale.ops.builds.launches import Counter, collect, load
from finwhale.ops.builds.pool import MAX_WORKERS, Pool
from finwhale.ops.tables import optional
from finwhale.platform import Platform, usable_cores

HAS_DEEPGEMM = optional.deepgemm() is not None
if HAS_DEEPGEMM:
    from finwhale.ops.builds import deepgemm_builds

logger = logging.getLogger(__name__)

# DeepGEMM's workers. Each one needs GPU memory for a context and the tensors of a GEMM.
GEMM_WORKERS = 12
GEMM_WORKER_BYTES = 2 * 2**30
# The modules whose kernels take longest to compile. They are compiled first.
SLOWEST = (
    ".sparse_attention_hopper",
    ".sparse_attention_triton",
    ".experts_hopper",
    ".experts_triton",
)


class KernelBuilds(Builds):
    """The `Builds` of one GPU.

    Raises:
        ResourceError: the cache directory cannot be used, or a damaged artefact in it cannot be
            removed. `prepare` raises it if a kernel is missing and the directory is read-only.
    """

    def __init__(self, platform: Platform, device_index: int, directory: str | None) -> None:
        self._device_index = device_index
        self._table = table_name(platform)
        self._artefacts = Artefacts(
            directory or default_directory(), _versions(platform, device_index)
        )
        self._artefacts.check()
        triton_cache.use_folder(str(self._artefacts.path / "triton"))
        self._counter = Counter()
        self._deepgemm: deepgemm_builds.DeepGemmKernels | None = None
        if HAS_DEEPGEMM and self._table == "nvidia_sm90":
            self._deepgemm = deepgemm_builds.of_process(self._artefacts.path / "deepgemm/cache")
        self._pool: Pool | None = None
        self._begun: set[str] = set()  # names of the kernels that `begin` built
        self._compiled = 0  # by `begin`
        self._at_ready: dict[str, int] = {}

    def expect(self, configuration: object) -> None:
        complete = self._artefacts.is_complete(configuration)
        # If another configuration is complete, most or all kernels exist already.
        if not complete and not self._artefacts.known() and self._pool is None:
            self._pool = self._new_pool()

    def is_complete(self, configuration: object) -> bool:
        return self._artefacts.is_complete(configuration)

    def begin(self, configuration: object, launch_all: Callable[[], None]) -> None:
        if self._artefacts.is_complete(configuration) or not self._artefacts.writable:
            return
        with self._artefacts.filling():
            # Otherwise another process has built everything in the meantime.
            if not self._artefacts.is_complete(configuration):
                compiled, names = self._build(launch_all)
                self._compiled += compiled
                self._begun.update(names)

    def prepare(self, configuration: object, launch_all: Callable[[], None]) -> Built:
        if not self._artefacts.is_complete(configuration) and self._artefacts.writable:
            with self._artefacts.filling():
                # Otherwise another process has built everything in the meantime.
                if not self._artefacts.is_complete(configuration):
                    missing, names = self._build(launch_all)
                    built = self._loaded(launch_all)
                    self._artefacts.mark_complete(configuration, names)
                    missing, self._compiled = missing + self._compiled, 0
                    return replace(built, compiled=built.compiled + missing)
        self._close_pool()
        if not self._artefacts.is_complete(configuration):
            variants, gemms, _ = self._needed(launch_all)
            if variants or gemms:
                raise ResourceError(
                    f"{self._artefacts.path} is read-only and lacks {len(variants + gemms)} "
                    "kernels: choose another cache directory, or fill this one with finwhale warmup"
                )
        return self._loaded(launch_all)

    def _loaded(self, launch_all: Callable[[], None]) -> Built:
        """Load every kernel, and compile those that are still missing one by one."""
        before = self._counter.compiled
        with self._collecting():
            kernels = load(launch_all)
        if self._deepgemm is not None:
            kernels += self._deepgemm.load()
        return Built(kernels=kernels, compiled=self._counter.compiled - before)

    def _build(self, launch_all: Callable[[], None]) -> tuple[int, list[str]]:
        """Let worker processes compile the missing kernels into the cache.

        Returns:
            The number of compiled kernels, and the names of all kernels that are needed.
        """
        begin = time.perf_counter()
        variants, gemms, names = self._needed(launch_all)
        found, before = time.perf_counter(), self._num_gemms()
        finish = []
        if variants or gemms:
            logger.info(
                "compiling kernels (%d jobs); an empty cache takes a minute or two to fill",
                len(variants) + len(gemms),
            )
        if variants:
            pool, self._pool = self._pool or self._new_pool(len(variants)), None
            finish.append(pool.start(variants))
        gemm_pool = self._new_gemm_pool(len(gemms)) if gemms else None
        if gemm_pool is not None:
            finish.append(gemm_pool.start(gemms))
        answers = [answer for wait in finish for answer in wait()]
        self._close_pool()
        for error in dict.fromkeys(a["error"] for a in answers if "error" in a):
            logger.warning("a kernel was not built ahead: %s", error)
        compiled: int = sum(answer.get("compiled", False) for answer in answers)
        compiled += self._num_gemms() - before
        logger.info(
            "built %d kernels into %s in %.1f s, of which %.1f s to list them",
            compiled,
            self._artefacts.path,
            time.perf_counter() - begin,
            found - begin,
        )
        return compiled, names

    def _needed(self, launch_all: Callable[[], None]) -> tuple[list[Any], list[Any], list[str]]:
        """List the kernels that `launch_all` needs.

        Returns:
            The jobs for Triton's missing kernels, longest first; the jobs for DeepGEMM's missing
            kernels; the names of all needed kernels. Kernels of complete configurations exist, and
            those that `begin` built.
        """
        with self._collecting():
            found = collect(launch_all)
        variants = [asdict(v) for v in sorted(found, key=lambda v: not v.module.endswith(SLOWEST))]
        gemms = [] if self._deepgemm is None else self._deepgemm.take_jobs()
        known = self._artefacts.known() | self._begun
        names = [digest(job) for job in (*variants, *gemms)]
        return (
            [job for job in variants if digest(job) not in known],
            [job for job in gemms if digest(job) not in known],
            names,
        )

    def _collecting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._deepgemm is None else self._deepgemm.collecting()

    def _new_pool(self, num_jobs: int = MAX_WORKERS) -> Pool:
        first = {
            "cache": str(self._artefacts.path / "triton"),
            "target": asdict(driver.active.get_current_target()),
            "modules": ["torch", f"finwhale.ops.tables.{self._table}"],
        }
        return Pool(
            "finwhale.ops.builds.worker", first, min(num_jobs, MAX_WORKERS, usable_cores() or 1)
        )

    def _num_gemms(self) -> int:
        return len(list(self._deepgemm.folder.iterdir())) if self._deepgemm is not None else 0

    def _new_gemm_pool(self, num_jobs: int) -> Pool | None:
        if self._deepgemm is None:
            return None
        # Return memory that torch has cached while it loaded the weights.
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device_index)
        size = min(num_jobs, GEMM_WORKERS, usable_cores() or 1, free // GEMM_WORKER_BYTES)
        if size < 1:
            return None
        first = {"cache": str(self._deepgemm.folder.parent), "device": self._device_index}
        return Pool("finwhale.ops.builds.gemm_worker", first, int(size))

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def mark_ready(self) -> None:
        self._at_ready = self._totals()
        self._counter.warns = True

    def late(self) -> Mapping[str, int]:
        return {name: now - self._at_ready.get(name, 0) for name, now in self._totals().items()}

    def _totals(self) -> dict[str, int]:
        totals = {"triton": self._counter.late}
        # The graphs of torch's compiler, which this does not import.
        compiler = sys.modules.get("torch._dynamo.utils")
        totals["inductor"] = int(compiler.counters["stats"]["unique_graphs"]) if compiler else 0
        if self._deepgemm is not None:
            totals["deepgemm"] = self._deepgemm.total
        return totals


def _versions(platform: Platform, device_index: int) -> dict[str, str]:
    """The device and the versions that compiled code depends on."""
    name = torch.cuda.get_device_name(device_index) if torch.cuda.is_available() else "none"
    return {
        "device": name,
        "arch": platform.arch,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "deepgemm": deepgemm_builds.VERSION if HAS_DEEPGEMM else "",
        "python": python_platform.python_version(),
    }
