"""Measures the time of a rank's steps. No call waits for the device.

A stopwatch measures every n-th span and does nothing in the others. All ranks execute the same
plans, so they measure the same spans, and their times can be compared.

On several GPUs, ranks wait for each other inside a step, so a slow GPU makes the steps of all ranks
long. The LM head runs after the last collective of the forward and waits for no rank: its time
shows which GPU is slow. It is measured in steps with prefill, because captured decodes contain it.
If the GPU is faster than the host launches kernels, as with a small model, the time contains the
GPU's waits for the host.
"""

import time
from collections import deque

import torch

from finwhale.engine.plan.executor import RankTimes

STEP_EVERY, HEAD_EVERY = 16, 4
WINDOW = 16  # number of measured spans whose mean is reported


class Stopwatch:
    """Measures spans of a device's work; on a CPU, the processor time of this process.

    Args:
        every: measure one of this many spans.

    Attributes:
        mean: mean seconds of the last WINDOW measured spans; None: none was measured. Other threads
            may read it.
    """

    def __init__(self, device: torch.device, every: int) -> None:
        self._device, self._every = device, every
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._began = self._ended = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget all spans."""
        self.mean: float | None = None
        self._count = 0
        self._measures = False  # the present span
        self._arrives = False  # the device may not have finished the last measured span
        self._spans: deque[float] = deque(maxlen=WINDOW)

    def begin(self) -> None:
        if self._arrives:
            self._read()
        self._measures = self._count % self._every == 0 and not self._arrives
        self._count += 1
        if not self._measures:
            return
        if self._events:
            self._events[0].record(torch.cuda.current_stream(self._device))
        else:
            self._began = time.process_time()

    def end(self) -> None:
        if not self._measures:
            return
        self._measures, self._arrives = False, True
        if self._events:
            self._events[1].record(torch.cuda.current_stream(self._device))
        else:
            self._ended = time.process_time()
            self._read()

    def _read(self) -> None:
        """Record the last measured span, if the device has finished it."""
        seconds = self._ended - self._began
        if self._events:
            begin, end = self._events
            if not end.query():
                return
            seconds = begin.elapsed_time(end) / 1000
        self._arrives = False
        self._spans.append(seconds)
        self.mean = sum(self._spans) / len(self._spans)


class StepTimes:
    """The stopwatches of a rank: of its steps, and of the LM head in steps with prefill."""

    def __init__(self, device: torch.device) -> None:
        self.step = Stopwatch(device, STEP_EVERY)
        self.head = Stopwatch(device, HEAD_EVERY)

    def reset(self) -> None:
        self.step.reset()
        self.head.reset()

    def read(self) -> RankTimes:
        return RankTimes(self.step.mean, self.head.mean)
