"""Prepares CUDA for captures."""

from collections.abc import Callable, Iterable

import torch


def warm_up(calls: Iterable[Callable[[], object]]) -> None:
    """Make calls on a side stream: CUDA wants warm-ups on one before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
