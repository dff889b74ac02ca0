"""Connecting ranks: the self-check names a faulty rank, a missing rank is named in time."""

import gc
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from finwhale.distributed import connect as connecting
from finwhale.distributed.collectives import Alone, Collectives
from finwhale.distributed.connect import connect
from finwhale.distributed.cuda_ipc import IpcHandle
from finwhale.distributed.gloo import Gloo
from finwhale.distributed.nccl import FromZero, Nccl, new_group
from finwhale.distributed.peers import Peers
from finwhale.distributed.rank import ALONE, Rank
from finwhale.distributed.self_check import self_check
from finwhale.errors import FinwhaleError

from .ranks import run_ranks

CPU = torch.device("cpu")


def test_ranks_on_a_cpu_connect_over_gloo() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda i: connect(Rank(i, 2), CPU, store), range(2)))
    assert [type(collectives) for collectives in made] == [Gloo, Gloo]
    assert isinstance(connect(ALONE, CPU, store), Alone)


def test_ranks_count_those_of_their_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Peers().on_this_host() == 1
    hosts = threading.local()
    monkeypatch.setattr("socket.gethostname", lambda: hosts.name)
    store = HashStore()

    def count(index: int) -> int:
        hosts.name = ("one", "other", "one")[index]
        return Peers(Rank(index, 3), store).on_this_host()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(count, range(3))) == [2, 1, 2]


def test_a_rank_that_never_comes_is_named() -> None:
    with pytest.raises(FinwhaleError, match="rank 1 did not connect within 1 s"):
        connect(Rank(0, 2), CPU, HashStore(), timeout=timedelta(seconds=1))


def test_ranks_that_find_each_other_but_do_not_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(connecting, "_choose", lambda *_: release.wait(60))
    store = HashStore()
    store.set("finwhale.host/1", "here")
    with pytest.raises(FinwhaleError, match="rank 0 found the other ranks, but"):
        connect(Rank(0, 2), CPU, store, timeout=timedelta(seconds=0.1))
    release.set()


def test_symmetric_memory_of_a_process_that_has_connected_before() -> None:
    """torch's keys in an old process, whose numbers begin at 7, and in a new one.

    A PrefixStore calls the Python object from C++, as torch does.
    """
    store = HashStore()
    renumbered = FromZero(store)
    old, new = PrefixStore("a", renumbered), PrefixStore("a", store)
    for exchange in range(3):
        new.set(f"{exchange}/1", f"new {exchange}")
        old.set(f"{exchange + 7}/0", f"old {exchange}")
        old.wait([f"{exchange + 7}/1"], timedelta(seconds=5))
        assert old.get(f"{exchange + 7}/1") == b"new %d" % exchange
        assert new.get(f"{exchange}/0") == b"old %d" % exchange
    assert old.add("10", 1) + new.add("3", 1) == 3


def test_symmetric_memory_gets_the_store_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 takes the store of the group that it finds by the name."""

    class Nccl(c10d.ProcessGroupGloo):
        Options = SimpleNamespace  # type: ignore[assignment]

        def __init__(self, store: Store, rank: int, size: int, options: object) -> None:
            super().__init__(store, rank, size, timedelta(seconds=10))

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", Nccl, raising=False)
    handle_store = FromZero(HashStore())
    group = new_group(Rank(0, 1), HashStore(), "a group", timedelta(seconds=10), handle_store)
    assert c10d._resolve_process_group("a group").get_group_store() is handle_store
    c10d._unregister_process_group(group.group_name)


def test_the_store_of_symmetric_memory_lives_as_long_as_nccl() -> None:
    """Memory may be allocated later, and torch keeps no reference."""
    store = FromZero(HashStore())
    kept, group = weakref.ref(store), cast(Any, object())
    nccl = Nccl(Rank(0, 2), group, handle_store=store)
    del store
    gc.collect()
    assert kept() is not None
    del nccl
    gc.collect()
    assert kept() is None


class Faulty:
    """Collectives that change one value of what rank 1 sends."""

    beside_bytes = sys.maxsize

    def __init__(self, collectives: Collectives, *, sums: bool) -> None:
        self._collectives, self._sums = collectives, sums
        self.rank, self.check = collectives.rank, collectives.check

    def _changed(self, x: Tensor) -> Tensor:
        changed = x.clone()
        changed[-1] *= 2 if self.rank.index == 1 else 1
        return changed

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        return self._collectives.all_reduce(self._changed(x) if self._sums else x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return self._collectives.all_gather(x if self._sums else self._changed(x), dim)

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        return self._collectives.reduce_scatter_rows(x)

    def all_gather_rows(self, x: Tensor, num_rows: int) -> Tensor:
        return self._collectives.all_gather_rows(x, num_rows)


@pytest.mark.parametrize("sums", (False, True))
def test_the_self_check_names_a_faulty_rank(sums: bool) -> None:
    def work(collectives: Collectives) -> str:
        with pytest.raises(FinwhaleError) as raised:
            self_check(Faulty(collectives, sums=sums), CPU)
        return str(raised.value)

    for index, message in enumerate(run_ranks(4, work)):
        assert f"rank {index} received 1 of 32 wrong values from rank 1" in message


def test_why_ranks_cannot_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    lacking = connecting._lacking_access
    device = torch.device("cuda", 0)
    assert lacking(Rank(0, 2), device, ["a 0", "a 1"]) == ""
    assert "the GPU of rank 0 has no peer access to that of rank 1" in lacking(
        Rank(0, 2), device, ["a 0", "a 2"]
    )
    assert "different hosts" in lacking(Rank(0, 2), device, ["a 0", "b 0"])


def test_ranks_of_one_gpu_map_the_memory_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank opens handles that no other rank opens."""
    buffers: dict[str, torch.Tensor] = {}
    opened: list[str] = []

    def export_handle(buffer: torch.Tensor) -> tuple[str, IpcHandle]:
        name = f"{len(buffers)}-{buffer.data_ptr()}"
        buffers[name] = buffer
        values = {"size_bytes": len(buffer), "offset_bytes": 0, "counter_offset": 0}
        return "gpu", IpcHandle(memory=name.encode(), counter=b"", event=b"", waits=False, **values)

    def open_buffer(handles: dict[str, IpcHandle], device: torch.device) -> torch.Tensor:
        name = handles["gpu"].memory.decode()
        opened.append(name)
        return buffers[name]

    monkeypatch.setattr(connecting, "export_handle", export_handle)
    monkeypatch.setattr(connecting, "open_buffer", open_buffer)
    monkeypatch.setattr(connecting, "uuid_of", lambda device: "gpu")
    store, timeout = HashStore(), timedelta(seconds=10)

    def allocate(index: int) -> list[list[torch.Tensor]]:
        rank = Rank(index, 4)
        exchange = partial(connecting._exchange, rank, store, timeout)
        shared = connecting._shared_memory(rank, CPU, exchange)
        return [shared(64), shared(8)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(allocate, range(4)))
    for number in (0, 1):
        own = [memories[number][rank].data_ptr() for rank, memories in enumerate(found)]
        for memories in found:
            assert [memory.data_ptr() for memory in memories[number]] == own
    assert len(opened) == len(set(opened)) == 2 * 4 * 3


def test_a_rank_that_fails_ends_the_wait_of_another() -> None:
    """Before NCCL and Gloo would give up."""
    checks = iter(range(3))

    def check() -> None:
        if next(checks, None) is None:
            raise FinwhaleError("rank 1 has failed")

    with pytest.raises(FinwhaleError, match="rank 1 has failed"):
        connect(Rank(0, 2), CPU, HashStore(), timeout=timedelta(seconds=60), check=check)
