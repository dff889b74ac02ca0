"""The server's side of the pipe, with an engine that is played by the test."""

import asyncio
import heapq
import itertools
import signal
import threading
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finwhale.demo import DEMO_PATH
from finwhale.errors import EngineDeadError, RequestError
from finwhale.request import SamplingParams
from finwhale.server.grammars.check import GrammarChecker
from finwhale.server.link.client import EngineClient
from finwhale.server.link.wire import (
    Abort,
    Accepted,
    Add,
    Delta,
    EngineFailed,
    Ready,
    Refused,
    Step,
    Stop,
)
from finwhale.server.run import end_processes

READY = Ready(
    max_model_len=100, max_num_seqs=4, max_num_batched_tokens=64, vocab_size=50, bos_token_id=0
)


async def started() -> tuple[EngineClient, Connection]:
    ours, theirs = Pipe()
    client = EngineClient(ours)
    theirs.send(READY)
    assert await client.start() == READY
    return client, theirs


async def received(engine: Connection) -> object:
    return await asyncio.to_thread(engine.recv)


async def closed(client: EngineClient, engine: Connection) -> None:
    closing = asyncio.ensure_future(client.close())
    while not isinstance(await received(engine), Stop):
        pass
    engine.close()
    await closing


def delta(request_id: str, token: int, last: bool = True) -> Delta:
    return Delta(request_id, 0, [token], "x", finish_reason="stop" if last else None)


def test_tokens_may_come_before_the_last_prompt_is_taken() -> None:
    async def run() -> None:
        client, engine = await started()
        generation = client.submit([[1], [2]], Add("", (), SamplingParams()))
        first, second = [await received(engine) for _ in range(2)]
        assert isinstance(first, Add) and isinstance(second, Add)
        engine.send(Accepted(first.request_id))
        engine.send(Step([delta(first.request_id, 7, last=False)]))
        engine.send(Step([delta(first.request_id, 8)]))
        engine.send(Accepted(second.request_id))
        engine.send(Step([delta(second.request_id, 9)]))
        await asyncio.wait_for(generation.accepted(), 5)
        found = [(d.index, d.token_ids) async for d in generation]
        assert found == [(0, [7]), (0, [8]), (1, [9])]
        assert client.num_sequences == 0
        await closed(client, engine)

    asyncio.run(run())


def test_a_prompt_that_is_refused() -> None:
    async def run() -> None:
        client, engine = await started()
        generation = client.submit([[1], [2]], Add("", (), SamplingParams(n=3)))
        first, second = [await received(engine) for _ in range(2)]
        assert isinstance(first, Add) and isinstance(second, Add)
        engine.send(Accepted(first.request_id))
        engine.send(Refused(second.request_id, "no"))
        with pytest.raises(RequestError, match="no"):
            await generation.accepted()
        assert client.num_sequences == 3
        generation.cancel()
        assert client.num_sequences == 0
        assert await received(engine) == Abort(first.request_id)
        await closed(client, engine)

    asyncio.run(run())


def test_an_engine_that_goes_fails_everything() -> None:
    async def run() -> None:
        client, engine = await started()
        told = asyncio.Event()
        client.on_failure = told.set
        generation = client.submit([[1]], Add("", (), SamplingParams()))
        add = await received(engine)
        assert isinstance(add, Add)
        engine.send(Accepted(add.request_id))
        await generation.accepted()
        engine.send(EngineFailed("worn out"))
        with pytest.raises(EngineDeadError, match="worn out"):
            await anext(aiter(generation))
        await told.wait()
        assert client.failure == "worn out" and not client.alive
        with pytest.raises(EngineDeadError, match="worn out"):
            client.submit([[1]], Add("", (), SamplingParams()))
        engine.close()
        await client.close()

    asyncio.run(run())


class DeafProcess:
    """A process that ends only when it is killed."""

    pid = exitcode = None

    def __init__(self) -> None:
        self.killed = threading.Event()

    def join(self, timeout: float | None = None) -> None:
        self.killed.wait()

    def is_alive(self) -> bool:
        return not self.killed.is_set()

    def kill(self) -> None:
        self.killed.set()


def test_an_engine_that_is_not_ready_is_killed() -> None:
    async def run() -> None:
        ours, theirs = Pipe()
        process = DeafProcess()
        client = EngineClient(ours, process)
        starting = asyncio.ensure_future(client.start())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(client.close())
        killed = await asyncio.to_thread(process.killed.wait, 10)
        process.kill()
        theirs.close()
        await closing
        starting.cancel()
        assert killed

    asyncio.run(run())


def test_a_second_signal_kills_processes_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("finwhale.server.grammars.check.CLOSE_S", 3600)

    async def run() -> None:
        ours, theirs = Pipe()
        process = DeafProcess()
        client = EngineClient(ours, process)
        theirs.send(READY)
        await client.start()
        grammars = GrammarChecker(DEMO_PATH, SimpleNamespace())  # type: ignore[arg-type]
        await grammars.start()
        assert grammars._process is not None
        trials = grammars._process
        trials.send_signal(signal.SIGSTOP)
        stop_now = asyncio.Event()
        ending = asyncio.ensure_future(end_processes(client, grammars, stop_now))
        while not isinstance(await received(theirs), Stop):
            pass
        theirs.close()
        assert process.is_alive() and trials.returncode is None
        stop_now.set()
        await asyncio.wait((ending,), timeout=10)
        found: object = (process.is_alive(), trials.returncode)
        process.kill()
        grammars.kill()
        await ending
        assert found == (False, -signal.SIGKILL)

    asyncio.run(run())


def test_a_model_that_does_not_load() -> None:
    async def run() -> None:
        ours, theirs = Pipe()
        theirs.send(EngineFailed("no such checkpoint"))
        client = EngineClient(ours)
        with pytest.raises(EngineDeadError, match="no such checkpoint"):
            await client.start()
        theirs.close()
        await client.close()

    asyncio.run(run())


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=2, max_size=5))
def test_users_get_equal_shares(users: list[tuple[int, int]]) -> None:
    """Each user has some requests of some continuations in the queue all the time, and one sequence
    starts after the other. They start equally many, and the first one of a newcomer soon.
    """
    ours, theirs = Pipe()
    client = EngineClient(ours)
    queue: list[tuple[int, int, str, int]] = []
    arrivals = itertools.count()

    def submit(user: str, n: int) -> None:
        turn = client._turn(user, 0, n)
        heapq.heappush(queue, (turn, next(arrivals), user, n))

    for number, (waiting, n) in enumerate(users):
        for _ in range(waiting):
            submit(f"{number}", n)
    started: Counter[str] = Counter()
    while sum(started.values()) < 400:
        turn, _, user, n = heapq.heappop(queue)
        client._last_turn = max(client._last_turn, turn)
        started[user] += n
        submit(user, n)
    assert max(started.values()) <= 1.1 * min(started.values()) + 4
    submit("new", 1)
    for _ in users:
        turn, _, user, n = heapq.heappop(queue)
        client._last_turn = max(client._last_turn, turn)
        submit(user, n)
        if user == "new":
            break
    assert user == "new"
    ours.close()
    theirs.close()


def test_users_take_turns() -> None:
    """A user's flood does not delay another user's request, and keeps its own order."""

    async def run() -> None:
        client, engine = await started()

        async def order(user: str, priority: int = 0, n: int = 1, prompts: int = 1) -> list[int]:
            given = [[1]] * prompts
            client.submit(given, Add("", (), SamplingParams(n=n), priority=priority, user=user))
            adds = [await received(engine) for _ in range(prompts)]
            found.extend(add.request_id for add in adds if isinstance(add, Add))
            return [add.priority for add in adds if isinstance(add, Add)]

        async def start(request_id: str) -> None:
            engine.send(Step([delta(request_id, 7, last=False)]))
            while client._live[request_id].generation._events.empty():
                await asyncio.sleep(0)

        found: list[str] = []
        flood = await order("ann", prompts=200) + await order("ann", n=128) + await order("ann")
        assert flood == sorted(set(flood))
        await start(found[100])
        (bob,) = await order("bob")
        assert flood[99] <= bob < flood[101]
        # Bob's next one comes after one more of Ann's, not after all of them.
        (bob,) = await order("bob")
        assert bob < flood[102]
        # One request of many continuations is a flood, too.
        await start(found[200])
        assert (await order("eve"))[0] < flood[200]
        # Priority comes first, and Ann's other requests do not delay these.
        (urgent,), (later,) = await order("ann", -1), await order("eve", 1)
        assert urgent < flood[0] and flood[-1] < later
        assert urgent < (await order("bob", -1))[0] + 201
        for count in range(5000):
            await order(f"user {count}")
        assert len(client._turns) < 5000
        assert (await order("ann"))[0] > flood[-1]
        client.cut_off()
        await closed(client, engine)

    asyncio.run(run())
