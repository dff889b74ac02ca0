"""Reads between servers of one process, in place of NIXL (engine/store/nixl_reads.py)."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

MEMORIES: dict[bytes, memoryview] = {}


class DirectReads:
    """Copies from another instance's memory (peers.RemoteReads has the contract).

    Attributes:
        before: is called with the address of each read; while it returns True, the read goes on
            without a result, as if the other host was silent. It copies when that ends.
        fails: reads end without success.
        damages: reads change one bit.
        advances: how often peers' reads were let make progress.
    """

    address = 1000

    def __init__(self, memory: memoryview, *, loopback: bool = True) -> None:
        self.memory, self.loopback = memory, loopback
        self.metadata = f"reads {len(MEMORIES)}".encode()
        MEMORIES[self.metadata] = memory
        self.before: Callable[[int], bool] = lambda address: False
        self.fails = self.damages = False
        self.advances = 0

    def connect(self, metadata: bytes) -> bytes:
        if metadata not in MEMORIES:
            raise ConnectionError("unknown memory")
        return metadata

    def read(
        self, remote: bytes, address: int, offset: int, size: int
    ) -> Callable[[], bool | None]:
        state: list[bool] = []
        first = address - self.address

        def ended() -> bool | None:
            if not state:
                if self.before(address):
                    return None
                self.memory[offset : offset + size] = MEMORIES[remote][first : first + size]
                self.memory[offset] ^= self.damages
                state.append(not self.fails)
            return state[0]

        return ended

    def advance(self) -> None:
        self.advances += 1


def replace_nixl(monkeypatch: pytest.MonkeyPatch) -> list[DirectReads]:
    """Let engines use DirectReads; returns the instances that they will have made."""
    made: list[DirectReads] = []

    def make(*args: Any, **options: Any) -> DirectReads:
        made.append(DirectReads(*args, **options))
        return made[-1]

    module = ModuleType("finwhale.engine.store.nixl_reads")
    module.NixlReads = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made
