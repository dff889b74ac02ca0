"""Shares a buffer of a GPU with other processes of the host, over CUDA IPC.

A handle is plain data: torch's description of the buffer's memory. A client sends it as JSON, not
pickled, because unpickling can run code.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from finwhale.errors import FinwhaleError, RequestError, first_line

MAX_HANDLE_BYTES = 4096  # torch's handles have less than 200
MAX_SIZE = 2**48


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """The memory of a buffer, as torch describes it (`UntypedStorage._share_cuda_`, in this order).

    The owner of the memory must keep the buffer until the receiver has answered.

    Attributes:
        memory: CUDA's handle of the allocation.
        size_bytes, offset_bytes: size and offset of the buffer in the allocation.
        counter, counter_offset: torch's reference count of the receivers.
        event: CUDA's handle of the event after which the buffer has its contents.
        waits: whether the receiver must wait for the event.
    """

    memory: bytes
    size_bytes: int
    offset_bytes: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool

    def to_json(self) -> dict[str, Any]:
        """The handle as a JSON object; bytes are in base64."""
        return {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "IpcHandle":
        """The handle of a JSON object, in which every field has its type.

        Raises:
            RequestError: the bytes are not base64, or a value is out of range.
        """
        values = dict(given)
        for name in ("memory", "counter", "event"):
            try:
                values[name] = base64.b64decode(given[name], validate=True)
            except (binascii.Error, ValueError) as error:
                raise RequestError(f"{name} of an IPC handle is not base64") from error
            if len(values[name]) > MAX_HANDLE_BYTES:
                raise RequestError(
                    f"{name} of an IPC handle has more than {MAX_HANDLE_BYTES} bytes"
                )
        for name in ("size_bytes", "offset_bytes", "counter_offset"):
            if not 0 <= given[name] < MAX_SIZE:
                raise RequestError(f"{name} of an IPC handle is out of range: {given[name]}")
        return cls(**values)


def export_handle(buffer: Tensor) -> tuple[str, IpcHandle]:
    """The UUID of a buffer's GPU, and a handle of the buffer.

    One process may open the handle, once. The buffer must not change until then.

    Args:
        buffer: contiguous, uint8, on a GPU.
    """
    assert buffer.is_cuda and buffer.is_contiguous() and buffer.dtype == torch.uint8
    assert buffer.storage_offset() == 0 and buffer.nbytes == buffer.untyped_storage().nbytes()
    _, *values = buffer.untyped_storage()._share_cuda_()
    return uuid_of(buffer.device), IpcHandle(*values)


def open_buffer(handles: Mapping[str, IpcHandle], device: torch.device) -> Tensor:
    """The buffer on this GPU, as uint8. It shares the memory of the other process.

    Args:
        handles: handles by the UUID of their GPU.

    Raises:
        FinwhaleError: there is no handle for this GPU, or CUDA cannot open it.
    """
    handle = handle_of(handles, uuid_of(device))
    try:
        # A device without an index means the current device.
        with torch.cuda.device(device):
            storage = torch.UntypedStorage._new_shared_cuda(
                torch.cuda.current_device(), *astuple(handle)
            )
    except RuntimeError as error:
        reason = first_line(error)
        raise FinwhaleError(f"cannot open the IPC handle for {device}: {reason}") from error
    return _as_bytes(storage, device)


def discard(handle: IpcHandle) -> None:
    """Give up a handle without opening it. Otherwise its owner could never free the memory."""
    torch.UntypedStorage._release_ipc_counter_cuda(handle.counter, handle.counter_offset)


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def uuid_of(device: torch.device) -> str:
    """The UUID of a GPU. Raises FinwhaleError on a CPU."""
    if device.type != "cuda":
        raise FinwhaleError(f"CUDA IPC needs a GPU, but this engine runs on {device}")
    return str(torch.cuda.get_device_properties(device).uuid)


def handle_of(handles: Mapping[str, IpcHandle], uuid: str) -> IpcHandle:
    """The handle of the GPU with a UUID. Raises FinwhaleError if there is none."""
    for name, handle in handles.items():
        if name.removeprefix("GPU-").lower() == uuid.removeprefix("GPU-").lower():
            return handle
    known = ", ".join(sorted(handles)) or "none"
    raise FinwhaleError(f"there is no IPC handle for this rank's GPU {uuid}, only for: {known}")
