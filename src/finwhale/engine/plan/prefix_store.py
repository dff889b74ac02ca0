"""The interface to a store that keeps the prefix cache's rows outside the device. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

RecordKind = Literal["block", "state"]


class Record(NamedTuple):
    """The name of what the store keeps: the pages of a block, or of the state at its end.

    Attributes:
        key: the block's key (PrefixIndex.extend_keys), which depends on the owner.
        owner: PrefixIndex.owner_key.
    """

    key: bytes
    kind: RecordKind
    owner: bytes = b""


@dataclass(frozen=True, slots=True)
class StoreName:
    """What servers with one store have in common.

    Attributes:
        path: the directory.
        fingerprint: only servers with the same one find each other's records.
        about: what it stands for.
    """

    path: str
    fingerprint: str
    about: Mapping[str, str]


@dataclass(slots=True)
class StoreCounts:
    """What an engine's store has done since the start.

    Attributes:
        loads: loads that added blocks to the cache.
        loaded_tokens: the tokens of these blocks.
        read_blocks: blocks that were read, whether or not their load was complete.
        read_bytes, written_bytes: of whole records.
        read_seconds: the time in which at least one record was being read.
        skipped: saves that did not begin, because too many others were on their way.
        failed: records that could not be read or written.
        evicted: records that this engine removed because the store was full.
    """

    loads: int = 0
    loaded_tokens: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    skipped: int = 0
    failed: int = 0
    evicted: int = 0


class PrefixStore(Protocol):
    """Keeps records of bytes. Any failure is a miss: no method raises, and several threads may call
    it at once. Records never change.
    """

    def contains(self, records: Sequence[Record]) -> list[bool]:
        """Which records the store has. This counts as a use of them, and of the first as the last
        one, so a store with too little room drops a block before its parent.
        """

    def read(self, record: Record, into: memoryview) -> bool:
        """Fill `into` with a record of exactly its length; False: the store does not have it."""

    def write(self, record: Record, content: memoryview) -> bool:
        """Keep a record; False: the store could not."""

    def close(self) -> None:
        """End the store's own work. No call may follow."""
