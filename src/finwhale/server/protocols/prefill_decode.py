"""`kv_transfer_params`: what a router passes between prefill and decode servers.

Both kinds of servers use one prefix store. A prefill server answers when the store has the prompt,
and names the store; a decode server finds the prompt in its own store as in any other request.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

from finwhale.engine.plan.prefix_store import StoreName
from finwhale.engine.store.directory import descriptions, differing
from finwhale.errors import RequestError
from finwhale.server.observe.logs import RequestLog
from finwhale.server.protocols.schemas import SamplingBody
from finwhale.server.state import ServerState

logger = logging.getLogger(__name__)


def take_transfer(state: ServerState, body: SamplingBody, log: RequestLog) -> None:
    """Notes what a body asks for. The first one whose prompt is in another store is logged.

    Raises:
        RequestError: the server has no store, or a prefill request wants a stream.
    """
    asked = body.kv_transfer_params
    if asked is None:
        return
    mine = state.ready.prefix_store
    if mine is None:
        raise RequestError("kv_transfer_params needs a server with --prefix-store")
    if asked.do_remote_decode and body.stream:
        raise RequestError("do_remote_decode is not available in streams")
    log.saves_first = asked.do_remote_decode
    theirs = asked.prefix_store
    if theirs not in (None, mine.fingerprint) and not state.told_of_other_store:
        state.told_of_other_store = True
        asyncio.get_running_loop().run_in_executor(None, _report, mine, theirs)


def _report(mine: StoreName, theirs: str) -> None:
    about = descriptions(Path(mine.path)).get(theirs)
    why = "it is not in this server's directory"
    if about is not None:
        why = "the servers differ in: " + ", ".join(differing(mine.about, about))
    logger.warning("a prefill server has another prefix store, whose prompts are lost: %s", why)


def transfer_fields(state: ServerState, log: RequestLog) -> dict[str, Any]:
    """The field of a prefill server's answer that the router passes on; empty: no prefill."""
    store = state.ready.prefix_store
    if store is None or not log.saves_first:
        return {}
    found = {"do_remote_prefill": True, "do_remote_decode": False}
    return {"kv_transfer_params": {**found, "prefix_store": store.fingerprint}}
