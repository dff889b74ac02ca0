"""Reads tensors once for all ranks of a host, which divide them or hold copies.

The ranks take turns with pieces of the files. A thread reads a piece into pinned memory, sends it
to the rank's own GPU, and lets the GPU copy every rank's part to that rank's destination. Compared
with ranks that read alone, no rank reads short rows with gaps between them. Each piece costs only a
few calls in Python, because all threads of a process share Python's lock.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from queue import Empty, SimpleQueue

from finwhale.checkpoint.reader import TensorInfo
from finwhale.errors import OtherRankError, first_line
from finwhale.weights.joint_ranks import JointRanks, Lane, PiecePart, RankCopy
from finwhale.weights.staging import PIECE_BYTES, PINNED_PIECES, Bytes, Files, fill, num_threads

# Pieces after which a thread asks whether another rank has failed.
PIECES_A_CHECK = 8


@dataclass(slots=True)
class Piece:
    """Adjacent bytes of a file: whole tensors, or some rows of a large one.

    Attributes:
        start: offset in the large tensor of the piece's first byte; None: the tensors are whole.
        continues: the next piece has more rows of the same tensor.
    """

    file: str
    offset: int
    num_bytes: int = 0
    infos: list[TensorInfo] = field(default_factory=list)
    start: int | None = None
    continues: bool = False


# A piece for each rank: the one that this rank reads, and the names of the tensors whose last byte
# some rank reads.
Turn = tuple[Piece, list[str]]


def pieces_of(infos: Iterable[TensorInfo], piece_bytes: int = PIECE_BYTES) -> Iterator[Piece]:
    """Cut whole tensors, in the order of the files, into pieces of adjacent bytes."""
    piece = Piece("", 0)
    for info in infos:
        size = info.num_bytes
        if size > piece_bytes:
            yield piece
            yield from _rows(info, piece_bytes)
            piece = Piece("", 0)
            continue
        begin = info.offset - piece.offset
        adjoins = begin == piece.num_bytes and info.file == piece.file
        if not adjoins or begin + size > piece_bytes:
            yield piece
            piece, begin = Piece(info.file, info.offset), 0
        piece.infos.append(info)
        piece.num_bytes = begin + size
    yield piece


def _rows(info: TensorInfo, piece_bytes: int) -> Iterator[Piece]:
    """The pieces of a large tensor, in whole rows."""
    most = piece_bytes - piece_bytes % info.row_bytes
    assert most, (info, piece_bytes)
    for start in range(0, info.num_bytes, most):
        size = min(most, info.num_bytes - start)
        continues = start + size < info.num_bytes
        yield Piece(info.file, info.offset + start, size, [info], start, continues)


class Division:
    """How the ranks divide tensors, along `axes` (JointReader)."""

    def __init__(self, axes: Mapping[str, int | None], num_ranks: int) -> None:
        self._axes, self._num_ranks = axes, num_ranks
        # Most tensors have one of a few shapes.
        self._known: dict[tuple[int, tuple[int, ...], int | None], Sequence[RankCopy]] = {}

    def parts(self, piece: Piece) -> Iterator[PiecePart]:
        """Every rank's part of a piece."""
        axes, known, num_ranks = self._axes, self._known, self._num_ranks
        if piece.start is not None:
            info = piece.infos[0]
            copies = copies_of(info, piece.start, piece.num_bytes, axes[info.name], num_ranks)
            yield PiecePart(info.name, 0, tuple(copies))
            return
        for info in piece.infos:
            kind = info.num_bytes, info.shape, axes[info.name]
            found = known.get(kind)
            if found is None:
                found = known[kind] = tuple(copies_of(info, 0, kind[0], kind[2], num_ranks))
            yield PiecePart(info.name, info.offset - piece.offset, found)


def copies_of(
    info: TensorInfo, start: int, num_bytes: int, axis: int | None, num_ranks: int
) -> Iterator[RankCopy]:
    """Every rank's part of some bytes of a tensor. Along axis 1, they are whole rows."""
    if axis is None:
        for rank in range(num_ranks):
            yield RankCopy(rank, start, 0, 1, num_bytes, num_bytes)
        return
    if axis == 0:
        size = info.num_bytes // num_ranks  # of a rank's slice
        for rank in range(num_ranks):
            begin = max(start, rank * size)
            length = min(start + num_bytes, (rank + 1) * size) - begin
            if length > 0:
                yield RankCopy(rank, begin - rank * size, begin - start, 1, length, length)
        return
    pitch = info.row_bytes
    width, rows = pitch // num_ranks, num_bytes // pitch
    for rank in range(num_ranks):
        yield RankCopy(rank, start // pitch * width, rank * width, rows, width, pitch)


class JointReader:
    """Reads this rank's pieces in threads of its own.

    Args:
        directory: the directory of the files.
        infos: the tensors, whole, in the order of the files.
        axes: by name, the axis along which the ranks divide a tensor; None: each takes all of it.
        ranks: the ranks, whose `open` has returned True. `close` must follow.
    """

    def __init__(
        self,
        directory: Path,
        infos: Iterable[TensorInfo],
        axes: Mapping[str, int | None],
        ranks: JointRanks,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.axes = axes
        self._division = Division(axes, ranks.size)
        self._ranks, self._piece_bytes = ranks, piece_bytes
        self._turns = self._plan(infos)
        self._lock = threading.Lock()
        self._stopped = self._others_failed = False
        self._asked = 0
        # After each turn, a reading thread adds the turn's names to this queue. At its end, it adds
        # its error, or None if it has read all its turns.
        self._done: SimpleQueue[list[str] | BaseException | None] = SimpleQueue()
        self._stack = ExitStack()
        self._files = Files(directory, self._stack)
        self._threads: list[threading.Thread] = []
        self._running = 0

    def start(self) -> None:
        """Begin to read."""
        for _ in range(num_threads()):
            thread = threading.Thread(target=self._run, name="joint reader", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._running = len(self._threads)

    def should_stop(self) -> bool:
        """Whether another rank has failed. Most calls only repeat the last answer."""
        self._asked += 1
        if self._asked % PIECES_A_CHECK == 0 and self._ranks.has_failed():
            self._others_failed = True
        return self._others_failed

    def _plan(self, infos: Iterable[TensorInfo]) -> Iterator[Turn]:
        """Plan the turns, each when a thread asks for it: the first bytes need not wait for all."""
        every = pieces_of(infos, self._piece_bytes)
        pieces = (piece for piece in every if piece.num_bytes)
        index = self._ranks.index
        while turn := list(islice(pieces, self._ranks.size)):
            own = turn[index] if index < len(turn) else Piece("", 0)
            ended = chain.from_iterable(piece.infos for piece in turn if not piece.continues)
            yield own, [info.name for info in ended]

    def names(self, wait: bool) -> Iterator[str]:
        """Iterate over the names of all tensors, each once, as reading proceeds.

        Their bytes have arrived after `close`. If another rank has failed, the iteration ends
        early, and `close` raises.

        Args:
            wait: for all tensors; otherwise the iteration ends when none is ready, and a later one
                continues.

        Raises:
            CheckpointError: a file cannot be read.
            FinwhaleError: a piece cannot be sent.
        """
        while self._running:
            try:
                done = self._done.get(wait)
            except Empty:
                return
            if isinstance(done, BaseException):
                try:
                    raise done
                finally:
                    del done  # breaks the reference cycle of exception and frame
            if self._others_failed:
                return
            if done is None:
                self._running -= 1
            else:
                yield from done

    def close(self, error: BaseException | None) -> None:
        """End the threads, and wait for the other ranks.

        Args:
            error: why this rank has stopped early; None: it has not.

        Raises:
            OtherRankError: another rank has stopped early, and this one has not.
            FinwhaleError: the last pieces have not arrived, and `error` is None.
        """
        self._stopped = True
        for thread in self._threads:
            thread.join()
        self._stack.close()
        late = None
        while error is None and late is None and not self._done.empty():
            found = self._done.get()
            late = found if isinstance(found, BaseException) else None
        stopped = error or late
        self._ranks.close(None if stopped is None else first_line(stopped))
        if late is not None:
            raise late
        if error is None and self._others_failed:
            raise OtherRankError("another rank has stopped loading")

    def _run(self) -> None:
        """The function of a reading thread. The iterating thread raises its errors."""
        lanes: list[Lane] = []
        try:
            self._ranks.begin_thread()
            for count, (piece, names) in enumerate(self._own_turns(), start=1):
                if piece.num_bytes:
                    if len(lanes) < PINNED_PIECES:
                        lanes.append(self._ranks.lane(self._piece_bytes))
                    lane = lanes[(count - 1) % len(lanes)]
                    lane.wait()
                    self._read(piece, lane.buffer)
                    lane.send(piece.num_bytes, self._division.parts(piece))
                if count % PIECES_A_CHECK == 0 and self._ranks.has_failed():
                    self._others_failed = True
                self._done.put(names)
                if self._others_failed:
                    break
            self._done.put(None)
        except BaseException as error:
            self._done.put(error)
        for lane in lanes:
            try:
                lane.wait()  # before its memory is freed
            except BaseException as error:
                self._done.put(error)

    def _own_turns(self) -> Iterator[Turn]:
        while not self._stopped:
            with self._lock:
                turn = next(self._turns, None)
            if turn is None:
                return
            yield turn

    def _read(self, piece: Piece, buffer: Bytes) -> None:
        target = buffer[: piece.num_bytes]
        fill(target, self._files, piece.file, piece.offset, partial(_name_at, piece))


def _name_at(piece: Piece, offset: int) -> str:
    """The name of the tensor at an offset in a piece."""
    return [info.name for info in piece.infos if info.offset <= piece.offset + offset][-1]
