"""Logs a warning if the model accepts far fewer drafts than before. No torch."""

import logging

# Compare windows of this many drafts. At an acceptance rate of one half, a window's rate has a
# standard deviation of about 1%, so a fall to half is no coincidence.
WINDOW_DRAFTS = 4096
# The running mean of a position covers about this many windows.
WINDOWS = 16
FELL_TO = 0.5
# Log at most one line in this many seconds.
INTERVAL_SECONDS = 600.0

logger = logging.getLogger(__name__)


class AcceptanceWatch:
    """Compares the accepted drafts of a window with the running mean of each draft's position.

    The comparison by position makes the number of drafts irrelevant, which "auto" changes.
    """

    def __init__(self, max_drafts: int) -> None:
        self._means = [0.0] * max_drafts
        self._weights = [0] * max_drafts
        self._proposed, self._accepted = [0] * max_drafts, [0] * max_drafts
        self._logged: float | None = None

    def record_verified(self, num_proposed: int, num_accepted: int, now: float) -> None:
        """Record the verification of a sequence's drafts at the time `now` (time.monotonic())."""
        for position in range(num_proposed):
            self._proposed[position] += 1
            self._accepted[position] += position < num_accepted
        if num_proposed and sum(self._proposed) >= WINDOW_DRAFTS:
            self._end_window(now)

    def _end_window(self, now: float) -> None:
        pairs = list(zip(self._proposed, self._means, self._weights, strict=True))
        known = sum(proposed for proposed, _, weight in pairs if weight)
        expected = sum(proposed * mean for proposed, mean, weight in pairs if weight)
        accepted = sum(
            count for count, weight in zip(self._accepted, self._weights, strict=True) if weight
        )
        if accepted < FELL_TO * expected and (
            self._logged is None or now >= self._logged + INTERVAL_SECONDS
        ):
            self._logged = now
            logger.warning(
                "the model accepted %.0f%% of the last %d drafts, and %.0f%% on average before",
                100 * accepted / known,
                known,
                100 * expected / known,
            )
        for position, proposed in enumerate(self._proposed):
            if proposed:
                weight = self._weights[position] = min(WINDOWS, self._weights[position] + 1)
                share = self._accepted[position] / proposed
                self._means[position] += (share - self._means[position]) / weight
        self._proposed, self._accepted = [0] * len(self._means), [0] * len(self._means)
