"""Limits how often the log gets the same message, so that no client can fill the log."""

import time

INTERVAL_S = 60.0


class RepeatedMessages:
    """Lets each message pass once in INTERVAL_S."""

    def __init__(self) -> None:
        self._passed: dict[str, tuple[float, int]] = {}

    def left_out(self, message: str) -> int | None:
        """How often a message was left out since it passed; None: leave it out, too."""
        now = time.monotonic()
        before, count = self._passed.get(message, (-INTERVAL_S, 0))
        passes = now - before >= INTERVAL_S
        self._passed[message] = (now, 0) if passes else (before, count + 1)
        return count if passes else None
