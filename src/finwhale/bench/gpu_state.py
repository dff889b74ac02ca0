"""The clock and the power of the GPUs while something is measured, as nvidia-smi tells them.

GPUs of one kind differ, and one that reaches its limit of power lowers its clock. So a time says
little without the clock that it was measured at.
"""

import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from finwhale.distributed.cuda_ipc import uuid_of
from finwhale.engine.loop.engine import Engine
from finwhale.engine.ranks.local_executor import LocalExecutor

QUERY = "--query-gpu=uuid,clocks.sm,power.draw,clocks_event_reasons.active"
# A child of its own, so that the measured process starts nothing while it is measured. It ends
# when nvidia-smi fails, as without a reader of its output.
LOOP = 'while nvidia-smi "$@"; do sleep 0.1; done'
POWER_REASONS = 0x4 | 0x80  # software's limit of power, and the hardware's brake


@dataclass(frozen=True, slots=True)
class Sample:
    """What nvidia-smi said of one GPU at a time of `time.perf_counter`."""

    time: float
    uuid: str
    mhz: float
    watts: float
    is_limited: bool


class GpuWatch:
    """Asks for the state of GPUs some times a second, while the context is open.

    Without nvidia-smi, or without GPUs, there are no samples.

    Args:
        uuids: the GPUs.
    """

    def __init__(self, uuids: Sequence[str]) -> None:
        self._uuids, self._samples = uuids, list[Sample]()
        self._loop: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if self._uuids:
            query = [QUERY, "--format=csv,noheader,nounits", "--id=" + ",".join(self._uuids)]
            self._loop = subprocess.Popen(
                ["sh", "-c", LOOP, "sh", *query],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._loop is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._loop.pid, signal.SIGTERM)
            self._loop.wait()

    @contextmanager
    def during(self, result: dict[str, Any]) -> Iterator[None]:
        """Add the state during the context to a result: the clock of the slowest GPU and the power
        of the one that takes most, both medians, and the share of samples at a limit of power.
        """
        begin = time.perf_counter()
        yield
        end = time.perf_counter()
        found = [sample for sample in self._samples if begin <= sample.time <= end]
        if found:
            of_gpu = [[s for s in found if s.uuid == uuid] for uuid in {s.uuid for s in found}]
            result["sm_mhz"] = min(statistics.median(s.mhz for s in one) for one in of_gpu)
            result["watts"] = max(statistics.median(s.watts for s in one) for one in of_gpu)
            result["power_limited"] = round(sum(s.is_limited for s in found) / len(found), 2)

    def _read(self) -> None:
        assert self._loop is not None and self._loop.stdout is not None
        with self._loop.stdout as lines:
            for line in lines:
                try:
                    uuid, mhz, watts, reasons = line.split(",")
                    is_limited = bool(int(reasons, 16) & POWER_REASONS)
                    sample = Sample(time.perf_counter(), uuid, float(mhz), float(watts), is_limited)
                except ValueError:
                    continue  # a GPU that does not tell one of them
                self._samples.append(sample)


def watch(engine: Engine) -> GpuWatch:
    """A watch of the GPUs of an engine's ranks. With ranks on other hosts it has no samples."""
    return GpuWatch([uuid for uuid in engine.executor.call_ranks(_uuid) if uuid is not None])


def _uuid(executor: LocalExecutor) -> str | None:
    device = executor.runner.device
    if device.type != "cuda":
        return None
    return "GPU-" + uuid_of(device).removeprefix("GPU-")
