"""Lets the ranks of a host write to each other's weights while they load, over CUDA IPC."""

import ctypes
import json
import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor

from finwhale.distributed.cuda_ipc import IpcHandle, discard, export_handle, open_buffer, uuid_of
from finwhale.distributed.peers import Peers
from finwhale.errors import FinwhaleError, OtherRankError, first_line
from finwhale.non_owning import non_owning_view
from finwhale.weights.destinations import Destinations
from finwhale.weights.staging import Bytes

logger = logging.getLogger(__name__)

# The fault of a rank that does not know why another one gave it no handles.
OTHER_ALLOCATIONS = "another rank has other allocations, or cannot share them"


class RankCopy(NamedTuple):
    """The part of a read that belongs to one rank.

    Attributes:
        rank: the rank whose destination takes it.
        to: offset in the destination, in bytes. The rows lie there without gaps.
        begin: offset of the first row in the read.
        rows, width: the number of rows, and the bytes of each.
        pitch: bytes in the read from one row to the next.
    """

    rank: int
    to: int
    begin: int
    rows: int
    width: int
    pitch: int


class PiecePart(NamedTuple):
    """A tensor, or some rows of one, in a piece.

    Attributes:
        begin: its offset in the piece.
        copies: every rank's part of it.
    """

    name: str
    begin: int
    copies: Sequence[RankCopy]


class JointRanks:
    """The ranks of a host, each on its own GPU, as one of them sees them.

    Every rank calls `open`. If it returns True, every rank later calls `close`.

    Args:
        peers: all ranks of the model, each in its own process.
        device: this rank's GPU.

    Attributes:
        index, size: this rank's number, and the number of ranks.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self.index, self.size = peers.rank.index, peers.rank.size
        self._own = Destinations()
        # For each tensor in `_own.memories`: the address of the allocation that holds it, and the
        # offset of the tensor in this allocation.
        self._within: list[tuple[int, int]] = []
        # All ranks have the same allocations. By the address of one of this rank's: the addresses
        # of the same one on every rank, as this rank has mapped them.
        self._addresses: dict[int, list[int]] = {}
        self._mapped = threading.Condition()
        # The allocations that this rank has not mapped yet: the address of its own, and the handles
        # of the other ranks' ones.
        self._waiting: deque[tuple[int, list[IpcHandle]]] = deque()
        self._opened: list[Tensor] = []
        # This rank's allocations, until no other rank has mapped them.
        self._lent: list[Tensor] = []
        self._mapper: threading.Thread | None = None
        self._fault, self._failed_key = "", ""

    def open(self, destinations: Destinations) -> bool:
        """Tell the other ranks this rank's destinations.

        Mapping an allocation takes about a millisecond, so this maps only the first one of each
        rank. A thread maps the others while reading begins.

        Args:
            destinations: this rank's own. Those of the other ranks have the same names and sizes.

        Returns:
            False if some rank cannot write to the memory of another one.
        """
        if self._peers.on_this_host() < self.size:
            return False
        self._failed_key = self._peers.new_key("joint_ranks.failed")
        # Earlier work may still use the memory that other ranks write to.
        torch.cuda.synchronize(self._device)
        found = {memory.untyped_storage().data_ptr(): memory for memory in destinations.memories}
        sent = self._exchange_handles(found.values())
        if not self._fault and found:
            for number, address in enumerate(found):
                self._waiting.append((address, [handles[number] for handles in sent]))
            self._map_next()
        faults = [text for text in self._peers.gather_text(self._fault) if text]
        if faults:
            if self.index == 0:
                cause = min(faults, key=lambda text: text == OTHER_ALLOCATIONS)
                logger.warning("each rank reads its weights alone: %s", cause)
            self._release()
            self._peers.barrier()  # now no other rank has mapped this rank's allocations
            self._lent = []
            return False
        self._own = destinations
        self._within = [_within(memory) for memory in destinations.memories]
        self._mapper = threading.Thread(target=self._map_all, name="joint ranks", daemon=True)
        self._mapper.start()
        return True

    def lane(self, piece_bytes: int) -> "Lane":
        """A new lane, for one thread at a time."""
        return Lane(self, self._device, piece_bytes)

    def begin_thread(self) -> None:
        """Prepare a thread for the use of lanes."""
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()  # the driver's context is now the thread's own

    def addresses(self, name: str) -> list[int]:
        """The addresses of every rank's destination with this name."""
        memory, begin, _ = self._own.parts[name]
        own, offset = self._within[memory]
        found = self._addresses.get(own)
        if found is None:
            with self._mapped:
                self._mapped.wait_for(lambda: own in self._addresses or self._fault)
            if self._fault:
                raise FinwhaleError(self._fault)
            found = self._addresses[own]
        offset += begin
        return [address + offset for address in found]

    def has_failed(self) -> bool:
        """Whether some rank has failed, so that the others can stop reading."""
        store = self._peers.store
        return store is not None and store.check([self._failed_key])

    def close(self, fault: str | None) -> None:
        """Wait until every rank has written all its parts, or has stopped.

        Args:
            fault: why this rank has stopped early, in one line; None: it has not.

        Raises:
            OtherRankError: another rank has stopped early, and this one has not.
        """
        store = self._peers.store
        assert store is not None and fault != ""
        if fault is not None:
            store.set(self._failed_key, fault)
        self._release()
        faults = self._peers.gather_text(fault or "")
        self._lent = []
        for rank, text in enumerate(faults):
            if text and fault is None:
                raise OtherRankError(f"rank {rank}: {text}")

    def _exchange_handles(self, tensors: Collection[Tensor]) -> list[list[IpcHandle]]:
        """The other ranks' handles of their allocations, in rank order; empty after a fault.

        Args:
            tensors: a tensor in each of this rank's allocations.
        """
        others = [rank for rank in range(self.size) if rank != self.index]
        # One process may open a handle, so each other rank gets its own.
        given: dict[int, list[IpcHandle]] = {rank: [] for rank in others}
        try:
            self._lent = [_allocation(tensor) for tensor in tensors]
            for rank, allocation in product(others, self._lent):
                given[rank].append(export_handle(allocation)[1])
        except (RuntimeError, TypeError, ValueError) as error:
            self._fault = first_line(error)
            _discard_all(given.values())
            given = {}
        forms = {rank: [handle.to_json() for handle in some] for rank, some in given.items()}
        sent = [json.loads(text) for text in self._peers.gather_text(json.dumps(forms))]
        lists = [sent[rank].get(str(self.index), []) for rank in others]
        handles = [[IpcHandle.from_json(form) for form in forms] for forms in lists]
        sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        if not self._fault and any([h.size_bytes for h in some] != sizes for some in handles):
            self._fault = OTHER_ALLOCATIONS
        if self._fault:
            _discard_all(handles)
            return []
        return handles

    def _map_all(self) -> None:
        """The mapping thread's function. The threads that need an allocation raise its errors."""
        try:
            torch.cuda.set_device(self._device)
            while self._waiting and not self._fault:
                self._map_next()
        except BaseException as error:
            self._set_fault(first_line(error))

    def _map_next(self) -> None:
        """Map the next allocation of every other rank."""
        address, handles = self._waiting.popleft()
        uuid, addresses = uuid_of(self._device), []
        for number, handle in enumerate(handles):
            try:
                allocation = open_buffer({uuid: handle}, self._device)
            except Exception as error:
                self._waiting.appendleft((address, handles[number:]))
                self._set_fault(first_line(error))
                return
            self._opened.append(allocation)
            addresses.append(allocation.data_ptr())
        addresses.insert(self.index, address)
        with self._mapped:
            self._addresses[address] = addresses
            self._mapped.notify_all()

    def _set_fault(self, fault: str) -> None:
        """Stop the mapping thread, and those that wait for it."""
        with self._mapped:
            self._fault = self._fault or fault
            self._mapped.notify_all()

    def _release(self) -> None:
        """Close the other ranks' allocations, and give up the handles that were not opened."""
        self._set_fault("closed")
        if self._mapper is not None:
            self._mapper.join()
        _discard_all(handles for _, handles in self._waiting)
        self._waiting.clear()
        self._addresses.clear()
        self._own, self._within = Destinations(), []
        self._opened, self._mapper, self._fault = [], None, ""


class _Side(ctypes.Structure):
    """The source or the destination of a CUDA_MEMCPY2D."""

    _fields_ = (
        ("x_bytes", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("memory_type", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class _Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source", _Side),
        ("target", _Side),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


_DEVICE_MEMORY, _NOT_READY = 2, 600  # CU_MEMORYTYPE_DEVICE, CUDA_ERROR_NOT_READY


class Lane:
    """Sends pieces, one after the other, to the destinations of all ranks, by calls of the driver.

    The calls keep Python's lock: they are short, and each release costs more, because the other
    threads wait for the lock. With torch, thousands of small copies would take longer than reading.

    Attributes:
        buffer: uint8 [piece_bytes]; the caller fills it with a piece.
    """

    buffer: Bytes

    def __init__(self, ranks: JointRanks, device: torch.device, piece_bytes: int) -> None:
        self._ranks = ranks
        self._host = torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=True)
        self.buffer = self._host.numpy()
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            self._piece = torch.empty(piece_bytes, dtype=torch.uint8, device=device)
        self._done = torch.cuda.Event()
        self._done.record(self._stream)
        self._rows = _Memcpy2D()
        self._source, self._target = self._rows.source, self._rows.target
        self._source.memory_type = self._target.memory_type = _DEVICE_MEMORY
        self._driver = _driver()

    def wait(self) -> None:
        """Wait until the last piece has left the buffer."""
        code = self._driver.cuEventQuery(self._done.cuda_event)
        if code == _NOT_READY:
            self._done.synchronize()
        else:
            _check(code)

    def send(self, num_bytes: int, parts: Iterable[PiecePart]) -> None:
        """Send the piece in the buffer to the device, and from there to the destinations."""
        driver, stream, piece = self._driver, self._stream.cuda_stream, self._piece.data_ptr()
        try:
            _check(driver.cuMemcpyHtoDAsync_v2(piece, self._host.data_ptr(), num_bytes, stream))
            for name, begin, copies in parts:
                addresses = self._ranks.addresses(name)
                for rank, to, start, rows, width, pitch in copies:
                    target, source = addresses[rank] + to, piece + begin + start
                    if rows == 1:
                        _check(driver.cuMemcpyDtoDAsync_v2(target, source, width, stream))
                    else:
                        self._source.device, self._source.pitch = source, pitch
                        self._target.device, self._target.pitch = target, width
                        self._rows.width, self._rows.height = width, rows
                        _check(driver.cuMemcpy2DAsync_v2(ctypes.byref(self._rows), stream))
        finally:
            _check(driver.cuEventRecord(self._done.cuda_event, stream))


@cache
def _driver() -> ctypes.PyDLL:
    """The driver's functions, which keep Python's lock."""
    driver = ctypes.PyDLL("libcuda.so.1")
    address, size, pointer = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    driver.cuMemcpyHtoDAsync_v2.argtypes = address, pointer, size, pointer
    driver.cuMemcpyDtoDAsync_v2.argtypes = address, address, size, pointer
    driver.cuMemcpy2DAsync_v2.argtypes = pointer, pointer
    driver.cuEventRecord.argtypes = pointer, pointer
    driver.cuEventQuery.argtypes = (pointer,)
    return driver


def _check(code: int) -> None:
    if code:
        raise FinwhaleError(f"the GPU cannot copy weights: error {code} of the driver")


def _discard_all(handles: Iterable[Iterable[IpcHandle]]) -> None:
    for handle in chain.from_iterable(handles):
        discard(handle)


def _within(tensor: Tensor) -> tuple[int, int]:
    """The address of a tensor's allocation, and the tensor's offset in it."""
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.data_ptr() - address


def _allocation(tensor: Tensor) -> Tensor:
    """The allocation of which a tensor is a view, as uint8.

    torch warns if a process ends while a tensor that it has shared still exists. Weights often do,
    so the ranks share another tensor on the same memory. It does not keep the memory: if another
    rank is lost, this process must end before it uses the memory again.
    """
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return non_owning_view(whole.set_(tensor.untyped_storage()))
