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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import IO, Any

from finwhale.distributed.cuda_ipc import uuid_of
from finwhale.engine.loop.engine import Engine
from finwhale.engine.ranks.local_executor import LocalExecutor

QUERY = "--query-gpu=uuid,clocks.sm,power.draw,clocks_event_reasons.active"
# A process of its own, so that the measured one starts nothing meanwhile. It ends when nvidia-smi
# fails, as it does without a reader of its output.
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
    """What nvidia-smi says of GPUs some times a second. Without it, there are no samples."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []

    def read(self, lines: IO[str]) -> None:
        """Read what the loop writes, until it ends."""
        for line in lines:
            try:
                uuid, mhz, watts, reasons = line.split(",")
                is_limited = bool(int(reasons, 16) & POWER_REASONS)
                sample = Sample(time.perf_counter(), uuid, float(mhz), float(watts), is_limited)
            except ValueError:
                continue  # a GPU that does not tell one of them
            self._samples.append(sample)

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


@contextmanager
def watch_gpus(uuids: Sequence[str]) -> Iterator[GpuWatch]:
    """Watch GPUs during the context."""
    gpus = GpuWatch()
    if not uuids:
        yield gpus
        return
    query = [QUERY, "--format=csv,noheader,nounits", "--id=" + ",".join(uuids)]
    with subprocess.Popen(
        ["sh", "-c", LOOP, "sh", *query],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as loop:
        reader = threading.Thread(target=gpus.read, args=(loop.stdout,), daemon=True)
        reader.start()
        try:
            yield gpus
        finally:
            os.killpg(loop.pid, signal.SIGTERM)
            reader.join()


def watch(engine: Engine) -> AbstractContextManager[GpuWatch]:
    """Watch the GPUs of an engine's ranks. With ranks on other hosts there are no samples."""
    return watch_gpus([uuid for uuid in engine.executor.call_ranks(_uuid) if uuid is not None])


def _uuid(executor: LocalExecutor) -> str | None:
    device = executor.runner.device
    if device.type != "cuda":
        return None
    return "GPU-" + uuid_of(device).removeprefix("GPU-")
