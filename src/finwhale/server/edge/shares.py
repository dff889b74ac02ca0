"""Shares of what all users have together, so that no user shuts out another."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from finwhale.errors import QueueFullError


class Shares:
    """Counts the units that each user has of a limited number.

    A user's units may exceed the free ones by at most one. Alone, a user thus gets about half of
    all units; beside one other user who takes as many, about a third. No user gets the last unit,
    except as its first. While all units are free, a user may take any number at once. The rule is
    that of dynamic queue length thresholds in switches (Choudhury and Hahne, 1998).

    Users are those of `listening.user_of`, and the identities of API keys.

    Args:
        units: what is counted, for the errors.
        size: the number of units.
        shared: as long as all users together have no more units than this, any of them may have
            them all, for example as many sequences as run at once.
        error: makes the error from its message.
    """

    def __init__(
        self,
        units: str,
        size: Callable[[], int],
        shared: Callable[[], int] = lambda: 0,
        error: Callable[[str], Exception] = QueueFullError,
    ) -> None:
        self.total = 0
        self._units, self._size, self._shared, self._error = units, size, shared, error
        self._taken: Counter[str] = Counter()

    def check(self, user: str, count: int = 1) -> None:
        """Raises the error if a user may not have `count` more units now."""
        size, total, own = self._size(), self.total + count, self._taken[user] + count
        if total > size:
            raise self._error(
                f"the server is full: {self.total} of {size} {self._units}; try again"
            )
        share = size - total + 1 + max(0, self._shared() - (total - own))
        if self.total and own > share:
            raise self._error(
                f"your share is full: {own - count} of {size} {self._units} are yours, and others "
                "need the rest; try again"
            )

    def add(self, user: str, count: int = 1) -> None:
        """Counts `count` more units of a user, without a check; fewer if it is negative."""
        self.total += count
        self._taken[user] += count
        if not self._taken[user]:
            del self._taken[user]

    @contextmanager
    def taken(self, user: str, count: int = 1) -> Iterator[None]:
        """Gives a user `count` units until the end. Raises the error, as `check` does."""
        self.check(user, count)
        self.add(user, count)
        try:
            yield
        finally:
            self.add(user, -count)
