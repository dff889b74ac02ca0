"""Programs of partitions, mbarriers, shared memory and MMAs, for gluon_interpreter.py."""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from .gluon_values import MEMORY, KernelFault, Value, from_memory, itemsize, kernel_line, to_memory

MAX_PARTITIONS = 16  # of a program
IN_FLIGHT = np.iinfo(np.int32).max  # the time of an MMA's reads before the wait for it


class Schedule:
    """Chooses which partition goes on, the same in every run.

    first: partitions, by their numbers in the list of gl.warp_specialize, that go on whenever they
    can, the first one first. The others are drawn with weights that differ between programs.
    """

    def __init__(self, seed: int = 0, first: Sequence[int] = ()) -> None:
        self.random, self.first = random.Random(seed), first

    def begin(self) -> None:
        self.weights = [self.random.random() ** 3 + 0.01 for _ in range(MAX_PARTITIONS)]

    def choose(self, runnable: Sequence["Partition"]) -> "Partition":
        for index in self.first:
            for partition in runnable:
                if partition.index == index:
                    return partition
        weights = [self.weights[partition.index] for partition in runnable]
        return self.random.choices(runnable, weights)[0]


class Knowledge:
    """A vector clock: what has happened before, with any schedule.

    Attributes:
        times: [0,p]: the last access of partition p that has happened before; [1,p]: the last one
            that p's fences make visible to MMAs.
        arrivals: the number of arrivals by (barrier, partition).
    """

    def __init__(self) -> None:
        self.times = np.zeros((2, MAX_PARTITIONS), np.int32)
        self.arrivals: Counter[tuple[str, int]] = Counter()

    def learn(self, other: "Knowledge") -> None:
        np.maximum(self.times, other.times, out=self.times)
        self.arrivals |= other.arrivals


class Partition:
    """A group of warps, which runs in a thread of its own.

    Attributes:
        index: its number in the list of gl.warp_specialize.
        number: its number in the program; 0 is the code around gl.warp_specialize.
        places: the kernel's line of each access, by time.
        pending: MMAs that it has not waited for.
        waits_for: a barrier and the number of a phase.
    """

    def __init__(self, program: "Program", name: str, index: int, warps: int) -> None:
        self.program, self.name, self.index, self.warps = program, name, index, warps
        self.number = len(program.partitions)
        self.known = Knowledge()
        self.places = [""]
        self.pending: list[Mma] = []
        self.waits_for: tuple[Barrier, int] | None = None
        self.turn = threading.Semaphore(0)
        program.partitions.append(self)

    def tick(self) -> int:
        """The time of a new access."""
        self.known.times[0, self.number] += 1
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
    """One program of a launch. Its partition `current` runs; `live` have not ended."""

    def __init__(self, ids: tuple[int, ...], schedule: Schedule, warps: int) -> None:
        self.ids, self.schedule = ids, schedule
        self.partitions: list[Partition] = []
        self.barriers: dict[str, Barrier] = {}
        self.names: Counter[str] = Counter()
        self.error: BaseException | None = None
        self.current = Partition(self, "before warp_specialize", 0, warps)
        self.live = [self.current]
        schedule.begin()

    def fault(self, text: str) -> NoReturn:
        name = self.current.name
        raise KernelFault(f"program {self.ids}, partition {name}, {kernel_line()}: {text}")

    def event(self, waits_for: "tuple[Barrier, int] | None" = None) -> None:
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
        runnable = [partition for partition in self.live if partition.can_run()]
        if not runnable:
            waits = [(p, *p.waits_for) for p in self.live if p.waits_for is not None]
            texts = [
                f"partition {p.name} waits for phase {phase} of {barrier}"
                for p, barrier, phase in waits
            ]
            self.fault("deadlock: " + "; ".join(texts))
        return self.schedule.choose(runnable)

    def specialise(self, work: Sequence[tuple[Any, Any]], worker_warps: Sequence[Any]) -> None:
        main = self.current
        warps = (main.warps, *map(int, worker_warps))
        names = [f"{index} ({function.__name__})" for index, (function, _) in enumerate(work)]
        parts = [
            Partition(self, *each) for each in zip(names, range(len(work)), warps, strict=True)
        ]
        threads = [
            threading.Thread(target=self.run, args=(partition, *each))
            for partition, each in zip(parts, work, strict=True)
        ]
        self.live = list(parts)
        for partition, thread in zip(parts, threads, strict=True):
            partition.known.learn(main.known)
            thread.start()
        self.current = self.choose()
        self.current.turn.release()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        self.current, self.live = main, [main]
        for partition in parts:
            main.known.learn(partition.known)

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
                    self.current = self.choose()
                    self.current.turn.release()
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
            for other in self.live:
                other.turn.release()


class Barrier:
    """An mbarrier. Its last arrival ends a phase, and the next phase begins.

    Attributes:
        completed: number of phases that have ended.
        missing: arrivals that this phase still needs.
        gathered: what all arrivals knew; released: those until the end of the last phase.
    """

    def __init__(self, program: Program, name: str, count: int) -> None:
        self.program, self.name, self.count = program, name, count
        self.completed, self.missing = 0, count
        self.gathered, self.released = Knowledge(), Knowledge()

    def __str__(self) -> str:
        state = f"phase {self.completed} needs {self.missing} of {self.count} arrivals"
        return f"{self.name}, whose {state}"

    def known_phases(self) -> int:
        """Number of phases that have ended before, with any schedule."""
        arrivals = self.program.current.known.arrivals
        return sum(n for (name, _), n in arrivals.items() if name == self.name) // self.count

    def arrive(self, count: int) -> None:
        program, me = self.program, self.program.current
        program.event()
        known = self.known_phases()
        if count > self.missing or known < self.completed:
            program.fault(
                f"too many arrivals: {count} at {self}; known to have ended: {known} phases"
            )
        me.known.arrivals[self.name, me.number] += count
        self.gathered.learn(me.known)
        self.missing -= count
        if self.missing == 0:
            self.completed, self.missing = self.completed + 1, self.count
            self.released.learn(self.gathered)
            for other in program.live:
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
        me.known.learn(self.released)

    def check_missed(self, partition: Partition, phase: int) -> None:
        if self.completed >= phase + 2:
            self.program.fault(f"partition {partition.name} misses phase {phase} of {self}")


# --- Shared memory and MMAs -----------------------------------------------------------------------


class Allocation:
    """Shared memory: its bytes, and of each byte the last writer, the time of its write, and the
    time of each partition's last read. Time 0: never.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.bytes = name, np.zeros(size, np.uint8)
        self.writer, self.written = np.zeros(size, np.int8), np.zeros(size, np.int32)
        self.reads: dict[int, Any] = {}


class Shared:
    """A view of shared memory (gl.shared_memory_descriptor). Elements are in logical order."""

    def __init__(
        self,
        program: Program,
        memory: Allocation,
        dtype: Any,
        offset: int,
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> None:
        self.program, self.memory, self.dtype, self.offset = program, memory, dtype, offset
        self.shape, self.strides = tuple(shape), tuple(strides)

    def view(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Any:
        return Shared(self.program, self.memory, self.dtype, offset, shape, strides)

    def index(self, index: Any) -> Any:
        return self.view(self.slice(index, 1).offset, self.shape[1:], self.strides[1:])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Any:
        start, length = int(start), int(length)
        if start < 0 or start + length > self.shape[dim]:
            self.program.fault(f"{self.memory.name} {self.shape} has no {start}:{start + length}")
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return self.view(self.offset + start * self.strides[dim], shape, self.strides)

    def permute(self, order: Sequence[int]) -> Any:
        shape, strides = ([x[i] for i in order] for x in (self.shape, self.strides))
        return self.view(self.offset, shape, strides)

    def reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Any:
        """Only the size of elements may change, because swizzles are not modelled."""
        shape, size = tuple(map(int, shape)), itemsize(dtype)
        row_bytes = self.shape[-1] * self.strides[-1]
        assert shape[:-1] == self.shape[:-1] and shape[-1] * size == row_bytes, "other rows"
        strides = (*self.strides[:-1], size)
        return Shared(self.program, self.memory, dtype, self.offset, shape, strides)

    def elements(self) -> Any:
        kind = MEMORY[self.dtype.name]
        return np.ndarray(self.shape, kind, self.memory.bytes, self.offset, self.strides)

    def load(self, layout: Any = None) -> Value:
        self.program.event()
        self.check_read()
        self.mark_read(self.program.current.tick())
        return self.value()

    def value(self) -> Value:
        return Value(from_memory(self.elements(), self.dtype), self.dtype)

    def store(self, value: Value) -> None:
        program, data = self.program, to_memory(value.data, self.dtype)
        program.event()
        if value.shape != self.shape or value.dtype != self.dtype:
            program.fault(f"store of {value.dtype} {value.shape} to {self.dtype} {self.shape}")
        me = program.current
        writer, written = self.check_order(0, "this write is not ordered after the write")
        for reader, times in self.memory.reads.items():
            read = self.of_bytes(times)
            late = read > me.known.times[0, reader]
            self.check(late, "data race: this write is not ordered after the read", reader, read)
        writer[...], written[...] = me.number, me.tick()
        self.elements()[...] = data

    # What is known of the view's bytes.

    def of_bytes(self, array: Any) -> Any:
        """The view [*shape, bytes of an element] of an array with a value for each byte."""
        size = array.itemsize
        strides = [size * stride for stride in (*self.strides, 1)]
        shape = (*self.shape, itemsize(self.dtype))
        return np.ndarray(shape, array.dtype, array, self.offset * size, strides)

    def check(self, late: Any, text: str, who: Any, when: Any) -> None:
        """Fault if any byte is `late`: partition who[byte] has accessed it at when[byte]."""
        if late.any():
            place = np.unravel_index(late.argmax(), late.shape)
            other = self.program.partitions[np.broadcast_to(who, late.shape)[place]]
            line = "an MMA in flight" if when[place] == IN_FLIGHT else other.places[when[place]]
            at = [int(i) for i in place[:-1]]
            self.program.fault(f"{self.memory.name}{at}: {text} by partition {other.name}, {line}")

    def check_order(self, kind: int, text: str) -> tuple[Any, Any]:
        """Check that all writes have happened before. Returns the bytes' writers and times."""
        writer, written = self.of_bytes(self.memory.writer), self.of_bytes(self.memory.written)
        late = written > self.program.current.known.times[kind][writer]
        self.check(late, text if kind else f"data race: {text}", writer, written)
        return writer, written

    def check_read(self, by_mma: bool = False) -> None:
        _, written = self.check_order(0, "this read is not ordered after the write")
        if not written.all():
            self.program.fault(f"{self.memory.name} is read before it is written")
        if by_mma:
            self.check_order(1, "no fence_async_shared follows the write")

    def mark_read(self, time: int, ended: bool = False) -> None:
        """Note a read; `ended`: it was IN_FLIGHT."""
        number = self.program.current.number
        times = self.memory.reads.setdefault(number, np.zeros_like(self.memory.written))
        read = self.of_bytes(times)
        read[...] = time if ended else np.maximum(read, time)


class Mma(Value):
    """The result of a warpgroup MMA, a @ b + acc, which is computed at the wait for it."""

    def __init__(self, owner: Partition, a: Any, b: Shared, acc: Value, use_acc: bool) -> None:
        self.owner, self.a, self.b, self.acc, self.use_acc = owner, a, b, acc, use_acc
        self.dtype, self.result = acc.dtype, acc
        self.shared = [x for x in (a, b) if isinstance(x, Shared)]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.acc.shape

    @property
    def data(self) -> Any:  # type: ignore[override]
        self.owner.program.fault("a result of warpgroup_mma is used before the wait for it")

    def compute(self) -> None:
        a, b = (x.value() if isinstance(x, Shared) else x for x in (self.a, self.b))
        total = a.data.astype(np.float64) @ b.data.astype(np.float64)
        if self.use_acc:
            total += (self.acc.result if isinstance(self.acc, Mma) else self.acc).data
        self.result = Value(total, self.dtype)
