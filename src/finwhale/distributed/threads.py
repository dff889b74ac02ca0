"""Runs work on a thread of its own, which the caller may abandon."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(name: str, work: Callable[[], T]) -> "Future[T]":
    """Call `work` on a daemon thread. If a rank is gone, NCCL, Gloo and symmetric memory wait for
    it, and the caller gives up the thread.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
