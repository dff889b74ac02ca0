"""The log line about drafts that the model no longer accepts."""

import pytest

from finwhale.engine.loop.acceptance_watch import (
    INTERVAL_SECONDS,
    WINDOW_DRAFTS,
    AcceptanceWatch,
)


def play(watch: AcceptanceWatch, windows: int, accepted: float, drafts: int, now: float) -> None:
    """Verify `drafts` drafts at a time; this share of the verifications accepts all of them."""
    debt = 0.0
    for _ in range(windows * WINDOW_DRAFTS // drafts):
        debt += accepted
        right = debt >= 1
        debt -= right
        watch.record_verified(drafts, drafts * right, now)


def test_a_fall_is_logged_once_in_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch(4)
    play(watch, 3, 0.8, 4, 0.0)
    play(watch, 1, 0.5, 4, 0.0)
    assert not caplog.records
    play(watch, 2, 0.2, 4, 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "the model accepted 20% of the last 4096 drafts, and 72% on average before"
    ]
    play(watch, 20, 0.8, 4, 2.0)
    play(watch, 1, 0.1, 4, 3.0)
    assert len(caplog.records) == 1
    play(watch, 20, 0.8, 4, 2.0)
    play(watch, 1, 0.1, 4, 2.0 + INTERVAL_SECONDS)
    assert len(caplog.records) == 2


def test_more_drafts_are_no_fall(caplog: pytest.LogCaptureFixture) -> None:
    """Later drafts are accepted less often. Verifying more of them is no reason for a line."""
    watch = AcceptanceWatch(4)
    for _ in range(3 * WINDOW_DRAFTS):
        watch.record_verified(1, 1, 0.0)
    for _ in range(WINDOW_DRAFTS):
        watch.record_verified(4, 1, 0.0)
    assert not caplog.records
    for _ in range(WINDOW_DRAFTS):
        watch.record_verified(4, 0, 0.0)
    assert len(caplog.records) == 1
