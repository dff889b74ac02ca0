"""Load-test an OpenAI-compatible endpoint: throughput, and latencies in the record.

Requests go to /v1/completions, with prompts of token ids, and stream. Time to first token (TTFT) is
the time from sending a request to its first piece. Time between tokens (ITL) is the time between
successive pieces. Time per output token (TPOT) is the time from the first piece to the last,
divided by the number of tokens after the first. The server counts the tokens (usage).
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from finwhale.bench.arguments import new_parser
from finwhale.bench.record import keep_record, percentile, stamp
from finwhale.bench.workload import DATASETS, ServerLoad, arrivals, make_sessions
from finwhale.errors import FinwhaleError, ResourceError
from finwhale.extras import named_extras
from finwhale.options import add_options, read_options
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


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench serving`. Returns 1 if a request failed, otherwise 0."""
    args = _parser().parse_args(argv)
    sizes = DATASETS[args.dataset]
    given = {name: getattr(args, name) for name in sizes if getattr(args, name) is not None}
    load = read_options(args, ServerLoad, **sizes | given)
    root = args.url.rstrip("/").removesuffix("/v1")
    endpoint = Endpoint(url=root, model=args.model, api_key=os.environ.get("OPENAI_API_KEY"))
    asyncio.run(check_endpoint(endpoint))
    check_client(load)
    found = summarise(*asyncio.run(run_load(endpoint, load)))
    server = {"url": root, "model": args.model, "api_key": endpoint.api_key is not None}
    described = server | asdict(load) | {"request_rate": str(load.request_rate)}
    record = stamp("serving", argv, ("aiohttp",)) | {"load": described} | found
    keep_record(args.record, record)
    return 0 if found["completed"] == load.num_requests else 1


def summarise(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Compute the mean, P50 and P99 of each latency in milliseconds, and the throughput."""
    good = [r for r in results if r.error is None]
    errors = Counter(r.error for r in results if r.error is not None)
    output = sum(r.output_tokens for r in good)
    prompt = sum(r.prompt_tokens for r in good)
    return {
        "seconds": round(seconds, 3),
        "completed": len(good),
        "errors": dict(errors),
        "prompt_tokens": prompt,
        "cached_tokens": sum(r.cached_tokens for r in good),
        "output_tokens": output,
        "requests_per_second": round(len(good) / seconds, 3),
        "output_tokens_per_second": round(output / seconds, 2),
        "total_tokens_per_second": round((prompt + output) / seconds, 2),
        "ttft_ms": _spread([r.ttft for r in good]),
        "tpot_ms": _spread([r.tpot for r in good if r.tpot is not None]),
        "itl_ms": _spread([gap for r in good for gap in r.between]),
        "e2e_ms": _spread([r.end for r in good]),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    times = [1e3 * value for value in seconds]
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    return {"mean": round(statistics.fmean(times), 4), "p50": p50, "p99": p99}


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW:HIGH, from 1 on, got {text!r}")
    return span


def _default(name: str) -> str:
    """The default sizes of the data sets, in words."""
    sizes = [DATASETS[dataset][name] for dataset in ("uniform", "agents")]
    spans = [s if isinstance(s, int) else ":".join(map(str, dict.fromkeys(s))) for s in sizes]
    return f" (default: {spans[0]}; agents: {spans[1]})"


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("serving", __doc__, "serving.jsonl")
    parser.epilog = "The API key is read from OPENAI_API_KEY."
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the endpoint")
    add("--model", required=True, help="the endpoint's name of the model")
    about = "length of a prompt, or a range of lengths; of agents: what each turn adds"
    add("--input-tokens", type=_span, metavar="N[:M]", help=about + _default("input_tokens"))
    about = "length of an output, or a range of lengths"
    add("--output-tokens", type=_span, metavar="N[:M]", help=about + _default("output_tokens"))
    about = "number of tokens with which all prompts begin; of agents: the system prompt"
    add("--shared-prefix", type=int, metavar="N", help=about + _default("shared_prefix"))
    add_options(parser, ServerLoad)
    return parser
