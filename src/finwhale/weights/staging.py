"""Transfers a checkpoint's tensors to a GPU, as fast as the files can be read.

Threads read pieces of tensors from the files into pinned memory. One thread sends the pieces to the
device on its own CUDA stream. Tensors that need no conversion go directly to their destinations;
these are nearly all of a checkpoint's thousands of tensors. Meanwhile, the iterating thread stores
the others. The numbers of pieces in pinned memory and of groups on the device are bounded. The
device checks all tensors for NaN, because thousands of short calls in the reading threads would
wait for Python's lock.

A slice of columns has many short rows with gaps between them. Reading each row alone would cost a
system call for some hundred bytes, and the disk and the page cache read whole 4 KiB pages anyway.
So a thread reads rows with their gaps into a buffer that stays in its core's cache, and copies the
rows from there.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from operator import itemgetter
from pathlib import Path
from queue import Queue

import numpy as np
import torch
from torch import Tensor

from finwhale.checkpoint.formats import E8M0_NAN, fault, not_finite
from finwhale.checkpoint.reader import TensorInfo
from finwhale.errors import CheckpointError
from finwhale.platform import usable_cores
from finwhale.weights.destinations import Destinations

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

# Size of one transfer. Small tensors share a piece, larger ones have several.
PIECE_BYTES = 16 * 2**20
ALIGN = 64
THREADS = 12
# Reading threads of a rank that also reads jointly: more of them slow down the joint reading, which
# moves most of the bytes.
THREADS_BESIDE_JOINT = 4
# Bytes of rows and gaps that a thread reads at once.
GAPPED_BYTES = 2**19
# Pieces in pinned memory for each reading thread: it reads one, while the device takes the other.
PINNED_PIECES = 2
# The most groups of tensors on the device that the iterating thread has not stored yet.
GROUPS_AHEAD = 12


@dataclass(frozen=True, slots=True)
class Read:
    """A tensor, or a part of one, to read from the file.

    Attributes:
        start: offset in the tensor's bytes, without gaps.
        group_offset: offset in the group's bytes.
    """

    info: TensorInfo
    start: int
    num_bytes: int
    group_offset: int


@dataclass(slots=True)
class TransferGroup:
    """Tensors that arrive together, and the pieces in which they are read.

    Attributes:
        offsets: offset of each tensor in the group's bytes.
        pieces: adjacent reads of at most PIECE_BYTES in total. They read whole tensors, except for
            a tensor larger than a piece.
        have_destinations: the tensors go directly to their destinations.
    """

    have_destinations: bool = False
    offsets: dict[str, int] = field(default_factory=dict)
    pieces: list[list[Read]] = field(default_factory=list)
    num_bytes: int = 0


def groups_of(
    infos: Sequence[TensorInfo], piece_bytes: int = PIECE_BYTES, destinations: Container[str] = ()
) -> Iterator[TransferGroup]:
    """Group the tensors in order, small ones together.

    Args:
        destinations: the names of tensors that have a destination. They have separate groups.
    """
    group = TransferGroup(pieces=[[]])
    for info in infos:
        has_destination = info.name in destinations
        if info.num_bytes > piece_bytes:
            if group.offsets:
                yield group
                group = TransferGroup(pieces=[[]])
            most = piece_bytes
            if info.pitch is not None:  # whole rows
                most -= piece_bytes % info.row_bytes
                assert most, (info, piece_bytes)
            reads = [
                Read(info, start, min(most, info.num_bytes - start), start)
                for start in range(0, info.num_bytes, most)
            ]
            pieces = [[read] for read in reads]
            yield TransferGroup(has_destination, {info.name: 0}, pieces, info.num_bytes)
            continue
        full = group.num_bytes + info.num_bytes > piece_bytes
        if group.offsets and (full or group.have_destinations != has_destination):
            yield group
            group = TransferGroup(pieces=[[]])
        group.have_destinations = has_destination
        offset = group.num_bytes
        group.offsets[info.name] = offset
        group.pieces[0].append(Read(info, 0, info.num_bytes, offset))
        group.num_bytes = -(-(offset + info.num_bytes) // ALIGN) * ALIGN
    if group.offsets:
        yield group


class Staging:
    """Reads tensors from files and sends them to a device.

    Args:
        directory: the directory of the files.
        device: a GPU; on a CPU the same code runs without pinned memory and CUDA streams.
        destinations: by name of a tensor: uint8 [num_bytes] on the device, aligned for the tensor's
            dtype.
        threads: the most reading threads.
    """

    def __init__(
        self,
        directory: Path,
        device: torch.device,
        piece_bytes: int = PIECE_BYTES,
        destinations: Destinations | None = None,
        threads: int = THREADS,
    ) -> None:
        self._directory, self._device, self._piece_bytes = directory, device, piece_bytes
        self._num_threads = num_threads(threads)
        self._destinations = Destinations() if destinations is None else destinations
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stopped = threading.Event()
        self._room = threading.Semaphore(GROUPS_AHEAD)
        self._ready: Queue[_Arrived | TransferGroup | BaseException | None] = Queue()

    def tensors(self, infos: Sequence[TensorInfo]) -> Iterator[tuple[TensorInfo, Tensor | None]]:
        """Iterate over the tensors on the device, in order.

        The iterator yields None for a tensor with a destination, where its bytes have arrived when
        the iteration ends.

        Raises:
            CheckpointError: a file cannot be read or has changed; after the last tensor, one of
                them holds a value that is not finite.
        """
        by_name = {info.name: info for info in infos}
        faults = Faults()
        if self._stream is not None:
            # Work on the current CUDA stream may still use the memory of the destinations.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        sender = threading.Thread(target=self._send_all, args=(infos,), daemon=True)
        sender.start()
        try:
            checks = destination_checks(infos, self._destinations)
            while True:
                arrived = self._ready.get()
                if arrived is None:
                    break
                if isinstance(arrived, BaseException):
                    try:
                        raise arrived
                    finally:
                        # Break the reference cycle of exception and frame, which would keep the
                        # frame's objects alive.
                        del arrived
                if isinstance(arrived, TransferGroup):
                    for name in arrived.offsets:
                        yield by_name[name], None
                    continue
                for name, tensor in arrived.tensors(by_name):
                    faults.add([by_name[name]], not_finite(tensor))
                    yield by_name[name], tensor
                del arrived.memory
                self._room.release()
        finally:
            self._stopped.set()
            self._room.release()
            sender.join()
            if self._stream is not None:
                # Finish all writes, because the caller may free the destinations after a stop.
                self._stream.synchronize()
        faults.add_checks(checks)
        faults.raise_first()

    def _send_all(self, infos: Sequence[TensorInfo]) -> None:
        """The function of the sending thread. The iterating thread raises its errors."""
        try:
            with ExitStack() as stack, ThreadPoolExecutor(self._num_threads) as pool:
                # The stack closes the files after all reading threads have ended.
                files = Files(self._directory, stack)
                self._pipeline(groups_of(infos, self._piece_bytes, self._destinations), files, pool)
            self._ready.put(None)
        except BaseException as error:
            self._ready.put(error)

    def _pipeline(
        self, groups: Iterator[TransferGroup], files: "Files", pool: ThreadPoolExecutor
    ) -> None:
        asked: deque[TransferGroup] = deque()
        # Keep no failed future in this frame: its exception refers to the frame, which is a cycle.
        reading: deque[Future[_Pinned]] = deque()

        def pieces() -> Iterator[list[Read]]:
            for group in groups:
                asked.append(group)
                yield from group.pieces

        waiting = pieces()

        def ask(pinned: _Pinned) -> None:
            piece = next(waiting, None)
            if piece is not None:
                reading.append(pool.submit(_read_piece, piece, files, pinned))

        for _ in range(PINNED_PIECES * self._num_threads):
            ask(_Pinned(self._piece_bytes, pinned=self._stream is not None))
        while asked:
            group = asked.popleft()
            if not group.have_destinations:
                self._room.acquire()
            if self._stopped.is_set():
                return
            arrived = None if group.have_destinations else self._new(group)
            for piece in group.pieces:
                pinned = reading.popleft().result()
                if arrived is None:
                    self._copy_to_destinations(pinned, piece)
                else:
                    begin = piece[0].group_offset
                    size = piece[-1].group_offset + piece[-1].num_bytes - begin
                    target = arrived.memory[begin : begin + size]
                    self._send(pinned, [target], [pinned.memory[:size]])
                ask(pinned)
            if arrived is not None and self._stream is not None:
                arrived.event = self._stream.record_event()
            self._ready.put(arrived or group)

    def _new(self, group: TransferGroup) -> "_Arrived":
        size = max(ALIGN, group.num_bytes)  # so that an empty tensor has a view of any dtype
        with torch.cuda.stream(self._stream):
            return _Arrived(group, torch.empty(size, dtype=torch.uint8, device=self._device))

    def _copy_to_destinations(self, pinned: "_Pinned", piece: Sequence[Read]) -> None:
        targets, sources, first = [], [], piece[0].group_offset
        for read in piece:
            target = self._destinations[read.info.name]
            if read.num_bytes != read.info.num_bytes:
                target = target[read.start : read.start + read.num_bytes]
            targets.append(target)
            start = read.group_offset - first
            sources.append(pinned.memory[start : start + read.num_bytes])
        self._send(pinned, targets, sources)

    def _send(self, pinned: "_Pinned", targets: list[Tensor], sources: list[Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if self._stream is not None:
            pinned.event = self._stream.record_event()


class _Arrived:
    """A group on the device."""

    def __init__(self, group: TransferGroup, memory: Tensor) -> None:
        self.group, self.memory = group, memory
        self.event: torch.cuda.Event | None = None

    def tensors(self, infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Tensor]]:
        if self.event is not None:
            current = torch.cuda.current_stream(self.memory.device)
            current.wait_event(self.event)
            # torch reuses the memory only after the current CUDA stream's work with it is done.
            self.memory.record_stream(current)
        typed: dict[torch.dtype, Tensor] = {}
        for name, offset in self.group.offsets.items():
            info = infos[name]
            if info.dtype not in typed:
                typed[info.dtype] = self.memory.view(info.dtype)
            start, size = offset // info.dtype.itemsize, info.num_bytes // info.dtype.itemsize
            yield name, typed[info.dtype].narrow(0, start, size).view(info.shape)


# Tensors, and their values: those of one tensor in its dtype, or E8M0 scales as rows of bytes.
Check = tuple[list[TensorInfo], Tensor]


def destination_checks(infos: Iterable[TensorInfo], destinations: Destinations) -> list[Check]:
    """Find which values must be finite: those of all tensors that have a destination.

    A model has thousands of small tensors of scales. If scales of the same size are adjacent parts
    of one tensor, one check covers them all.
    """
    checks: list[Check] = []
    scales: list[tuple[tuple[int, int, int], TensorInfo]] = []
    for info in infos:
        part = destinations.parts.get(info.name)
        if part is None or not part[2] or not info.dtype.is_floating_point:
            continue
        if info.dtype == torch.float8_e8m0fnu:
            scales.append((part, info))
        else:
            checks.append(([info], destinations[info.name].view(info.dtype)))
    runs: list[list[TensorInfo]] = []
    next_part = (-1, 0, 0)  # the part that would continue the run
    for part, info in sorted(scales, key=itemgetter(0)):
        if part != next_part:
            runs.append([])
        runs[-1].append(info)
        memory, begin, size = part
        next_part = memory, begin + size, size
    for run in runs:
        first = destinations[run[0].name]
        checks.append((run, first.as_strided((len(run), len(first)), (len(first), 1))))
    return checks


class Faults:
    """Collects checks for values that are not finite; the host reads them once, at the end."""

    def __init__(self) -> None:
        self._infos: list[TensorInfo] = []
        self._flags: list[Tensor] = []

    def add(self, infos: Sequence[TensorInfo], flags: Tensor) -> None:
        """Add a check. flags: a bool for each tensor, true if it has a value that is not finite."""
        self._infos += infos
        self._flags.append(flags.reshape(-1))

    def add_checks(self, checks: Iterable[Check]) -> None:
        """Add the checks that `destination_checks` has listed, once the values have arrived."""
        for infos, values in checks:
            is_scales = values.dtype == torch.uint8
            self.add(infos, values.amax(1) == E8M0_NAN if is_scales else not_finite(values))

    def raise_first(self) -> None:
        """Raise CheckpointError for the first tensor with a value that is not finite."""
        flags = torch.cat(self._flags).tolist() if self._flags else []
        for info in compress(self._infos, flags):
            raise CheckpointError(
                f"{info.name} in {info.file} holds {fault(info.dtype)}; the file is damaged"
            )


class _Pinned:
    """Pinned memory for one piece. It can be reused once the transfer is done."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        self.bytes = self.memory.numpy()
        self.event: torch.cuda.Event | None = None
        self._gapped: Bytes = np.empty(0, np.uint8)

    def gapped(self, num_bytes: int) -> Bytes:
        """Further memory, not pinned, for rows of this piece and the gaps between them."""
        if len(self._gapped) < num_bytes:
            self._gapped = np.empty(num_bytes, np.uint8)
        return self._gapped[:num_bytes]


class Files:
    """File descriptors, each opened once."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self._open: dict[str, int] = {}
        self._lock = threading.Lock()

    def number(self, file: str) -> int:
        with self._lock:
            if file not in self._open:
                self._open[file] = os.open(self._directory / file, os.O_RDONLY)
                self._stack.callback(os.close, self._open[file])
            return self._open[file]


def _read_piece(piece: Sequence[Read], files: Files, pinned: _Pinned) -> _Pinned:
    """Read one piece, in a reading thread."""
    if pinned.event is not None:
        pinned.event.synchronize()
    first = piece[0].group_offset
    begin = 0
    for end in range(1, len(piece) + 1):
        # Combine reads that are adjacent both in the file and in the piece.
        if end == len(piece) or not _adjoin(piece[end - 1], piece[end]):
            _read(piece[begin:end], files, pinned, piece[begin].group_offset - first)
            begin = end
    return pinned


def _adjoin(one: Read, other: Read) -> bool:
    if one.info.pitch is not None or other.info.pitch is not None:
        return False
    end = one.info.offset + one.start + one.num_bytes
    return (
        one.info.file == other.info.file
        and end == other.info.offset + other.start
        and one.group_offset + one.num_bytes == other.group_offset
    )


def _read(reads: Sequence[Read], files: Files, pinned: _Pinned, begin: int) -> None:
    """Read adjacent parts of a file into the pinned memory, starting at its byte `begin`."""
    first = reads[0]
    target = pinned.bytes[begin : begin + sum(read.num_bytes for read in reads)]
    file, name_at = first.info.file, partial(_name_at, reads)
    if first.info.pitch is None:
        fill(target, files, file, first.info.offset + first.start, name_at)
        return
    length, pitch = first.info.row_bytes, first.info.pitch
    rows = target.reshape(-1, length)
    count = max(1, GAPPED_BYTES // pitch)
    gapped = pinned.gapped(min(count, len(rows)) * pitch)
    offset = first.info.offset + first.start // length * pitch
    for i in range(0, len(rows), count):
        part = rows[i : i + count]
        # The file may end with the last row, so do not read the gap after it.
        size = (len(part) - 1) * pitch + length
        fill(gapped[:size], files, file, offset + i * pitch, name_at)
        part[:] = gapped[: len(part) * pitch].reshape(-1, pitch)[:, :length]


def fill(
    target: Bytes, files: Files, file: str, offset: int, name_at: Callable[[int], str]
) -> None:
    """Fill `target` with bytes of a file, starting at `offset`.

    Args:
        name_at: returns the name of the tensor to which one of these bytes belongs.

    Raises:
        CheckpointError: the bytes cannot be read.
    """
    left = memoryview(target.data)
    done = 0
    while left:
        try:
            count = os.preadv(files.number(file), [left], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {name_at(done)} from {file}: {error.strerror or error}"
            ) from error
        if not count:
            raise CheckpointError(
                f"cannot read {name_at(done)} from {file}: the file is too short; was it changed?"
            )
        done += count
        left = left[count:]


def read_into(target: Tensor, directory: Path, info: TensorInfo) -> None:
    """Read a tensor into host memory (uint8) with several threads. Raises CheckpointError."""

    def read(start: int) -> Tensor:
        piece = target[start : start + PIECE_BYTES]
        fill(piece.numpy(), files, info.file, info.offset + start, lambda _: info.name)
        return not_finite(piece.view(info.dtype))

    faults = Faults()
    with ExitStack() as stack, ThreadPoolExecutor(num_threads()) as pool:
        files = Files(directory, stack)
        for flag in pool.map(read, range(0, len(target), PIECE_BYTES)):
            faults.add([info], flag)
    faults.raise_first()


def _name_at(reads: Sequence[Read], done: int) -> str:
    """The name of the tensor whose bytes follow the first `done` bytes."""
    for read in reads:
        done -= read.num_bytes
        if done < 0:
            return read.info.name
    return reads[-1].info.name


def num_threads(most: int = THREADS) -> int:
    return max(1, min(most, usable_cores() or 1))
