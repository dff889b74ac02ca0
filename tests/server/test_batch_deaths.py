"""A line of a batch that was in flight when a server died: it runs alone, and after the second
death it is an error."""

import asyncio
import signal
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.applications import Starlette

from finwhale.server.batch import runner
from finwhale.server.batch.lines import BatchLine, RawLine, scan
from finwhale.server.batch.results import ResultFile, error_of
from finwhale.server.batch.runner import Attempts
from finwhale.server.edge.room import Room

from .attacks import MODEL as SERVED
from .attacks import Target
from .running import RunningServer
from .test_batches import Start, create, ended, line, results, running, upload
from .test_limits import wait_until

_ = running  # a fixture
COMPLETIONS = "/v1/completions"


def lines(model: str) -> list[dict[str, Any]]:
    """Line 2 takes long; a test lets the server die meanwhile. The others are short."""
    found = [line(str(i), COMPLETIONS, model=model, max_tokens=2) for i in range(1, 7)]
    found[1]["body"] |= {"max_tokens": 1900, "ignore_eos": True, "n": 4}
    return found


def begun(directory: Path) -> Counter[int]:
    """How often each line has begun, by its number, without those of servers that have stopped."""
    numbers = array("Q")
    for path in directory.rglob("*.begun"):
        numbers.frombytes(path.read_bytes())
    return Counter(numbers)


def wait_for_the_long_line(directory: Path, count: int) -> None:
    wait_until(lambda: begun(directory)[2] == count)


def die(server: RunningServer) -> None:
    """Lets the engine die, and waits until the batches have noticed it."""
    loop, batches = server.client._loop, server._server.batches
    assert loop is not None and batches is not None
    loop.call_soon_threadsafe(server.client._die, "the device is gone")
    wait_until(lambda: all(task.done() for task in batches._tasks.values()))


def check(client: openai.OpenAI, batch: str) -> None:
    done = ended(client, batch)
    assert done.status == "completed"
    assert results(client, done.output_file_id).keys() == {"1", "3", "4", "5", "6"}
    (error,) = results(client, done.error_file_id).values()
    assert error["custom_id"] == "2" and error["response"] is None
    assert error["error"]["code"] == "line_ended_server"
    assert error["error"]["message"].startswith("line 2: 2 processes have died")


def test_a_killed_server(running: Start, tmp_path: Path) -> None:
    directory, batch = tmp_path / "b", ""
    for deaths in range(2):
        target = Target(tmp_path / "log", "--batch-dir", str(directory), "--max-num-seqs", "8")
        try:
            url = f"http://127.0.0.1:{target.port}/v1"
            client = openai.OpenAI(base_url=url, api_key="none", timeout=200)
            if not batch:
                batch = create(client, upload(client, lines(SERVED)), COMPLETIONS).id
            wait_for_the_long_line(directory, deaths + 1)
            target.process.send_signal(signal.SIGKILL)
            target.process.wait(60)
        finally:
            target.close()
    server = running(model_names=(SERVED,))
    check(server.openai(), batch)
    server.close()
    assert not list(directory.rglob("*.begun"))


def test_a_stop_is_no_death_and_a_dead_engine_is_one(running: Start, tmp_path: Path) -> None:
    directory, batch = tmp_path / "b", ""
    for dies in (True, False, True):
        before = begun(directory)[2]
        server = running()
        client = server.openai()
        if not batch:
            batch = create(client, upload(client, lines("demo")), COMPLETIONS).id
        wait_for_the_long_line(directory, before + 1)
        if before:  # what was in flight runs one by one
            assert all(begun(directory)[number] <= 1 for number in range(3, 7))
        if dies:
            die(server)
        server.close()
        assert begun(directory)[2] == before + dies
    check(running().openai(), batch)


def test_a_file_that_a_death_has_cut(tmp_path: Path) -> None:
    path = tmp_path / "begun"
    path.write_bytes(array("Q", [7, 9, 7]).tobytes() + b"\x01\x02\x03")
    attempts = Attempts(path)
    assert attempts.deaths == {7: 2, 9: 1}
    attempts.begin(12)
    attempts.close(ended=False)
    assert path.read_bytes() == array("Q", [7, 9, 7, 12]).tobytes()
    attempts = Attempts(path)
    attempts.begin(13)
    attempts.forget()
    attempts.close(ended=False)
    assert path.read_bytes() == array("Q", [7, 9, 7, 12]).tobytes()
    path.write_bytes(b"")
    Attempts(path).close(ended=False)
    assert not path.exists()


def test_lines_of_all_batches_run_alone_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one line that was in flight at a death is in flight at the next."""
    at_once: list[int] = []
    running_now: list[int] = []

    async def observed(app: object, job: runner.BatchJob, raw: RawLine, attempts: Attempts) -> None:
        again = attempts.deaths[raw.number]
        if again:
            running_now.append(raw.number)
        at_once.append(len(running_now))
        await asyncio.sleep(0.001)
        if again:
            running_now.remove(raw.number)
        job.add(raw, error_of(raw, BatchLine(str(raw.number)), "x", "x"), ok=False)

    async def run(jobs: list[runner.BatchJob]) -> None:
        held = Room(lambda: 1000)
        await asyncio.gather(*(runner.run(Starlette(), job, held) for job in jobs))

    monkeypatch.setattr(runner, "_run_line", observed)
    source = tmp_path / "in"
    source.write_text("".join(f"{i}\n" for i in range(20)))
    scanned, alone, jobs = scan(source, 100, 100, shares_cpu=False), asyncio.Lock(), []
    for name in ("ann", "bob"):
        (tmp_path / name).write_bytes(array("Q", range(1, 9)).tobytes())
        results_file = ResultFile(tmp_path / f"{name}.out")
        jobs.append(runner.BatchJob(source, scanned, 100, 100, None, results_file, results_file,
                               tmp_path / name, 4, alone=alone))  # fmt: skip
    asyncio.run(run(jobs))
    assert max(at_once) == 1 and len(at_once) == 40
    assert all(job.counts["failed"] == 20 for job in jobs)
