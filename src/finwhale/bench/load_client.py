"""Sends a load to an OpenAI-compatible endpoint, and times the answers. Requests stream."""

import asyncio
import json
import time
from dataclasses import dataclass, field

from finwhale.bench.workload import ServerLoad, arrivals, make_sessions
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.extras import named_extras
from finwhale.platform import max_files

with named_extras():
    import aiohttp

SPARE_FILES = 64  # Open files besides the connections.
REACH_S = 10
REQUEST_S = 3600.0  # time limit of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A server: its root URL, before /v1, and its name of the model."""

    url: str
    model: str
    api_key: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


@dataclass(slots=True)
class Result:
    """The outcome of one request. Times are in seconds.

    Attributes:
        begin: time from the start of the load test to sending the request.
        pieces: times from `begin` to the arrival of each piece of output.
        end: time from `begin` to the end of the answer.
        error: why the request failed; None if it was answered to its end.
    """

    begin: float
    pieces: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.pieces[0]

    @property
    def tpot(self) -> float | None:
        if self.output_tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)

    @property
    def between(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


def check_client(load: ServerLoad) -> None:
    """Raises ResourceError if this process may not open a connection for each request at once."""
    at_once = min(load.concurrency or load.num_requests, load.num_requests)
    wanted = at_once + SPARE_FILES
    if (allowed := max_files(wanted)) < wanted:
        raise ResourceError(
            f"{at_once} requests at once need {wanted} open files, and this process may open "
            f"{allowed}: lower --concurrency, or raise the limit (ulimit -n)"
        )


async def check_endpoint(endpoint: Endpoint) -> None:
    """Raises FinwhaleError if no server answers, or if it refuses the API key."""
    timeout = aiohttp.ClientTimeout(total=REACH_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=endpoint.headers) as session,
            session.get(f"{endpoint.url}/v1/models") as response,
        ):
            status = response.status
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        reason = str(error) or type(error).__name__
        raise FinwhaleError(f"no server answers at {endpoint.url}: {reason}") from error
    if status in (401, 403):
        raise FinwhaleError(
            f"{endpoint.url} refuses the API key (status {status}): set OPENAI_API_KEY"
        )


async def run_load(endpoint: Endpoint, load: ServerLoad) -> tuple[list[Result], float]:
    """Send all requests; returns their results in the order of sessions, and the total seconds."""
    sessions = make_sessions(load, endpoint.model)
    delays = arrivals(load, len(sessions))
    room = asyncio.Semaphore(load.concurrency or load.num_requests)
    path = f"{endpoint.url}/v1/completions"
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=60)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=endpoint.headers, read_bufsize=1 << 20
    ) as client:
        start = time.perf_counter()

        async def run_session(delay: float, bodies: list[bytes]) -> list[Result]:
            await asyncio.sleep(max(0.0, start + delay - time.perf_counter()))
            async with room:
                return [await _request(client, path, body, start) for body in bodies]

        results = await asyncio.gather(*map(run_session, delays, sessions))
        seconds = time.perf_counter() - start
        return [result for session in results for result in session], seconds


async def _request(client: aiohttp.ClientSession, path: str, body: bytes, start: float) -> Result:
    begin = time.perf_counter()
    result = Result(begin=begin - start)
    headers = {"content-type": "application/json"}
    try:
        async with client.post(path, data=body, headers=headers) as response:
            if response.status != 200:
                result.error = f"status {response.status}"
                await response.read()
                return result
            done = False
            async for line in response.content:
                if line.startswith(b"data: "):
                    done = _take(result, line[6:].strip(), time.perf_counter() - begin) or done
            if result.error is None and not (done and result.pieces):
                result.error = "ended early"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        result.error = type(error).__name__
    finally:
        result.end = time.perf_counter() - begin
    return result


def _take(result: Result, data: bytes, now: float) -> bool:
    """Add an event of the stream to `result`; returns whether it is the last."""
    if data == b"[DONE]":
        return True
    chunk = json.loads(data)
    if chunk.get("error"):
        result.error = "error event"
    for choice in chunk.get("choices", ()):
        # A chunk has no text if a character or a possible stop string is incomplete.
        if choice.get("text") is not None:
            result.pieces.append(now)
    usage = chunk.get("usage")
    if usage:
        result.prompt_tokens = usage["prompt_tokens"]
        result.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        result.cached_tokens = details.get("cached_tokens") or 0
    return False
