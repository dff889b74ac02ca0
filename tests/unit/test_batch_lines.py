"""Lines and results of batches: each line has one result, whenever a run was stopped."""

import asyncio
import json
import logging
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finwhale.cli import run_batch
from finwhale.errors import EngineDeadError, FinwhaleError
from finwhale.server.batch.lines import MAX_CUSTOM_ID, read_line, read_lines, scan
from finwhale.server.batch.results import ResultFile
from finwhale.server.batch.runner import BatchJob, run, run_expired
from finwhale.server.batch.store import Owner, StoredBatch, StoredFile, page_of
from finwhale.server.edge.bodies import BodyParser
from finwhale.server.edge.room import Room
from finwhale.server.errors import ApiError

MAX_BYTES = 10_000
MAX_ITEMS = 1000


def line(custom_id: Any = "a", **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": f"for {custom_id}"}
    found = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return {**found, **changes}


def write(path: Path, lines: Sequence[Any]) -> Path:
    texts = (one if isinstance(one, bytes) else json.dumps(one).encode() for one in lines)
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return path


class App:
    """An application that answers with the prompt, or as `status` says."""

    def __init__(self, status: Callable[[int], tuple[int, str]] = lambda call: (200, ""),
                 wait_s: float = 0) -> None:  # fmt: skip
        self.state = SimpleNamespace(parser=BodyParser(lambda: MAX_ITEMS))
        self.calls, self.running, self.most = 0, 0, 0
        self._status, self._wait_s = status, wait_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["state"] == {"key": None, "user": "batches"}
        self.calls += 1
        status, code = self._status(self.calls)
        self.running += 1
        self.most = max(self.most, self.running)
        body = json.loads((await receive())["body"])
        await asyncio.sleep(self._wait_s)
        self.running -= 1
        answer = {"prompt": body["prompt"]} if status == 200 else {
            "error": {"code": code, "message": code}}  # fmt: skip
        head = [(b"x-request-id", b"req_%d" % self.calls)]
        await send({"type": "http.response.start", "status": status, "headers": head})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


@pytest.fixture
def answer(tmp_path: Path) -> Iterator[Callable[..., BatchJob]]:
    """Runs a file of lines, and returns the job."""

    def start(path: Path, app: Any = None, in_flight: int = 4) -> BatchJob:
        results = ResultFile(tmp_path / "out.jsonl")
        try:
            found = scan(path, MAX_BYTES, MAX_ITEMS, shares_cpu=False)
            begun = path.with_suffix(".begun")
            job = BatchJob(
                path, found, MAX_BYTES, MAX_ITEMS, None, results, results, begun, in_flight
            )
            job.recover()
            asyncio.run(run(app or App(), job, Room(lambda: 1 << 20)))
        finally:
            results.close()
        return job

    yield start


def results(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_the_results_of_lines(answer: Callable[..., BatchJob], tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(9)])
    job = answer(path)
    assert (job.counts["completed"], job.counts["failed"]) == (9, 0)
    found = {one["custom_id"]: one for one in results(tmp_path)}
    for i in range(9):
        one = found[f"r{i}"]
        assert one.keys() == {"id", "custom_id", "response", "error"} and one["error"] is None
        assert one["response"]["status_code"] == 200
        assert one["response"]["request_id"].startswith("req_")
        assert one["response"]["body"] == {"prompt": f"for r{i}"}


WRONG = {
    "invalid_json": b'{"custom_id": "x", ',
    "invalid_line": [1, 2],
    "invalid_custom_id": line(7),
    "unknown_parameter": line("b", nonsense=1),
    "invalid_method": line("c", method="GET"),
    "invalid_url": line("d", url="/v1/embeddings"),
    "invalid_body": line("e", body=[]),
    "stream_not_supported": line("f", body={"stream": True}),
    "line_too_long": line("g", body={"prompt": "x" * 2 * MAX_BYTES}),
    "too_complex": line("h", body={"prompt": [1] * (MAX_ITEMS + 5)}),
    "too_deep": b'{"custom_id": "i", "body": ' + b"[" * 70 + b"]" * 70 + b"}",
    "invalid_unicode": b'{"custom_id": "\\ud800"}',
}


def test_a_wrong_line_does_not_stop_the_others(
    answer: Callable[..., BatchJob], tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", [line("first"), *WRONG.values(), b"  ", line("last")])
    job = answer(path)
    assert (job.counts["completed"], job.counts["failed"]) == (2, len(WRONG))
    found = results(tmp_path)
    assert {one["custom_id"] for one in found if one["error"] is None} == {"first", "last"}
    wrong = {one["error"]["code"]: one for one in found if one["error"] is not None}
    for number, code in enumerate(WRONG, 2):
        assert wrong[code]["error"]["message"].startswith(f"line {number}: ")
        assert wrong[code]["response"] is None
    assert [wrong[code]["custom_id"] for code in ("invalid_json", "invalid_method")] == [None, "c"]
    # Nothing runs again.
    app = App()
    assert answer(path, app).counts == job.counts
    assert app.calls == 0 and len(results(tmp_path)) == 2 + len(WRONG)


def test_a_name_may_have_any_character(answer: Callable[..., BatchJob], tmp_path: Path) -> None:
    names = ['"', "\\", '\\"', "\n", "😀", "}", "x" * MAX_CUSTOM_ID]
    path = write(tmp_path / "in.jsonl", [line(name) for name in names])
    answer(path)
    assert {one["custom_id"] for one in results(tmp_path)} == set(names)
    app = App()
    answer(path, app)
    assert app.calls == 0
    write(path, [line("x" * (MAX_CUSTOM_ID + 1)), line("")])
    (tmp_path / "out.jsonl").unlink()
    assert answer(path).counts["failed"] == 2


def test_every_line_has_one_result_wherever_a_run_was_killed(
    answer: Callable[..., BatchJob], tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", [line("a"), b"{", line('b"'), line("c"), b"null"])
    answer(path)
    whole, out = (tmp_path / "out.jsonl").read_bytes(), tmp_path / "out.jsonl"
    wanted = sorted((one["id"], one["custom_id"]) for one in results(tmp_path))
    for end in range(0, len(whole) + 1, 7):
        out.write_bytes(whole[:end])
        answer(path)
        assert sorted((one["id"], one["custom_id"]) for one in results(tmp_path)) == wanted, end


def test_a_stopped_run_continues(answer: Callable[..., BatchJob], tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(50)])
    app = App(lambda call: (200, "") if call % 20 else (503, "engine_dead"))
    runs = 0
    while runs == 0 or len(results(tmp_path)) < 50:
        runs += 1
        with suppress(EngineDeadError):
            answer(path, app)
    assert runs > 2
    assert sorted(one["custom_id"] for one in results(tmp_path)) == sorted(
        f"r{i}" for i in range(50)
    )


def test_results_in_two_files_are_found_again(tmp_path: Path) -> None:
    """The batches of a server have a file of errors of their own."""
    path = write(tmp_path / "in.jsonl", [line("a"), b"{", line("b"), line("c")])
    found = scan(path, MAX_BYTES, MAX_ITEMS, shares_cpu=False)
    for app in (App(lambda call: (200, "") if call < 3 else (400, "wrong")), App()):
        good, bad = (ResultFile(tmp_path / name) for name in ("good.jsonl", "bad.jsonl"))
        begun = path.with_suffix(".begun")
        job = BatchJob(path, found, MAX_BYTES, MAX_ITEMS, None, good, bad, begun, 1)
        job.recover()
        asyncio.run(run(app, job, Room(lambda: 1 << 20)))  # type: ignore[arg-type]
        good.close()
        bad.close()
        assert (job.counts["completed"], job.counts["failed"]) == (2, 2)
    assert app.calls == 0


def test_the_command_of_a_finished_batch_starts_no_engine(
    answer: Callable[..., BatchJob], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "in.jsonl", [line("a"), b"{"])
    answer(path)
    args = [str(path), str(tmp_path / "out.jsonl"), "--model", str(tmp_path / "no-model")]
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        assert run_batch.run(args) == 0
    finally:
        # The command writes its log to standard error, which pytest closes after this test.
        root.handlers[:] = handlers
        root.setLevel(level)
    said = "2 lines, 1 answered, 1 with errors, 2 of them in earlier runs"
    assert said in capsys.readouterr().err


def test_a_busy_server_gets_the_line_again(answer: Callable[..., BatchJob], tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [line("a"), line("b"), line("c")])
    busy = {1: (429, "queue_full"), 2: (503, "overloaded"), 3: (400, "invalid_request")}
    job = answer(path, App(lambda call: busy.get(call, (200, ""))), 3)
    assert (job.counts["completed"], job.counts["failed"]) == (2, 1)
    (wrong,) = (one for one in results(tmp_path) if one["response"]["status_code"] != 200)
    assert wrong["response"]["body"]["error"]["code"] == "invalid_request"


def test_many_lines_are_in_flight(answer: Callable[..., BatchJob], tmp_path: Path) -> None:
    app = App(wait_s=0.05)
    answer(write(tmp_path / "in.jsonl", [line(f"r{i}") for i in range(100)]), app, 40)
    assert app.most == 40


def test_large_lines_wait_for_room_in_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [line(f"{i}", body={"prompt": "x" * 3000})
                                         for i in range(20)])  # fmt: skip
    results, app = ResultFile(tmp_path / "out.jsonl"), App(wait_s=0.01)
    found = scan(path, MAX_BYTES, MAX_ITEMS, shares_cpu=True)
    begun = path.with_suffix(".begun")
    job = BatchJob(path, found, MAX_BYTES, MAX_ITEMS, None, results, results, begun, 20)
    asyncio.run(run(app, job, Room(lambda: MAX_BYTES)))
    results.close()
    assert app.most == 3 and job.counts["completed"] == 20


def test_duplicates_are_found(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [line("a"), b"{", line("b"), b"", line("a"), line("b")])
    assert scan(path, MAX_BYTES, MAX_ITEMS, shares_cpu=False).duplicate == (1, 5)
    write(path, [line("a"), line(7), line(7)])
    assert scan(path, MAX_BYTES, MAX_ITEMS, shares_cpu=False).duplicate is None


@pytest.mark.parametrize("change", ["a line", "no line", "other", "twice"])
def test_results_of_another_input(
    change: str, answer: Callable[..., BatchJob], tmp_path: Path
) -> None:
    path = write(tmp_path / "in.jsonl", [line("a"), line("b")])
    answer(path)
    out = tmp_path / "out.jsonl"
    if change == "a line":
        write(path, [line("a"), line("b", body={"prompt": "changed"})])
    elif change == "no line":
        write(path, [line("a")])
    elif change == "other":
        out.write_text('{"id": "x"}\n')
    else:
        out.write_bytes(out.read_bytes() * 2)
    before = out.read_bytes()
    with pytest.raises(FinwhaleError, match=str(out)):
        answer(path)
    assert out.read_bytes() == before
    # More lines at the end are no change.
    if change == "a line":
        write(path, [line("a"), line("b"), line("c")])
        assert answer(path).counts["completed"] == 3


def test_one_process_writes_a_file(tmp_path: Path) -> None:
    first = ResultFile(tmp_path / "out.jsonl")
    with pytest.raises(FinwhaleError, match="another process writes"):
        ResultFile(tmp_path / "out.jsonl")
    first.close()
    ResultFile(tmp_path / "out.jsonl").close()
    with pytest.raises(FinwhaleError, match="cannot write results"):
        ResultFile(tmp_path / "none" / "out.jsonl")


def test_lines_that_do_not_run_any_more(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [line("a"), line("b")])
    good, bad = ResultFile(tmp_path / "good.jsonl"), ResultFile(tmp_path / "bad.jsonl")
    found = scan(path, MAX_BYTES, MAX_ITEMS, shares_cpu=False)
    begun = path.with_suffix(".begun")
    job = BatchJob(path, found, MAX_BYTES, MAX_ITEMS, "/v1/completions", good, bad, begun, 4)
    run_expired(job, "batch_expired", "too late")
    assert job.counts["failed"] == 2 and not good.path.read_bytes()
    wrong = json.loads(bad.path.read_text().splitlines()[1])
    assert wrong["custom_id"] == "b" and wrong["error"]["code"] == "batch_expired"


def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    count = 5_000
    text = json.dumps(line("NAME", body={"prompt": "x" * 100}))
    path = tmp_path / "in.jsonl"
    path.write_text("".join(text.replace("NAME", str(i)) + "\n" for i in range(count)))
    tracemalloc.start()
    try:
        found = scan(path, MAX_BYTES, MAX_ITEMS, shares_cpu=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.num_lines == count
    # 16 bytes for the digest of the name, twice 8 for the line, and what sorting the names takes;
    # growing arrays may be twice as large. The file has 200 bytes a line.
    assert peak < 120 * count + 500_000


def test_a_line_of_any_length_is_read_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 300_000 + b"\r\n" + b"y" * 70_000 + b"\n" + b"z")
    found = [raw for raw, _ in read_lines(path, 100_000)]
    assert [raw.text and len(raw.text) for raw in found] == [None, 70_000, 1]
    assert len({raw.digest for raw in found}) == 3
    assert read_line(found[0], None, MAX_ITEMS).error is not None


def test_room_is_given_in_order() -> None:
    async def check() -> list[int]:
        room, order = Room(lambda: 10), []

        async def use(count: int) -> None:
            async with room.taken(count):
                order.append(count)
                await asyncio.sleep(0.001)

        waiting = [asyncio.ensure_future(use(count)) for count in (6, 30, 3, 8, 2)]
        await asyncio.sleep(0)
        waiting[3].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert room._used == 0
        return order

    assert asyncio.run(check()) == [6, 30, 3, 2]


def test_a_waiter_that_is_cancelled_after_its_admission_frees_its_room() -> None:
    async def check() -> int:
        room = Room(lambda: 10)
        await room.take(10)
        waiting = asyncio.ensure_future(room.take(4))
        await asyncio.sleep(0)
        room.release(10)  # admits the waiter, which has not run since
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return room._used

    assert asyncio.run(check()) == 0


def test_pages_of_a_list() -> None:
    files = [StoredFile(f"file-{i}", 1, "x", "batch") for i in range(4)]
    seen, after, more = [], None, True
    while more:
        page = page_of(files, 2, after)
        seen.append([one["id"] for one in page["data"]])
        assert (page["first_id"], page["last_id"]) == (seen[-1][0], seen[-1][-1])
        after, more = page["last_id"], page["has_more"]
    assert seen == [["file-0", "file-1"], ["file-2", "file-3"]]
    assert page_of(files, 4, None)["has_more"] is False
    assert page_of(files, 2, "file-3")["data"] == []


def test_the_oldest_ended_batches_make_room(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "owner")
    for number, status in enumerate(("completed", "in_progress", "failed", "cancelled")):
        batch = StoredBatch(f"batch_{number}", "/v1/completions", "in", number, created_at=number)
        batch.enter(status)
        owner.save(batch)
    owner.make_room(5)
    assert len(owner.batches) == 4
    owner.make_room(3)  # with the next one there are three
    assert list(owner.batches) == ["batch_1", "batch_3"]
    assert list(Owner(owner.directory).batches) == ["batch_1", "batch_3"]
    with pytest.raises(ApiError, match="1 batches wait or run") as caught:
        owner.make_room(1)
    assert caught.value.status == 429
