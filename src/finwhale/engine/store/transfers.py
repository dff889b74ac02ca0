"""Moves records between a prefix store and pages of the device, through a staging buffer.

Threads read and write the store's files. Only the engine's thread calls these classes and launches
copies, so all ranks see copies and steps in one order. A record has the pages of its groups, one
after the other, in the order of the groups.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

from finwhale.engine.plan.executor import PendingCopies
from finwhale.engine.plan.prefix_index import State
from finwhale.engine.plan.prefix_store import PrefixStore, Record, RecordKind, StoreCounts
from finwhale.engine.plan.step_plan import PageCopy

# Threads hand Python's lock to each other at every call of the operating system. So a thread gets
# several records at once, and a store should make few calls for each.
THREADS, TOGETHER = 8, 8
# Saves may take this share of the slots. A save that finds no slot is given up.
SAVE_SHARE = 1 / 2


@dataclass(slots=True, eq=False)
class RecordTransfer:
    """A record on its way (plan/stored_prefixes.py has the contract of `done` and `failed`).

    Attributes:
        offset: of the record in the staging buffer.
        file: whether the store has read or written it; None: it has not ended.
    """

    record: Record
    pages: State
    load: bool
    offset: int = -1
    file: bool | None = None
    done: bool = False
    failed: bool = False


class StoreTransfers:
    """The records on their way between a store and an engine.

    Args:
        copy: launches copies, after all steps that were launched before.
        buffer: the staging buffer, which all ranks share.
        page_bytes: bytes of a page, by group.
        slots: the offsets in the buffer at which records of a kind may lie.

    Attributes:
        counts: of what this class counts.
    """

    def __init__(
        self,
        store: PrefixStore,
        copy: Callable[[Sequence[PageCopy]], PendingCopies],
        buffer: memoryview,
        page_bytes: Mapping[str, int],
        slots: Mapping[RecordKind, Sequence[int]],
        counts: StoreCounts | None = None,
    ) -> None:
        self._store, self._copy, self._buffer = store, copy, buffer
        self.counts = counts or StoreCounts()
        self._reading, self._reading_since = 0, 0.0
        self._mutex = threading.Lock()
        self._page_bytes = page_bytes
        self._threads = ThreadPoolExecutor(THREADS, "prefix-store")
        self._finder = ThreadPoolExecutor(1, "prefix-store-find")
        self._free = {kind: list(offsets) for kind, offsets in slots.items()}
        # How many slots of each kind saves may still take.
        self._for_saves = {kind: max(1, int(len(s) * SAVE_SHARE)) for kind, s in slots.items()}
        self._waiting: deque[RecordTransfer] = deque()  # loads that have no slot yet
        self._to_copy: list[RecordTransfer] = []
        self._copies: list[tuple[PendingCopies, list[RecordTransfer]]] = []
        self._files: list[RecordTransfer] = []  # that threads read or write

    def find(self, records: Sequence[Record]) -> "Future[list[bool]]":
        return self._finder.submit(self._find, records)

    def _find(self, records: Sequence[Record]) -> list[bool]:
        """A store that lacks the first record has none of use."""
        if not all(self._store.contains(records[:1])):
            return [False] * len(records)
        return self._store.contains(records)

    def load(self, record: Record, pages: State) -> RecordTransfer:
        transfer = RecordTransfer(record, pages, load=True)
        self._waiting.append(transfer)
        return transfer

    def save(self, record: Record, pages: State) -> RecordTransfer | None:
        free = self._free[record.kind]
        if not free or not self._for_saves[record.kind]:
            return None
        self._for_saves[record.kind] -= 1
        transfer = RecordTransfer(record, pages, load=False, offset=free.pop())
        self._to_copy.append(transfer)
        return transfer

    def saving(self, keys: Collection[bytes]) -> bool:
        copied = (transfer for _, transfers in self._copies for transfer in transfers)
        moving = (*self._to_copy, *copied, *self._files)
        return any(not transfer.load and transfer.record.key in keys for transfer in moving)

    def advance(self) -> None:
        copied = [transfers for pending, transfers in self._copies if pending.done()]
        for transfer in chain.from_iterable(copied):
            transfer.done = True
            if transfer.load:
                self._free_slot(transfer)
        self._begin_files([t for t in chain.from_iterable(copied) if not t.load])
        self._copies = [(p, transfers) for p, transfers in self._copies if not transfers[0].done]
        under_way, self._files = self._files, []
        for transfer in under_way:
            if transfer.file is None:
                self._files.append(transfer)
            elif transfer.load and not transfer.done and transfer.file:
                self._to_copy.append(transfer)
            else:
                transfer.failed |= not transfer.file
                transfer.done = True
                self.counts.failed += not transfer.file
                self._free_slot(transfer)
        if self._to_copy:
            copies = [copy for transfer in self._to_copy for copy in self._copies_of(transfer)]
            self._copies.append((self._copy(copies), self._to_copy))
            self._to_copy = []
        begun = []
        while self._waiting and self._free[self._waiting[0].record.kind]:
            begun.append(self._waiting.popleft())
            begun[-1].offset = self._free[begun[-1].record.kind].pop()
        self._begin_files(begun)

    def give_up_loads(self) -> None:
        """Let the loads whose files are not read yet fail now. A read that hangs keeps its slot."""
        for transfer in (*self._waiting, *self._files):
            if transfer.load:
                transfer.failed = transfer.done = True
        self._waiting.clear()

    def _begin_files(self, transfers: Sequence[RecordTransfer]) -> None:
        """Let the threads read or write the files of transfers, which all load or all save."""
        self._files += transfers
        size = max(1, min(TOGETHER, -(-len(transfers) // THREADS)))
        for first in range(0, len(transfers), size):
            some = transfers[first : first + size]
            self._threads.submit(self._read if some[0].load else self._write, some)

    def _write(self, transfers: Sequence[RecordTransfer]) -> None:
        for transfer in transfers:
            transfer.file = self._store.write(transfer.record, self._place(transfer))

    def _read(self, transfers: Sequence[RecordTransfer]) -> None:
        with self._mutex:
            if not self._reading:
                self._reading_since = time.monotonic()
            self._reading += 1
        num_bytes = num_blocks = 0
        for transfer in transfers:
            place = self._place(transfer)
            found = self._store.read(transfer.record, place)
            num_bytes += len(place) * found
            num_blocks += found and transfer.record.kind == "block"
            if not found:  # a failure, such as a peer's, says nothing about the speed
                self._reading_since = time.monotonic()
            transfer.file = found
        with self._mutex:
            self._reading -= 1
            if not self._reading:
                self.counts.read_seconds += time.monotonic() - self._reading_since
            self.counts.read_bytes += num_bytes
            self.counts.read_blocks += num_blocks

    def _place(self, transfer: RecordTransfer) -> memoryview:
        size = sum(self._page_bytes[name] * len(p) for name, p in transfer.pages.items())
        return self._buffer[transfer.offset : transfer.offset + size]

    def _copies_of(self, transfer: RecordTransfer) -> list[PageCopy]:
        found, offset = [], transfer.offset
        for name, pages in transfer.pages.items():
            for page in pages:
                found.append(PageCopy(name, page, offset, transfer.load))
                offset += self._page_bytes[name]
        return found

    def _free_slot(self, transfer: RecordTransfer) -> None:
        self._free[transfer.record.kind].append(transfer.offset)
        if not transfer.load:
            self._for_saves[transfer.record.kind] += 1

    def close(self) -> None:
        """Wait for the files that are being written; loads and other saves are given up."""
        self._finder.shutdown()
        self._threads.shutdown()
        self._store.close()
