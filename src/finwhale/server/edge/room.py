"""Limits how much is in use at once. Users take turns; each waits in the order of its arrivals."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items of users. Each user's items stay in order, and users take turns."""

    def __init__(self) -> None:
        self._users: OrderedDict[str, deque[T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._users)

    def put(self, user: str, item: T) -> None:
        self._users.setdefault(user, deque()).append(item)

    @property
    def next(self) -> T:
        """The item that `get` would remove."""
        return next(iter(self._users.values()))[0]

    def get(self) -> T:
        """Removes the first item of the user whose turn it is. The queue must not be empty."""
        user, items = self._users.popitem(last=False)
        item = items.popleft()
        if items:
            self._users[user] = items  # the last to have a turn again
        return item


class Room:
    """Room for a number of units, such as sequences or bytes."""

    def __init__(self, size: Callable[[], int]) -> None:
        self._size = size
        self._used = 0
        self._queue: FairQueue[tuple[int, asyncio.Future[None]]] = FairQueue()

    async def take(self, count: int, user: str = "") -> None:
        """Waits for room for `count` units. A larger count than the limit takes all of it."""
        waiting = asyncio.get_running_loop().create_future()
        self._queue.put(user, (count, waiting))
        self._admit()
        try:
            await waiting
        except asyncio.CancelledError:
            self.release(0 if waiting.cancelled() else count)
            raise

    def release(self, count: int) -> None:
        self._used -= count
        self._admit()

    @asynccontextmanager
    async def taken(self, count: int, user: str = "") -> AsyncGenerator[None, None]:
        """Waits for room, and frees it at the end."""
        await self.take(count, user)
        try:
            yield
        finally:
            self.release(count)

    def _admit(self) -> None:
        while self._queue:
            count, waiting = self._queue.next
            if not waiting.cancelled():
                if self._used and self._used + count > self._size():
                    return
                self._used += count
                waiting.set_result(None)
            self._queue.get()
