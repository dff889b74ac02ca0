"""A queue that takes turns between users."""

from collections import OrderedDict, deque
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
