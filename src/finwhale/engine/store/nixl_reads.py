"""Reads of another process's memory over NIXL: RDMA, shared memory or TCP. Needs the extra "nixl".

NIXL's progress thread polls without a pause, so an idle server would use a whole core. Without it,
transfers make progress in the calls of this class, on both sides.
"""

import ctypes
import logging
import os
import secrets
import threading
from collections.abc import Callable

from finwhale.errors import ResourceError
from finwhale.extras import named_extras

os.environ.setdefault("UCX_LOG_FILE", "stderr")  # instead of stdout
with named_extras():
    from nixl_cu13 import _bindings, nixl_agent, nixl_agent_config, nixl_thread_sync_t

_log = logging.getLogger("nixl")  # the import gave it a handler that writes to stdout
_log.handlers.clear()
_log.propagate = True
_log.setLevel(logging.WARNING)
# They have no base class of their own.
ERRORS = tuple(
    kind
    for kind in vars(_bindings).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
)


class NixlReads:
    """Reads into this process's registered memory (peers.RemoteReads has the contract).

    Raises:
        ResourceError: NIXL finds no network, or cannot register the memory.

    Args:
        loopback: UCX listens on the loopback interface alone, unless UCX_NET_DEVICES is set.
    """

    def __init__(self, memory: memoryview, *, loopback: bool) -> None:
        if loopback:
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl_agent_config(enable_prog_thread=False, sync_mode=strict, backends=["UCX"])
        self._memory = ctypes.c_char.from_buffer(memory)  # keeps the memory alive
        self.address = ctypes.addressof(self._memory)
        try:
            self._agent = nixl_agent(secrets.token_hex(8), config)
            self._agent.register_memory([(self.address, memory.nbytes, 0, "")], "DRAM")
        except ERRORS as error:
            raise ResourceError(f"NIXL cannot be used: {error}") from None
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._remotes: dict[bytes, bytes] = {}  # names by metadata
        self._mutex = threading.Lock()

    def connect(self, metadata: bytes) -> bytes:
        with self._mutex:
            try:
                if metadata not in self._remotes:
                    self._remotes[metadata] = self._agent.add_remote_agent(metadata)
            except ERRORS as error:
                raise ConnectionError(f"NIXL: {error}") from None
            return self._remotes[metadata]

    def read(
        self, remote: bytes, address: int, offset: int, size: int
    ) -> Callable[[], bool | None]:
        agent, state = self._agent, "ERR"
        try:
            here = agent.get_xfer_descs([(self.address + offset, size, 0)], "DRAM")
            there = agent.get_xfer_descs([(address, size, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", here, there, remote)
            state = agent.transfer(handle)
        except ERRORS:
            self._forget(remote)

        def ended() -> bool | None:
            nonlocal state
            if state == "PROC":
                try:
                    state = agent.check_xfer_state(handle)
                except ERRORS:
                    state = "ERR"
                    self._forget(remote)
            return None if state == "PROC" else state == "DONE"

        return ended

    def advance(self) -> None:
        self._agent.get_new_notifs()

    def _forget(self, remote: bytes) -> None:
        """Let the next `connect` begin anew: a connection that has failed stays so."""
        with self._mutex:
            if remote in self._remotes.values():
                self._remotes = {m: name for m, name in self._remotes.items() if name != remote}
                self._agent.remove_remote_agent(remote)
