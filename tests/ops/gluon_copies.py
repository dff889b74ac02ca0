"""Asynchronous copies of a partition's threads (cp.async), for gluon_interpreter.py."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .gluon_memory import Shared
from .gluon_programs import Access, Actor, Barrier, Partition, VectorClock
from .gluon_values import MEMORY, Pointer


@dataclass
class Arrival:
    """The arrival of all threads at a barrier that waits for copies.

    Attributes:
        time: that of the last copy that it waits for.
        phase: the barrier's phase when the kernel has asked for it.
        access: what the arrival publishes.
    """

    time: int
    barrier: Barrier
    phase: int
    count: int
    access: Access


class Copies(Actor):
    """The asynchronous copies of a partition. The time of a copy is its number, from 1.

    Attributes:
        clock: what is ordered before the last copy.
        in_flight: times of the copies that have not ended.
        groups: the time of each group's last copy.
        arrivals: those that wait for copies.
    """

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition.program, f"a copy of {partition}")
        self.partition, self.clock = partition, VectorClock()
        self.in_flight: list[int] = []
        self.groups: list[int] = []
        self.arrivals: list[Arrival] = []

    @classmethod
    def of(cls, partition: Partition) -> "Copies":
        partition.copies = partition.copies or cls(partition)
        return partition.copies

    @property
    def completed(self) -> int:
        """All copies until this time have ended."""
        return min(self.in_flight, default=self.num_issued + 1) - 1

    def wait_group(self, num_outstanding: int) -> None:
        """Wait for all groups but the last ones."""
        ended = self.groups[: max(len(self.groups) - num_outstanding, 0)]
        time = ended[-1] if ended else 0
        self.program.event((self, time - 1))
        times = self.partition.clock.times[0]
        times[self.number] = max(times[self.number], time)

    def arrive(self, barrier: Barrier) -> None:
        """Let each thread arrive when its copies have ended.

        What the arrival publishes are these copies, and what is ordered before the last of them.
        The issuing partition does not know that the arrival has happened until it waits for it.
        """
        count, clock, now = self.partition.warps * 32, VectorClock(), self.partition.clock
        barrier.check_phase(f"too many arrivals: {count} at")
        clock.merge(self.clock)
        clock.times[0, self.number] = self.num_issued
        clock.arrivals |= now.arrivals
        clock.phases |= now.phases
        place = self.num_issued, barrier, barrier.completed, count
        self.arrivals.append(Arrival(*place, Access(self, clock)))
        self.end_arrivals()

    def end_arrivals(self) -> None:
        """Arrive where no copies are missing."""
        ready = [arrival for arrival in self.arrivals if arrival.time <= self.completed]
        for arrival in ready:
            self.arrivals.remove(arrival)
            barrier, by = arrival.barrier, arrival.access
            if barrier.completed != arrival.phase or barrier.pending_count < arrival.count:
                self.program.fault(f"too many arrivals: {arrival.count} at {barrier}", by)
            barrier.gathered.merge(by.clock)
            barrier.gathered.arrivals[barrier.name, self.number] += arrival.count
            barrier.pending_count -= arrival.count
            barrier.end_phase(by)


class AsyncCopy:
    """A copy in flight. It ends at any moment from its issue on; then its bytes are there.

    It is ordered after all that its issue is ordered after, and before a wait for its group or
    its arrival. It writes through the generic proxy. Masked elements are 0.
    """

    def __init__(self, copies: Copies, memory: Shared, pointer: Pointer, mask: Any) -> None:
        self.copies, self.memory, self.dtype = copies, memory, pointer.dtype.element_ty
        self.source, self.numbers, self.mask = pointer.elements(mask)
        if (memory.dtype, memory.shape) != (self.dtype, self.mask.shape):
            to = f"{memory.memory.name}, {memory.dtype} {memory.shape}"
            memory.program.fault(f"copy of {self.dtype} {self.mask.shape} to {to}")
        copies.clock.merge(copies.partition.clock)
        clock = VectorClock()
        clock.merge(copies.clock)
        self.access = Access(copies, clock)
        copies.places.append(self.access.place)
        copies.num_issued += 1
        self.time = copies.num_issued
        copies.in_flight.append(self.time)

    def finish(self) -> None:
        """Write the bytes, and arrive where no other copy is missing."""
        data = np.zeros(self.memory.shape, MEMORY[self.dtype.name])
        data[self.mask] = self.source[self.numbers]
        self.memory.check_write(self.access)
        self.memory.write(data, self.access, self.time)
        self.copies.in_flight.remove(self.time)
        self.copies.end_arrivals()
