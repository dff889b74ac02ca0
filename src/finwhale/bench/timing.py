"""Times calls on the host, and captured graphs on a GPU."""

import time
from collections.abc import Callable

import torch


def seconds_of(call: Callable[[], object]) -> float:
    """The wall-clock seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def replay_ms(replay: Callable[[], object], repeats: int, *, wait: bool = True) -> list[float]:
    """Call `replay` several times; returns how many milliseconds the GPU took for each call. With
    `wait`, the host waits for the end of each call before it makes the next.
    """
    events = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        events.append((start, end))
        if wait:
            end.synchronize()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]
