"""A message ring in shared memory: one process writes, and several processes read every message.

The ring needs no lock: the writer owns the head, and each reader owns its tail and its heartbeat
counter. The memory has no name, so it is freed with the last process that maps it.
"""

import mmap
import os
import time
from collections.abc import Callable

CAPACITY = 1 << 24
_HEADER_BYTES = 4096
_LINE = 8  # words of a cache line; each counter has a line of its own
_HEAD = 0
_LENGTH_BYTES = 8

# A reader that finds no message polls SPINS times, then sleeps between polls: for NAP_S at first,
# and for IDLE_NAP_S once it has waited IDLE_AFTER_S.
SPINS = 200
NAP_S, IDLE_NAP_S, IDLE_AFTER_S = 50e-6, 1e-3, 0.5


class Ring:
    """One process's view of the ring.

    Each counter is one aligned word, which a process stores atomically. x86-64 keeps the order of
    stores, so a reader that sees the new head also sees the bytes before it.

    Args:
        file: descriptor of the shared memory.
        readers: number of reading processes.
        reader: the number of this process among them, if it reads.
    """

    def __init__(self, file: int, readers: int, reader: int = 0) -> None:
        self.file, self.readers, self._reader = file, readers, reader
        self._map = mmap.mmap(file, 0)
        view = memoryview(self._map)
        self._words = view[:_HEADER_BYTES].cast("Q")
        self._data = view[_HEADER_BYTES:]
        self._capacity = len(self._data)
        self._head = 0  # used by the writer
        self._tail = 0  # used by a reader

    @classmethod
    def create(cls, readers: int, capacity: int = CAPACITY) -> "Ring":
        """Allocate a ring. Child processes inherit its descriptor only by `pass_fds`."""
        file = os.memfd_create("finwhale-plans")
        os.ftruncate(file, _HEADER_BYTES + capacity)
        return cls(file, readers)

    def write(self, message: bytes, wait: Callable[[], None]) -> None:
        """Append a message for every reader. The ring may be smaller than the message.

        Args:
            wait: called whenever the slowest reader leaves no room; it may raise.
        """
        frame = memoryview(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
        while frame:
            slowest = min(self._words[self._tail_of(i)] for i in range(self.readers))
            room = self._capacity - (self._head - slowest)
            if not room:
                wait()
                continue
            begin = self._head % self._capacity
            count = min(len(frame), room, self._capacity - begin)
            self._data[begin : begin + count] = frame[:count]
            self._head += count
            self._words[_HEAD] = self._head
            frame = frame[count:]

    def read(self) -> bytes:
        """Wait for this reader's next message, and remove it."""
        return self._take(int.from_bytes(self._take(_LENGTH_BYTES), "little"))

    def _take(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            present = self._wait() - self._tail
            begin = self._tail % self._capacity
            length = min(count, present, self._capacity - begin)
            parts.append(bytes(self._data[begin : begin + length]))
            self._tail += length
            self._words[self._tail_of(self._reader)] = self._tail
            count -= length
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wait(self) -> int:
        """Wait until the head is past this reader's tail; returns the head."""
        words, tail = self._words, self._tail
        for _ in range(SPINS):
            if words[_HEAD] != tail:
                return words[_HEAD]
        naps = 0
        while words[_HEAD] == tail:
            idle = naps * NAP_S > IDLE_AFTER_S
            naps += 1
            time.sleep(IDLE_NAP_S if idle else NAP_S)
        return words[_HEAD]

    def beat(self) -> None:
        """Count one heartbeat of this reader."""
        self._words[self._beat_of(self._reader)] += 1

    def beats(self, reader: int) -> int:
        """Number of a reader's heartbeats so far."""
        return self._words[self._beat_of(reader)]

    def _tail_of(self, reader: int) -> int:
        return _LINE * (1 + reader)

    def _beat_of(self, reader: int) -> int:
        return _LINE * (1 + self.readers + reader)
