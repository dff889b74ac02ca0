"""Memory that can be freed and later allocated again at the same addresses.

Captured graphs contain addresses, and so do numpy's views on a CPU. An arena therefore keeps its
address range while its memory is freed: on a GPU by the driver's virtual memory management
(cuMemUnmap and cuMemMap), on a CPU by madvise.
"""

import ctypes
import mmap
import tempfile
import weakref
from typing import Any

import torch
from torch import Tensor

from finwhale.errors import ResourceError
from finwhale.non_owning import DeviceMemory

CHUNK_BYTES = 2**23
ALIGN = 256


class Arena:
    """Tensors whose memory is freed and allocated together.

    Attributes:
        mapped: whether the memory is allocated.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[_CpuChunk | _CudaChunk] = []
        self._used = 0
        self._saved: list[Any] = []
        self.mapped = True

    @property
    def num_bytes(self) -> int:
        return sum(chunk.bytes.nbytes for chunk in self._chunks)

    def empty(self, num_bytes: int) -> Tensor:
        """Allocate a uint8 tensor [num_bytes]."""
        begin = -(-self._used // ALIGN) * ALIGN
        if not self._chunks or begin + num_bytes > self._chunks[-1].bytes.nbytes:
            size = max(CHUNK_BYTES if num_bytes < CHUNK_BYTES // 2 else 1, num_bytes)
            new = _CpuChunk if self._device.type == "cpu" else _CudaChunk
            self._chunks.append(new(size, self._device))
            begin = 0
        self._used = begin + num_bytes
        return self._chunks[-1].bytes[begin : self._used]

    def adopt(self, tensors: list[Tensor]) -> None:
        """Move tensors into this arena. They remain the same objects."""
        moved: dict[int, Tensor] = {}
        for tensor in tensors:
            old = tensor.untyped_storage()
            size, address = old.nbytes(), old.data_ptr()
            if not size:
                continue
            if address not in moved:
                target = self.empty(size)
                target.copy_(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(old))
                moved[address] = target
            target = moved[address]
            offset = int(target.storage_offset()) // tensor.itemsize + tensor.storage_offset()
            tensor.set_(target.untyped_storage(), offset, tensor.size(), tensor.stride())
            del old
            if self._device.type == "cuda" and size >= CHUNK_BYTES:
                torch.cuda.empty_cache()

    def release(self, *, keep: bool) -> None:
        """Free the memory.

        Args:
            keep: save the contents in host memory, or on a CPU in a temporary file.
        """
        assert self.mapped
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if keep:
            self._saved = [self._save(chunk) for chunk in self._chunks]
        for chunk in self._chunks:
            chunk.unmap()
        self.mapped = False

    def restore(self) -> None:
        """Allocate the memory again, with the saved contents.

        Raises:
            ResourceError: the saved contents cannot be read, or the memory cannot be allocated.
        """
        assert not self.mapped
        for chunk in self._chunks:
            chunk.map()
        for chunk, saved in zip(self._chunks, self._saved, strict=False):
            if isinstance(saved, Tensor):
                chunk.bytes.copy_(saved)
            else:
                saved.seek(0)
                left = memoryview(chunk.bytes.numpy().data)
                while left:  # one call reads at most 2 GiB
                    count = saved.readinto(left)
                    if not count:
                        raise ResourceError("a temporary file lacks a part of the saved weights")
                    left = left[count:]
                saved.close()
        self._saved = []
        self.mapped = True

    def _save(self, chunk: "_CpuChunk | _CudaChunk") -> Any:
        if self._device.type == "cuda":
            return chunk.bytes.cpu()
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (`restore` closes it)
        left = memoryview(chunk.bytes.numpy().data)
        while left:  # one call writes at most 2 GiB
            left = left[file.write(left) :]
        return file


class _CpuChunk:
    """One range of addresses, with or without memory.

    Attributes:
        bytes: uint8 tensor of the whole range. It may be used only while the range is mapped.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def unmap(self) -> None:
        """Free the memory. Its contents are lost."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def map(self) -> None:
        """Allocate memory again, with undefined contents: the system does so at the first write."""


_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _CudaChunk:
    """See _CpuChunk."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._range = _Range(num_bytes, index)
        memory = DeviceMemory(self._range.address, self._range.num_bytes)
        self.bytes = torch.as_tensor(memory, device=torch.device("cuda", index))
        assert self.bytes.data_ptr() == self._range.address
        self.unmap, self.map = self._range.unmap, self._range.map
        # The memory lives as long as any tensor on it; at exit, the driver frees it.
        weakref.finalize(memory, self._range.free).atexit = False


class _Range:
    """A range of a GPU's addresses."""

    def __init__(self, num_bytes: int, index: int) -> None:
        self._driver, self._index = ctypes.CDLL("libcuda.so.1"), index
        location = _Location(_DEVICE, index)
        self._properties = _Properties(type=_PINNED, location=location)
        self._access = _Access(location, _READ_WRITE)
        torch.cuda.synchronize(index)  # the driver's context must exist
        unit, address = ctypes.c_size_t(), ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), properties, 0)
        self.num_bytes = -(-num_bytes // unit.value) * unit.value
        self._size = ctypes.c_size_t(self.num_bytes)
        zero, anywhere, flags = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), self._size, zero, anywhere, flags)
        self._address, self.address = address, address.value
        self._handle: ctypes.c_uint64 | None = None
        self.map()

    def map(self) -> None:
        handle, flags = ctypes.c_uint64(), ctypes.c_uint64(0)
        properties = ctypes.byref(self._properties)
        self._call("cuMemCreate", ctypes.byref(handle), self._size, properties, flags)
        zero, one = ctypes.c_size_t(0), ctypes.c_size_t(1)
        self._call("cuMemMap", self._address, self._size, zero, handle, flags)
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(self._access), one)
        self._handle = handle

    def unmap(self) -> None:
        handle, self._handle = self._handle, None
        self._call("cuMemUnmap", self._address, self._size)
        self._call("cuMemRelease", handle)

    def free(self) -> None:
        torch.cuda.synchronize(self._index)
        if self._handle is not None:
            self.unmap()
        self._call("cuMemAddressFree", self._address, self._size)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise ResourceError(f"the GPU's memory cannot be mapped: {name} failed with {code}")
