"""Runs the lines of a batch through the HTTP application, many at once."""

import asyncio
import json
import os
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from finwhale.errors import EngineDeadError, FinwhaleError
from finwhale.server.batch.lines import BatchLine, RawLine, Scan, read_line, read_lines
from finwhale.server.batch.results import ResultFile, error_of, result_of
from finwhale.server.edge.room import Room
from finwhale.server.errors import StoppingError
from finwhale.server.keys import ApiKey

# Maximum size of all lines that are being answered.
MAX_HELD_BYTES = 256 << 20
_READ_LINES, _READ_BYTES = 64, 1 << 20  # limits of one read
_MAX_WAIT_S = 30.0
_MAX_DEATHS = 2  # a line that was in flight at so many deaths does not run again
# With these error codes the server is busy, and the line runs again later.
_BUSY = frozenset({"overloaded", "loading"})


class Attempts:
    """The lines of a batch that were in flight when a process died. All methods raise OSError.

    A line may end the process that answers it, and then each next process. So a file names the
    lines that have begun; a process that stops in good order removes its own from it. It is not
    synced: a process that is killed has written it all the same. `deaths`: how many processes have
    died while a line was in flight, by the line's number; only for lines without a result.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a+b", buffering=0)
        self._file.seek(0)
        found, numbers = self._file.read(), array("Q")
        self._before = len(found) // numbers.itemsize * numbers.itemsize
        numbers.frombytes(found[: self._before])
        self.deaths = Counter(numbers)
        self.forget()

    def begin(self, number: int) -> None:
        """Notes that a line begins."""
        self._file.write(array("Q", [number]).tobytes())

    def forget(self) -> None:
        """Removes the lines that have begun in this process, which does not die."""
        self._file.truncate(self._before)

    def close(self, *, ended: bool) -> None:
        """Closes the file; removes it if the batch has ended or it is empty."""
        if ended or not os.fstat(self._file.fileno()).st_size:
            self._path.unlink(missing_ok=True)
        self._file.close()


@dataclass(slots=True)
class BatchJob:
    """A running batch.

    Attributes:
        max_bytes, max_items: limits of a line.
        url: the endpoint that all lines must name; None: each may name another one.
        good, bad: files of the results with status 200, and of the others; may be one file.
        begun: the file of lines that have begun; see `Attempts`.
        in_flight: number of lines at once.
        key: the batch's API key; None: the server needs none.
        alone: held by the one line that runs again after a death.
        done: 1 for each line that has a result.
        counts: numbers of lines: "completed" with status 200, and "failed".
    """

    path: Path
    scan: Scan
    max_bytes: int
    max_items: int
    url: str | None
    good: ResultFile
    bad: ResultFile
    begun: Path
    in_flight: int
    key: ApiKey | None = None
    alone: asyncio.Lock = field(default_factory=asyncio.Lock)
    on_result: Callable[[], None] = lambda: None
    done: bytearray = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.done = bytearray(len(self.scan.digests))

    def recover(self) -> None:
        """Finds the results of an earlier run. Raises FinwhaleError."""
        for one in dict.fromkeys((self.good, self.bad)):
            one.recover(self.scan, self.done, self.counts)

    def pending(self) -> Iterator[tuple[RawLine, int]]:
        """The lines that have no result, each with its size."""
        for raw, size in read_lines(self.path, self.max_bytes):
            if raw.number > len(self.done) or self.scan.digests[raw.number - 1] != raw.digest:
                raise FinwhaleError(f"{self.path} has changed while it was read")
            if not (raw.blank or self.done[raw.number - 1]):
                yield raw, size

    def add(self, raw: RawLine, result: bytes, *, ok: bool) -> None:
        (self.good if ok else self.bad).append(result)
        self.done[raw.number - 1] = 1
        self.counts["completed" if ok else "failed"] += 1
        self.on_result()


async def run(app: Starlette, job: BatchJob, held: Room) -> None:
    """Runs each line that has no result, and writes its result.

    Args:
        app: the application that answers requests.
        held: room for the bytes of lines, which batches share.

    Raises:
        EngineDeadError, StoppingError: the engine has died or stops; `BatchJob.recover` continues.
        FinwhaleError, OSError: the results or `BatchJob.begun` cannot be written.
    """
    attempts, ended = Attempts(job.begun), False
    try:
        first = (one for one in job.pending() if not attempts.deaths[one[0].number])
        await _run_lines(app, job, attempts, first, held, job.in_flight)
        # What was in flight at a death runs last and alone: the next death then names one line.
        await _run_lines(app, job, attempts, job.pending(), held, 1)
        ended = True
    except (asyncio.CancelledError, StoppingError):
        attempts.forget()
        raise
    finally:
        attempts.close(ended=ended)


async def _run_lines(
    app: Starlette,
    job: BatchJob,
    attempts: Attempts,
    pending: Iterator[tuple[RawLine, int]],
    held: Room,
    at_once: int,
) -> None:
    lines, taking = _taken(pending, held), asyncio.Lock()

    async def work() -> None:
        while True:
            async with taking:
                taken = await anext(lines, None)
            if taken is None:
                return
            raw, size = taken
            again = attempts.deaths[raw.number] > 0
            try:
                async with job.alone if again else nullcontext():
                    await _run_line(app, job, raw, attempts)
            finally:
                held.release(size)

    workers = [asyncio.ensure_future(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def run_expired(job: BatchJob, code: str, message: str) -> None:
    """Writes an error for each line that has no result."""
    for raw, _ in job.pending():
        line = read_line(raw, job.url, job.max_items)
        job.add(raw, error_of(raw, line, code, message), ok=False)


async def _taken(
    pending: Iterator[tuple[RawLine, int]], held: Room
) -> AsyncGenerator[tuple[RawLine, int], None]:
    """The pending lines of a job, each with the room that it has taken: its size."""
    # A thread reads, because it may have to skip many lines.
    while found := await asyncio.to_thread(_read_some, pending):
        for raw, size in found:
            size = 0 if raw.text is None else size
            await held.take(size)
            yield raw, size


def _read_some(pending: Iterator[tuple[RawLine, int]]) -> list[tuple[RawLine, int]]:
    found, size = [], 0
    for one in pending:
        found.append(one)
        size += one[1]
        if len(found) >= _READ_LINES or size >= _READ_BYTES:
            break
    return found


async def _run_line(app: Starlette, job: BatchJob, raw: RawLine, attempts: Attempts) -> None:
    deaths = attempts.deaths[raw.number]
    attempts.begin(raw.number)
    # As the server reads bodies.
    read = partial(read_line, raw, job.url, job.max_items)
    line = await app.state.parser.run(len(raw.text or b""), read)
    if deaths >= _MAX_DEATHS:
        message = f"{deaths} processes have died while they answered this line"
        line = replace(line, error=("line_ended_server", message))
    if line.error is not None:
        job.add(raw, error_of(raw, line, *line.error), ok=False)
        return
    answer = await _ask(app, line, job.key)
    request_id = answer.headers.get("x-request-id", "")
    result = result_of(raw, line, answer.status_code, request_id, bytes(answer.body))
    job.add(raw, result, ok=answer.status_code == 200)


async def _ask(app: ASGIApp, line: BatchLine, key: ApiKey | None) -> Response:
    """The answer to a line; waits while the server is busy."""
    body = json.dumps(line.body).encode()
    wait_s = 0.05
    while True:
        answer = await post(app, line.url, body, key)
        if answer.status_code not in (429, 503):
            return answer
        error = json.loads(bytes(answer.body))["error"]
        if error["code"] == "engine_dead":
            raise EngineDeadError(error["message"])
        if error["code"] == "server_stopping":
            raise StoppingError(error["message"])
        if answer.status_code == 503 and error["code"] not in _BUSY:
            return answer
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _MAX_WAIT_S)


async def post(app: ASGIApp, path: str, body: bytes, key: ApiKey | None) -> Response:
    """Posts a JSON body inside the application's process, so that batches get the answers of HTTP.
    Host, key and the number of requests at once are not checked again.

    The state of the scope, where no client can put anything, has the API key of the batch (None:
    the server needs none), and whose shares the request takes: without keys, all batches are one
    user.
    """
    answer, parts, answered = Response(), [body], bytearray()
    gone = asyncio.Event()  # never set: this client stays

    async def receive() -> Message:
        if not parts:
            await gone.wait()
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status_code, answer.raw_headers = message["status"], message["headers"]
        else:
            answered.extend(message.get("body", b""))

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": {"key": key, "user": "batches" if key is None else key.identity},
    }
    await app(scope, receive, send)
    answer.body = bytes(answered)
    return answer
