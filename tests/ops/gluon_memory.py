"""Shared memory and MMAs of an emulated program, for gluon_interpreter.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
from triton.experimental.gluon import language as gl

from .gluon_programs import IN_FLIGHT, Access, Partition, Program
from .gluon_values import MEMORY, Value, from_memory, itemsize, to_memory

FENCE = "no fence_async_shared follows the write"


def row_major(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """Strides in bytes of adjacent elements of `size` bytes."""
    return tuple(size * math.prod(shape[i + 1 :]) for i in range(len(shape)))


class Allocation:
    """Shared memory that a kernel allocates. Floats that nobody has written are NaN.

    Attributes:
        writer, written: who has written each byte last, and when; time 0: nobody.
        reads: by (partition, whether an MMA), the time of the last read of each byte.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.bytes = name, np.full(size, 255, np.uint8)
        self.writer, self.written = np.zeros(size, np.int8), np.zeros(size, np.int32)
        self.reads: dict[tuple[int, bool], Any] = {}


def swizzle_bytes(layout: Any) -> int:
    """Bytes of a row that a layout of shared memory permutes; 0: none."""
    if isinstance(layout, gl.SwizzledSharedLayout):
        assert layout.max_phase == 1, "a swizzle that is not modelled"
    return getattr(layout, "swizzle_byte_width", 0)


@dataclass
class Shared:
    """A view of shared memory (gl.shared_memory_descriptor). Elements are in logical order.

    Attributes:
        swizzle: see `swizzle_bytes`.
        plain: the view ignores the memory's swizzle. Only rows 0, 8, 16, ... of 128 bytes, which a
            swizzle leaves as they are, may be accessed through it.
    """

    program: Program
    memory: Allocation
    dtype: Any
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: int = 0
    plain: bool = False

    def view(self, offset: int, shape: Sequence[int], strides: Sequence[int]) -> Any:
        place = offset, tuple(shape), tuple(strides)
        return Shared(self.program, self.memory, self.dtype, *place, self.swizzle, self.plain)

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
        """A view with elements of another size, or one that ignores a swizzle (`plain`)."""
        shape, swizzle = tuple(map(int, shape)), swizzle_bytes(layout)
        strides = row_major(shape, itemsize(dtype))
        if swizzle == self.swizzle != 0:
            assert shape[:-1] == self.shape[:-1], "other rows of swizzled memory"
            row_bytes = self.shape[-1] * self.strides[-1]
            assert shape[-1] * strides[-1] == row_bytes, "other rows of swizzled memory"
            strides = (*self.strides[:-1], strides[-1])
        else:
            whole = self.strides == row_major(self.shape, itemsize(self.dtype))
            assert whole and swizzle == 0 and self.swizzle in (0, 128), "a swizzle not modelled"
            if shape[0] * strides[0] > self.shape[0] * self.strides[0]:
                self.program.fault(f"{self.memory.name} {self.shape} is too small for {shape}")
        view, plain = self.view(self.offset, shape, strides), self.plain or self.swizzle > swizzle
        return replace(view, dtype=dtype, swizzle=swizzle, plain=plain)

    def elements(self) -> Any:
        if self.plain:
            places = (np.arange(n) * size for n, size in zip(self.shape, self.strides, strict=True))
            if ((self.offset + reduce(np.add.outer, places)) % 1024 >= 128).any():
                self.program.fault(
                    f"{self.memory.name} is swizzled, but accessed as if it were not"
                )
        kind = MEMORY[self.dtype.name]
        return np.ndarray(self.shape, kind, self.memory.bytes, self.offset, self.strides)

    def load(self, layout: Any = None) -> Value:
        self.program.event()
        self.check_read()
        self.mark_read(self.program.current.tick(), by_mma=False)
        return self.value()

    def value(self) -> Value:
        return Value(from_memory(self.elements(), self.dtype), self.dtype)

    def store(self, value: Value) -> None:
        program, data = self.program, to_memory(value.data, self.dtype)
        program.event()
        if value.shape != self.shape or value.dtype != self.dtype:
            program.fault(f"store of {value.dtype} {value.shape} to {self.dtype} {self.shape}")
        me = program.current
        access = Access(me, me.clock)
        self.check_write(access)
        self.write(data, access, me.tick())

    def check_write(self, by: Access, issuer: int | None = None) -> None:
        """`issuer`: the partition that has issued the TMA load that writes.

        After an ordinary load by another partition, a TMA load needs the reader's fence. Within a
        partition, the compiler adds one.
        """
        self.check_order(by, 0, "this write is not ordered after the write")
        for (reader, by_mma), times in self.memory.reads.items():
            read = self.of_bytes(times)
            text = "data race: this write is not ordered after the read"
            self.check(read > by.clock.times[0, reader], text, by, reader, read)
            if issuer is not None and reader != issuer and not by_mma:
                text = "no fence_async_shared follows the read"
                self.check(read > by.clock.times[1, reader], text, by, reader, read)

    def write(self, data: Any, by: Access, time: int) -> None:
        self.of_bytes(self.memory.writer)[...] = by.actor.number
        self.of_bytes(self.memory.written)[...] = time
        self.elements()[...] = data

    # The accesses to the view's bytes.

    def of_bytes(self, array: Any) -> Any:
        """The view [*shape, bytes of an element] of an array with a value for each byte."""
        size = array.itemsize
        strides = [size * stride for stride in (*self.strides, 1)]
        shape = (*self.shape, itemsize(self.dtype))
        return np.ndarray(shape, array.dtype, array, self.offset * size, strides)

    def check(self, unordered: Any, text: str, by: Access, who: Any, when: Any) -> None:
        """Fault if any byte is `unordered`; actor who[byte] has accessed it at when[byte]."""
        if unordered.any():
            place = np.unravel_index(unordered.argmax(), unordered.shape)
            other = self.program.actors[np.broadcast_to(who, unordered.shape)[place]]
            line = "an MMA in flight" if when[place] == IN_FLIGHT else other.places[when[place]]
            at = [int(i) for i in place[:-1]]
            self.program.fault(f"{self.memory.name}{at}: {text} by {other}, {line}", by)

    def check_order(self, by: Access, kind: int, text: str) -> None:
        """Check that all writes have happened before."""
        writer, written = self.of_bytes(self.memory.writer), self.of_bytes(self.memory.written)
        unordered = written > by.clock.times[kind][writer]
        self.check(unordered, text if kind else f"data race: {text}", by, writer, written)

    def check_read(self) -> None:
        self.check_ordered_read()
        if not self.of_bytes(self.memory.written).all():
            self.program.fault(f"{self.memory.name} is read before it is written")

    def check_ordered_read(self) -> Access:
        me = self.program.current
        access = Access(me, me.clock)
        self.check_order(access, 0, "this read is not ordered after the write")
        return access

    def check_operand(self, inner: int) -> None:
        """Check an MMA's read; `inner`: the dimension over which the MMA sums.

        The operand may have rows that nobody has written. Their rows of the result are NaN.
        """
        access = self.check_ordered_read()
        written = self.of_bytes(self.memory.written).all(-1)
        some, every = written.any(inner), written.all(inner)
        if not some.any() or (some & ~every).any():
            self.program.fault(f"{self.memory.name} is read before it is written")
        self.check_order(access, 1, FENCE)

    def mark_read(self, time: int, by_mma: bool = True, ended: bool = False) -> None:
        """Note a read; `ended`: it was IN_FLIGHT."""
        reader = self.program.current.number, by_mma
        times = self.memory.reads.setdefault(reader, np.zeros_like(self.memory.written))
        read = self.of_bytes(times)
        read[...] = time if ended else np.maximum(read, time)


class Mma(Value):
    """The result of a warpgroup MMA, a @ b + acc, which is computed at the wait for it."""

    def __init__(self, owner: Partition, a: Any, b: Shared, acc: Value, use_acc: bool) -> None:
        self.owner, self.a, self.b, self.acc, self.use_acc = owner, a, b, acc, use_acc
        self.dtype, self.result = acc.dtype, acc
        # With the dimension over which the MMA sums.
        self.shared = [(x, inner) for x, inner in ((a, 1), (b, 0)) if isinstance(x, Shared)]

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
