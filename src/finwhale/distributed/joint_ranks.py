"""Lets the ranks of a host write to each other's weights while they load, over CUDA IPC."""

import ctypes
import json
import logging
from collections.abc import Iterable, Mapping
from functools import cache

import torch
from torch import Tensor

from finwhale.checkpoint.joint import Part
from finwhale.distributed.cuda_ipc import IpcHandle, discard, open_buffer, share, uuid_of
from finwhale.distributed.peers import Peers
from finwhale.errors import CheckpointError, FinwhaleError

logger = logging.getLogger(__name__)

_FAILED = "finwhale.joint_ranks/failed"


class IpcJointRanks:
    """Implements checkpoint.joint.JointRanks for GPUs.

    Args:
        peers: all ranks of the model, each in its own process.
        device: this rank's GPU.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers, self._device = peers, device
        self._own: Mapping[str, Tensor] = {}
        # By the address of each memory of this rank: the memory's addresses on all ranks.
        self._addresses: dict[int, list[int]] = {}
        self._opened: list[list[Tensor]] = []

    @property
    def index(self) -> int:
        return self._peers.rank.index

    @property
    def size(self) -> int:
        return self._peers.rank.size

    def open(self, places: Mapping[str, Tensor]) -> bool:
        """See JointRanks."""
        if self.size == 1 or self._peers.on_this_host() < self.size:
            return False
        # Earlier work may still use the memory that other ranks write to.
        torch.cuda.synchronize(self._device)
        storages = {place.untyped_storage().data_ptr(): place for place in places.values()}
        own = [_whole_memory(place) for place in storages.values()]
        ranks = self._map(own)
        if ranks is None:
            return False
        self._own, self._opened = places, ranks
        for number, address in enumerate(storages):
            self._addresses[address] = [memories[number].data_ptr() for memories in ranks]
        return True

    def lane(self, piece_bytes: int) -> "_IpcLane":
        """See JointRanks."""
        return _IpcLane(self._device, piece_bytes, self._own, self._addresses)

    def begin_thread(self) -> None:
        """See JointRanks."""
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize()  # the driver's context is now the thread's own

    def has_failed(self) -> bool:
        """See JointRanks."""
        store = self._peers.store
        return store is not None and store.check([_FAILED])

    def close(self, fault: str) -> None:
        """See JointRanks."""
        store = self._peers.store
        assert store is not None
        if fault:
            store.set(_FAILED, fault)
        self._own, self._opened = {}, []  # closes the other ranks' memory
        self._addresses.clear()
        faults = self._peers.gather_text(fault)
        for rank, text in enumerate(faults):
            if text and not fault:
                raise CheckpointError(f"rank {rank}: {text}")

    def _map(self, own: list[Tensor]) -> list[list[Tensor]] | None:
        """The given tensors of every rank, in rank order; None if one cannot be mapped."""
        me, others = self.index, [peer for peer in range(self.size) if peer != self.index]
        # One process may open a handle, so each other rank gets its own.
        given = {peer: [share(memory)[1].to_json() for memory in own] for peer in others}
        sent = [json.loads(text) for text in self._peers.gather_text(json.dumps(given))]
        handles = {
            peer: [IpcHandle.from_json(one) for one in sent[peer][str(me)]] for peer in others
        }
        fault, uuid = "", uuid_of(self._device)
        ranks: list[list[Tensor]] = [[] for _ in range(self.size)]
        ranks[me] = own
        for peer in others:
            for handle in handles[peer]:
                if fault:
                    discard(handle)
                    continue
                try:
                    ranks[peer].append(open_buffer({uuid: handle}, self._device))
                except FinwhaleError as error:
                    fault = str(error)
                    discard(handle)
        faults = self._peers.gather_text(fault)
        lacking = next((text for text in faults if text), None)
        if lacking is None:
            return ranks
        if me == 0:
            logger.warning("each rank reads its weights alone: %s", lacking)
        del ranks
        self._peers.barrier()  # the other ranks have closed this rank's memory
        return None


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


class _IpcLane:
    """Implements checkpoint.joint.Lane by calls of the driver.

    The calls keep Python's lock: they are short, and each release costs more, because the other
    threads wait for the lock. With torch, thousands of small copies would take longer than reading.

    Args:
        places: this rank's destinations by name.
        addresses: by the address of a memory of this rank, its addresses on all ranks.
    """

    def __init__(
        self,
        device: torch.device,
        piece_bytes: int,
        places: Mapping[str, Tensor],
        addresses: Mapping[int, list[int]],
    ) -> None:
        self._places, self._addresses = places, addresses
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
        """See Lane."""
        code = self._driver.cuEventQuery(self._done.cuda_event)
        if code == _NOT_READY:
            self._done.synchronize()
        else:
            _check(code)

    def send(self, num_bytes: int, parts: Iterable[Part]) -> None:
        """See Lane."""
        driver, stream, piece = self._driver, self._stream.cuda_stream, self._piece.data_ptr()
        _check(driver.cuMemcpyHtoDAsync_v2(piece, self._host.data_ptr(), num_bytes, stream))
        for name, begin, copies in parts:
            place = self._places[name]
            memory = place.untyped_storage().data_ptr()
            addresses, offset = self._addresses[memory], place.data_ptr() - memory
            for rank, to, start, rows, width, pitch in copies:
                target, source = addresses[rank] + offset + to, piece + begin + start
                if rows == 1:
                    _check(driver.cuMemcpyDtoDAsync_v2(target, source, width, stream))
                else:
                    self._source.device, self._source.pitch = source, pitch
                    self._target.device, self._target.pitch = target, width
                    self._rows.width, self._rows.height = width, rows
                    _check(driver.cuMemcpy2DAsync_v2(ctypes.byref(self._rows), stream))
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


def _whole_memory(tensor: Tensor) -> Tensor:
    """The memory of which a tensor is a view, as uint8."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage())
