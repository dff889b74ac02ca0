"""Limits how much is in use at once. Callers wait in the order of their arrival."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager


class Room:
    """Room for a number of units, such as sequences or bytes."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size = size
        self._used = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, count: int) -> None:
        """Waits for room for `count` units. A larger count than the limit takes all of it."""
        waiting = asyncio.get_running_loop().create_future()
        entry = (count, waiting)
        self._queue.append(entry)
        self._admit()
        try:
            await waiting
        except asyncio.CancelledError:
            if entry in self._queue:
                self._queue.remove(entry)
                self._admit()
            else:
                self.release(count)
            raise

    def release(self, count: int) -> None:
        self._used -= count
        self._admit()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncGenerator[None, None]:
        """Waits for room, and frees it at the end."""
        await self.take(count)
        try:
            yield
        finally:
            self.release(count)

    def _admit(self) -> None:
        while self._queue:
            count, waiting = self._queue[0]
            if self._used and self._used + count > self._size():
                return
            self._queue.popleft()
            self._used += count
            if not waiting.done():
                waiting.set_result(None)
