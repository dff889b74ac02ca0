"""Workers that a launcher has placed: where they are, who may connect, and what their end does."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import pytest

from finwhale import FinwhaleError
from finwhale.config import EngineConfig
from finwhale.distributed import hosts
from finwhale.distributed.hosts import Introduction, Invitation, RemoteProcesses, WorkerListener
from finwhale.distributed.rank import Placement, Rank, StoreAddress
from finwhale.engine.ranks.devices import device_kind

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def introduction(index: int, plans: bool = False) -> Introduction:
    return Introduction(index, plans, "host", 0, os.getpid())


def test_a_placement_is_found_in_the_environment() -> None:
    placement = Placement.find(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    store = StoreAddress("node0", 29500, "finwhale/2")
    assert placement == Placement(Rank(3, 4), 1, store, serves_store=True)
    agent = Placement.find(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None and not agent.serves_store
    alone = Placement.find(TORCHRUN | {"LOCAL_WORLD_SIZE": "4"})
    assert alone is not None and alone.store.host == "127.0.0.1"


def test_one_host_listens_on_loopback() -> None:
    for host, loopback in (("127.0.0.1", True), ("localhost", True), ("node0", False)):
        with WorkerListener(host)._listener as listener:
            assert (listener.getsockname()[0] == "127.0.0.1") == loopback


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "0", "WORLD_SIZE": "2"}, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}],
)
def test_a_process_alone_has_no_placement(environment: Mapping[str, str]) -> None:
    assert Placement.find(environment) is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"RANK": "four"}, "in the environment: invalid"), ({"RANK": "4"}, "not below WORLD_SIZE 4")],
)
def test_a_wrong_environment_is_refused(wrong: Mapping[str, str], message: str) -> None:
    with pytest.raises(FinwhaleError, match=message):
        Placement.find({**TORCHRUN, **wrong})


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({"tensor_parallel_size": 2}, 4, "tensor_parallel_size is 2, but the launcher has placed"),
        ({"data_parallel_size": 4}, 2, "data_parallel_size is 4, but .* 2 ranks: set it to 2"),
        ({}, 3, "1, 2, 4 or 8 ranks, but the launcher has placed 3"),
        ({"device": "cuda:0,1"}, 2, "use CUDA_VISIBLE_DEVICES"),
    ],
)
def test_options_that_contradict_the_launcher(
    options: Mapping[str, object], size: int, message: str
) -> None:
    with pytest.raises(FinwhaleError, match=message):
        device_kind(EngineConfig(**options), size)


LOADED: list[str] = []


def load(what: str) -> None:
    LOADED.append(what)


class Trap:
    """Its pickle says that it was loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, ...]]:
        return load, ("trap",)


def test_only_workers_with_the_secret_are_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a wrong secret, nor bytes that are no handshake, nor silence keeps others out."""
    monkeypatch.setattr(hosts, "HANDSHAKE_S", 3)
    listener = WorkerListener("127.0.0.1")
    invitation = listener.invitation
    wrong = Invitation(invitation.host, invitation.port, b"x" * 32)
    with ThreadPoolExecutor() as pool:
        received = pool.submit(listener.receive, 2)
        silent = socket.create_connection(("127.0.0.1", invitation.port))
        stray = socket.create_connection(("127.0.0.1", invitation.port))
        data = pickle.dumps(Trap())
        stray.sendall(len(data).to_bytes(4, "big") + data)
        with pytest.raises(AuthenticationError):
            hosts._enter(wrong, introduction(1))
        for index, plans in ((7, False), (1, False), (1, False), (1, True)):
            hosts._enter(invitation, introduction(index, plans))
        (worker,) = received.result(120)
    assert worker.introduction == introduction(1)
    assert not LOADED
    for end in (silent, stray):
        end.close()


def test_a_missing_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "CONNECT_S", 0.5)
    with pytest.raises(FinwhaleError, match=r"not connected for 0 s: rank 1, rank 2"):
        WorkerListener("127.0.0.1").receive(3)


@pytest.fixture
def connected() -> tuple[RemoteProcesses, hosts.RemoteWorker, list]:
    listener = WorkerListener("127.0.0.1")
    with ThreadPoolExecutor() as pool:
        received = pool.submit(listener.receive, 2)
        ends = [hosts._enter(listener.invitation, introduction(1, plans)) for plans in (0, 1)]
        (worker,) = received.result(120)
    return RemoteProcesses(["cpu"], [worker]), worker, ends


def test_plans_and_heartbeats_arrive(connected: tuple) -> None:
    processes, worker, (_, plans) = connected
    messages = [b"", b"x", b"y" * 300_000]
    line = hosts._PlanInbox(plans)
    writer = threading.Thread(target=lambda: [processes.write(m, pytest.fail) for m in messages])
    writer.start()
    assert [line.read() for _ in messages] == messages
    writer.join(120)
    assert worker.beats() == 0
    for _ in range(3):
        line.beat()
    end = time.monotonic() + 120
    while worker.beats() < 3:
        assert time.monotonic() < end
    assert not worker.wait(0.01)
    plans.close()
    assert worker.wait(120)


def test_a_worker_that_reads_nothing_holds_up_the_writer_until_it_is_killed(
    connected: tuple,
) -> None:
    class GivenUpError(Exception):
        pass

    def give_up() -> None:
        raise GivenUpError

    processes, worker, (control, _) = connected
    killed = threading.Event()

    def kill() -> None:
        killed.set()
        worker.kill()

    threading.Timer(0.5, kill).start()
    with pytest.raises(GivenUpError):
        while True:
            processes.write(b"x" * 2**20, give_up)
    assert killed.is_set()
    assert worker.wait(None)
    with pytest.raises((EOFError, OSError)):
        control.recv_bytes()
