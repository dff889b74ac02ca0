"""Handles of CUDA IPC: plain data, chosen by the GPU's UUID. tests/gpu opens real ones."""

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from finwhale import FinwhaleError, RequestError
from finwhale.distributed import cuda_ipc
from finwhale.distributed.cuda_ipc import IpcHandle, handle_of, open_buffer, uuid_of

HANDLE = IpcHandle(
    memory=bytes(range(66)),
    size_bytes=1 << 20,
    offset_bytes=512,
    counter=b"/torch_1_2",
    counter_offset=3,
    event=bytes(64),
    waits=True,
)
UUID = "8f1c2a3e-0000-4a5b-8c6d-7e8f90a1b2c3"


def test_a_handle_travels_as_json() -> None:
    assert IpcHandle.from_json(json.loads(json.dumps(HANDLE.to_json()))) == HANDLE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": "not base64!"}, "memory of an IPC handle is not base64"),
        ({"event": "é"}, "event of an IPC handle is not base64"),
        ({"counter": "AAAA" * 2000}, "counter of an IPC handle has more than"),
        ({"size_bytes": -1}, "size_bytes of an IPC handle is out of range"),
        ({"offset_bytes": 2**60}, "offset_bytes of an IPC handle is out of range"),
    ],
)
def test_a_wrong_handle_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        IpcHandle.from_json(HANDLE.to_json() | change)


def test_the_handle_of_a_gpu_is_chosen_by_its_uuid() -> None:
    other = replace(HANDLE, size_bytes=2)
    handles = {"GPU-" + UUID.upper(): HANDLE, "0" * 8: other}
    assert handle_of(handles, UUID) is HANDLE
    assert handle_of({UUID: other}, f"GPU-{UUID}") is other
    with pytest.raises(FinwhaleError, match=rf"GPU {UUID}, only for: 0000"):
        handle_of({"0" * 8: other}, UUID)
    with pytest.raises(FinwhaleError, match="only for: none"):
        handle_of({}, UUID)


def test_a_cpu_has_no_uuid() -> None:
    with pytest.raises(FinwhaleError, match="needs a GPU"):
        uuid_of(torch.device("cpu"))


def test_the_storage_is_opened_on_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own function gets the fields in its order, and the device of this process."""
    given: list[Any] = []

    def new(*arguments: Any) -> torch.UntypedStorage:
        given.extend(arguments)
        return torch.UntypedStorage(5)

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(cuda_ipc, "uuid_of", lambda device: UUID)
    monkeypatch.setattr(cuda_ipc, "_as_bytes", lambda storage, device: storage.nbytes())
    assert open_buffer({UUID: HANDLE}, torch.device("cuda:3")) == 5
    assert given == [
        3,
        HANDLE.memory,
        HANDLE.size_bytes,
        HANDLE.offset_bytes,
        HANDLE.counter,
        HANDLE.counter_offset,
        HANDLE.event,
        HANDLE.waits,
    ]

    def fail(*_: Any) -> torch.UntypedStorage:
        raise RuntimeError("CUDA error: invalid resource handle\nmore lines")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", fail)
    with pytest.raises(FinwhaleError, match="cannot open the IPC handle for cuda:3: CUDA error"):
        open_buffer({UUID: HANDLE}, torch.device("cuda:3"))
