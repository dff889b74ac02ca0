"""Says so when the engine takes absurdly long over a step."""

import asyncio
import logging
import time

from finwhale.server.client import EngineClient

logger = logging.getLogger(__name__)


async def watch(client: EngineClient, stall_timeout_s: float) -> None:
    """Runs until cancelled: once for each stall, has the engine write its stacks to the log."""
    told = False
    while True:
        await asyncio.sleep(min(1.0, stall_timeout_s / 4))
        silent = time.monotonic() - client.last_report
        stalled = client.num_sequences > 0 and silent > stall_timeout_s
        if stalled and not told:
            logger.error("engine stalled", extra={"silent_s": round(silent, 1)})
            client.dump_stacks()
        told = stalled
