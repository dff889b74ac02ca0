"""Programs of partitions, mbarriers and loads in flight, for gluon_interpreter.py."""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from .gluon_values import KernelFault, kernel_line

MAX_PARTITIONS = 16  # of a program
MAX_ACTORS = 64  # partitions, their copies, and barriers that TMA loads signal
TMA = MAX_PARTITIONS  # stands for the TMA loads and asynchronous copies in a schedule
IN_FLIGHT = np.iinfo(np.int32).max  # the time of an MMA's reads before the wait for it


class Schedule:
    """Chooses which partition goes on, or that a TMA load or a copy ends, the same in every run.

    first: partitions, by their numbers in the list of gl.warp_specialize, that go on whenever they
    can, the first one first. TMA among them: loads and copies end at once; all partitions but not
    TMA: they end when no partition can go on. The others are drawn with weights that differ
    between programs.
    """

    def __init__(self, seed: int = 0, first: Sequence[int] = ()) -> None:
        self.random, self.first = random.Random(seed), first

    def begin(self) -> None:
        self.weights = [self.random.random() ** 3 + 0.01 for _ in range(MAX_PARTITIONS + 1)]

    def choose(self, runnable: Sequence["Partition"], loads: list[Any]) -> "Partition | None":
        """None: one of the loads ends, which `choose_load` chooses."""
        choices = {partition.index: partition for partition in runnable}
        numbers = [*choices, TMA] if loads else [*choices]
        for index in self.first:
            if index in numbers:
                return choices.get(index)
        weights = [self.weights[index] for index in numbers]
        return choices.get(self.random.choices(numbers, weights)[0])

    def choose_load(self, loads: list[Any]) -> Any:
        return loads.pop(self.random.randrange(len(loads)))


class VectorClock:
    """A vector clock: the accesses and arrivals that came before, whatever the schedule is.

    MMAs and TMA loads access shared memory through the async proxy, others through the generic one.

    Attributes:
        times: [0,a]: the last access of actor a that has happened before; [1,a]: the last one that
            the async proxy sees: that of a TMA load, or one before any partition's fence.
        arrivals: the number of arrivals by (barrier, partition).
        phases: the number of phases of each barrier that have ended.
    """

    def __init__(self) -> None:
        self.times = np.zeros((2, MAX_ACTORS), np.int32)
        self.arrivals: Counter[tuple[str, int]] = Counter()
        self.phases: Counter[str] = Counter()

    def merge(self, other: "VectorClock") -> None:
        np.maximum(self.times, other.times, out=self.times)
        self.arrivals |= other.arrivals
        self.phases |= other.phases


class Actor:
    """What accesses shared memory: a partition, its copies, or the TMA loads of one barrier.

    Attributes:
        num_issued: number of TMA loads or copies, also of those in flight.
        number: its number in the program; 0 is the code around gl.warp_specialize.
        places: the kernel's line of each access, by time.
    """

    def __init__(self, program: "Program", name: str) -> None:
        self.program, self.name, self.number = program, name, len(program.actors)
        assert self.number < MAX_ACTORS, f"the emulator has clocks for {MAX_ACTORS} actors"
        self.num_issued, self.places = 0, [""]
        program.actors.append(self)

    def __str__(self) -> str:
        return self.name


@dataclass
class Access:
    """An access to shared memory: by whom, what it is ordered after, and the kernel's line."""

    actor: Actor
    clock: VectorClock
    place: str = field(default_factory=kernel_line)

    def __str__(self) -> str:
        return f"{self.actor}, {self.place}"


class Partition(Actor):
    """A group of warps, which runs in a thread of its own.

    Attributes:
        index: its number in the list of gl.warp_specialize.
        pending: MMAs that it has not waited for.
        copies: its asynchronous copies, a `Copies`, if there have been any.
        waits_for: a barrier and the number of a phase, or its copies and the time before a copy.
    """

    def __init__(self, program: "Program", name: str, index: int, warps: int) -> None:
        super().__init__(program, f"partition {name}")
        self.index, self.warps = index, warps
        self.clock = VectorClock()
        self.pending: list[Any] = []
        self.copies: Any = None
        self.waits_for: tuple[Any, int] | None = None
        self.turn = threading.Semaphore(0)

    def tick(self) -> int:
        """The time of a new access."""
        self.clock.times[0, self.number] += 1
        self.places.append(kernel_line())
        return len(self.places) - 1

    def can_run(self) -> bool:
        return self.waits_for is None or self.waits_for[0].completed > self.waits_for[1]

    def end(self) -> None:
        if self.pending:
            self.program.fault(f"ends with {len(self.pending)} MMAs that it has not waited for")


class Stopped(BaseException):
    """Ends the other threads of a program after a fault."""


class Program:
    """One program of a launch.

    Its partition `current` runs; the partitions `live` have not ended. `loads` are the TMA loads
    and the asynchronous copies in flight.
    """

    def __init__(self, ids: tuple[int, ...], schedule: Schedule, warps: int) -> None:
        self.ids, self.schedule = ids, schedule
        self.actors: list[Actor] = []
        self.loads: list[Any] = []
        self.barriers: dict[str, Barrier] = {}
        self.names: Counter[str] = Counter()
        self.error: BaseException | None = None
        self.current = Partition(self, "before warp_specialize", 0, warps)
        self.live = [self.current]
        schedule.begin()

    def fault(self, text: str, by: Access | None = None) -> NoReturn:
        """`by`: what does it, if not the current partition."""
        who = by or Access(self.current, self.current.clock)
        raise KernelFault(f"program {self.ids}, {who}: {text}")

    def event(self, waits_for: tuple[Any, int] | None = None) -> None:
        """Let the schedule choose which partition goes on; return when it is the caller's turn."""
        me = self.current
        me.waits_for = waits_for
        self.current = self.choose()
        if self.current is not me:
            self.current.turn.release()
            me.turn.acquire()
            if self.error is not None:
                raise Stopped
        me.waits_for = None

    def choose(self) -> Partition:
        """The partition that goes on. Loads may end before."""
        while True:
            runnable = [partition for partition in self.live if partition.can_run()]
            if not runnable and not self.loads:
                waits = [(p, *p.waits_for) for p in self.live if p.waits_for is not None]
                texts = [f"{p} waits for phase {phase} of {barrier}" for p, barrier, phase in waits]
                self.fault("deadlock: " + "; ".join(texts))
            chosen = self.schedule.choose(runnable, self.loads)
            if chosen is not None:
                return chosen
            self.schedule.choose_load(self.loads).finish()

    def specialise(self, work: Sequence[tuple[Any, Any]], worker_warps: Sequence[Any]) -> None:
        main = self.current
        warps = (main.warps, *map(int, worker_warps))
        names = [f"{index} ({function.__name__})" for index, (function, _) in enumerate(work)]
        parts = [
            Partition(self, *each) for each in zip(names, range(len(work)), warps, strict=True)
        ]
        threads = [
            threading.Thread(target=self.run, args=(partition, *each), daemon=True)
            for partition, each in zip(parts, work, strict=True)
        ]
        self.live = list(parts)
        for partition, thread in zip(parts, threads, strict=True):
            partition.clock.merge(main.clock)
            thread.start()
        self.run_next()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        self.current, self.live = main, [main]
        for partition in parts:
            main.clock.merge(partition.clock)

    def run(self, partition: Partition, function: Any, args: Any) -> None:
        """The thread of a partition."""
        partition.turn.acquire()
        try:
            if self.error is None:
                with np.errstate(all="ignore"):
                    function(*args)
                partition.end()
                self.live.remove(partition)
                if self.live:
                    self.run_next()
        except Stopped:
            pass
        except BaseException as error:
            self.stop(error)

    def run_next(self) -> None:
        """Let a partition go on."""
        try:
            self.current = self.choose()
            self.current.turn.release()
        except BaseException as error:
            self.stop(error)

    def stop(self, error: BaseException) -> None:
        self.error = error
        for partition in self.live:
            partition.turn.release()

    def end(self) -> None:
        self.current.end()
        for actor in self.actors:
            if actor.num_issued > self.current.clock.times[0, actor.number]:
                self.fault(f"nobody has waited for {actor}")


class Barrier:
    """An mbarrier. A phase ends with its last arrival and the last byte that TMA loads bring.

    Attributes:
        completed: number of phases that have ended.
        pending_count: arrivals that this phase still needs.
        tx_count: bytes that are expected and have not come; below 0: come, but not expected.
        gathered: the merged clocks of all arrivals; released: those until the last phase ended.
        loader: stands for the TMA loads that signal this barrier.
        initialised: the partition that has initialised it, and when.
    """

    def __init__(self, program: Program, name: str, count: int) -> None:
        self.program, self.name, self.count = program, name, count
        self.completed, self.pending_count, self.tx_count = 0, count, 0
        self.gathered, self.released = VectorClock(), VectorClock()
        self.loader = Actor(program, f"a TMA load of {name}")
        self.initialised = program.current.number, program.current.tick()

    def __str__(self) -> str:
        state = f"phase {self.completed} needs {self.pending_count} of {self.count} arrivals"
        if self.loader.num_issued or self.tx_count:
            state += f" and {self.tx_count} bytes"
        return f"{self.name}, whose {state}"

    def known_phases(self) -> int:
        """Number of phases that have ended before, with any schedule."""
        clock = self.program.current.clock
        if self.loader.num_issued:
            return clock.phases[self.name]
        return sum(n for (name, _), n in clock.arrivals.items() if name == self.name) // self.count

    def check_phase(self, text: str) -> None:
        """Fault unless the phase before the current one has ended with any schedule."""
        known = self.known_phases()
        if known < self.completed:
            self.program.fault(f"{text} {self}; known to have ended: {known} phases")

    def arrive(self, count: int, num_bytes: int = 0) -> None:
        program, me = self.program, self.program.current
        program.event()
        text = f"too many arrivals: {count} at"
        if count > self.pending_count:
            program.fault(f"{text} {self}")
        self.check_phase(text)
        me.clock.arrivals[self.name, me.number] += count
        self.gathered.merge(me.clock)
        self.pending_count -= count
        self.tx_count += num_bytes
        self.end_phase(Access(me, me.clock))

    def end_phase(self, by: Access) -> None:
        """End the phase if nothing is missing."""
        if self.pending_count or self.tx_count > 0:
            return
        if self.tx_count < 0:
            self.program.fault(f"more bytes than expected at {self}", by)
        self.completed, self.pending_count = self.completed + 1, self.count
        self.gathered.phases[self.name] = self.completed
        self.released.merge(self.gathered)
        for other in self.program.live:
            if other.waits_for is not None and other.waits_for[0] is self:
                self.check_missed(other, other.waits_for[1])

    def wait(self, parity: int) -> None:
        """Wait for the phase of this parity that is the last one that has ended, or the next."""
        me, known = self.program.current, self.known_phases()
        if parity not in (0, 1):
            self.program.fault(f"wait for the phase of parity {parity} of {self}")
        phase = known - 1 if (known - 1) % 2 == parity else known
        self.check_missed(me, phase)
        self.program.event((self, phase))
        me.clock.merge(self.released)

    def check_missed(self, partition: Partition, phase: int) -> None:
        if self.completed >= phase + 2:
            self.program.fault(f"{partition} misses phase {phase} of {self}")
