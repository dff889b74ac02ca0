"""A short soak; `soak.py` says how to run a long one."""

import asyncio
import os
from collections.abc import Callable

from .running import RunningServer
from .soak import Soak
from .test_limits import wait_until


def test_nothing_is_lost_or_crossed(start: Callable[..., RunningServer]) -> None:
    server = start(max_queue=24)
    seconds = float(os.environ.get("FINWHALE_SOAK_SECONDS", "1"))
    report = asyncio.run(Soak(server.url, "demo", seed=1, kinds=5).run(clients=64, seconds=seconds))
    assert not report.wrong, report.wrong[0]
    for kind in ("answered", "left", "malformed", "hostile", "429"):
        assert report.counts[kind] > 0, report.counts
    assert report.longest_pause_s > 0  # how long it may be is for a machine with nothing else to do
    wait_until(lambda: server.client.num_sequences == 0)
    wait_until(lambda: server.live()["running"] == server.live()["waiting"] == 0)
