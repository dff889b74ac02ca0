"""Load-test any OpenAI-compatible endpoint: latency and throughput.

Requests stream. Time to first token (TTFT) is the time from sending a request to its first piece.
Time between tokens (ITL) is the time between successive pieces. Time per output token (TPOT) is the
time from the first piece to the last, divided by the number of tokens after the first. The server
counts the tokens (usage).
"""

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from finwhale.bench.load_plot import plot
from finwhale.bench.record import RESULTS, append_record, stamp
from finwhale.errors import FinwhaleError

WORDS = ("the", "a", "sea", "whale", "ship", "sky", "wind", "day", "fish", "sun", "boat", "deep")
QUANTILES = (50, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests to send to an endpoint.

    Attributes:
        url: the endpoint's root, before /v1.
        chat: use /v1/chat/completions with text, instead of /v1/completions with token ids.
        num_requests: total number of requests.
        request_rate: requests per second, which arrive as a Poisson process; inf: all at once.
        concurrency: maximum number of requests at once; None: no limit.
        input_tokens, output_tokens: least and largest length; each request draws its own.
        shared_prefix: number of tokens, of input_tokens, with which all prompts begin.
        max_token_id: token ids of prompts are below this.
        ignore_eos: generate exactly output_tokens tokens (an extension that some servers lack).
    """

    url: str
    model: str
    chat: bool = False
    num_requests: int = 256
    request_rate: float = math.inf
    concurrency: int | None = None
    input_tokens: tuple[int, int] = (1024, 1024)
    output_tokens: tuple[int, int] = (256, 256)
    shared_prefix: int = 0
    max_token_id: int = 4000
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0
    api_key: str | None = None
    timeout_s: float = 3600.0


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


async def run_load(load: Load) -> tuple[list[Result], float]:
    """Send all requests; returns their results in the order of sending, and the total seconds."""
    bodies = make_bodies(load)
    delays = _arrivals(load)
    room = asyncio.Semaphore(load.concurrency or load.num_requests)
    headers = {"authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s, sock_connect=60)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=1 << 20
    ) as session:
        start = time.perf_counter()

        async def one(delay: float, body: bytes) -> Result:
            await asyncio.sleep(max(0.0, start + delay - time.perf_counter()))
            async with room:
                return await _request(session, load, body, start)

        results = await asyncio.gather(*map(one, delays, bodies))
        return results, time.perf_counter() - start


async def _request(session: aiohttp.ClientSession, load: Load, body: bytes, start: float) -> Result:
    path = "/v1/chat/completions" if load.chat else "/v1/completions"
    result = Result(begin=time.perf_counter() - start)
    begin = time.perf_counter()
    headers = {"content-type": "application/json"}
    try:
        async with session.post(load.url + path, data=body, headers=headers) as response:
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
        delta = choice.get("delta", {})
        # A chunk has no text if a character or a possible stop string is incomplete.
        if choice.get("text") is not None or any(delta.get(k) for k in _PARTS):
            result.pieces.append(now)
    usage = chunk.get("usage")
    if usage:
        result.prompt_tokens = usage["prompt_tokens"]
        result.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        result.cached_tokens = details.get("cached_tokens") or 0
    return False


_PARTS = ("content", "reasoning_content", "tool_calls")


def make_bodies(load: Load) -> list[bytes]:
    """Make the bodies of the requests. The same seed gives the same bodies."""
    draw = random.Random(load.seed)
    prefix = _tokens(draw, load, load.shared_prefix)
    bodies = []
    for _ in range(load.num_requests):
        own = draw.randint(*load.input_tokens) - load.shared_prefix
        prompt = prefix + _tokens(draw, load, own)
        body: dict[str, Any] = {
            "model": load.model,
            "max_tokens": draw.randint(*load.output_tokens),
            "temperature": load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if load.ignore_eos:
            body["ignore_eos"] = True
        if load.chat:
            body["messages"] = [{"role": "user", "content": " ".join(map(str, prompt))}]
        else:
            body["prompt"] = prompt
        bodies.append(json.dumps(body).encode())
    return bodies


def _tokens(draw: random.Random, load: Load, count: int) -> list[Any]:
    """Draw `count` token ids or, for a chat, words."""
    if load.chat:
        return draw.choices(WORDS, k=count)
    # Low ids are often control tokens.
    return [
        draw.randrange(min(256, load.max_token_id // 2), load.max_token_id) for _ in range(count)
    ]


def _arrivals(load: Load) -> list[float]:
    draw = random.Random(load.seed + 1)
    now, times = 0.0, []
    for _ in range(load.num_requests):
        times.append(now)
        if math.isfinite(load.request_rate):
            now += draw.expovariate(load.request_rate)
    return times


def summarise(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Summarise a load test: mean, P50 and P99 of each latency in milliseconds, and throughput."""
    good = [r for r in results if r.error is None]
    errors = Counter(r.error for r in results if r.error is not None)
    output = sum(r.output_tokens for r in good)
    prompt = sum(r.prompt_tokens for r in good)
    tpots = [r.tpot for r in good if r.tpot is not None]
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
        "tpot_ms": _spread(tpots),
        "itl_ms": _spread([gap for r in good for gap in r.between]),
        "e2e_ms": _spread([r.end for r in good]),
    }


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {"mean": statistics.fmean(ordered) * 1e3}
    for q in QUANTILES:
        # The nearest rank is always a measured value.
        found[f"p{q}"] = ordered[math.ceil(q / 100 * len(ordered)) - 1] * 1e3
    return {name: round(value, 3) for name, value in found.items()}


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    load = _load(args)
    results, seconds = asyncio.run(run_load(load))
    found = summarise(results, seconds)
    _print(found)
    described = {name: getattr(load, name) for name in load.__dataclass_fields__}
    described |= {"api_key": bool(load.api_key), "request_rate": str(load.request_rate)}
    record = {
        "benchmark": "serving",
        **stamp("serving", argv, ("aiohttp",)),
        "load": described,
        **found,
    }
    if args.record:
        append_record(args.record, record)
        print(f"recorded in {args.record}", file=sys.stderr)
    if args.plot:
        plot(args.plot, results, found)
        print(f"plotted in {args.plot}", file=sys.stderr)
    return 0 if found["completed"] == load.num_requests else 1


def _load(args: argparse.Namespace) -> Load:
    """The load that the arguments describe. Raises FinwhaleError if a value is out of range."""
    if args.shared_prefix >= args.input_tokens[0]:
        raise FinwhaleError(
            f"--shared-prefix must be below --input-tokens ({args.input_tokens[0]}), got "
            f"{args.shared_prefix}"
        )
    if not args.request_rate > 0 or args.num_requests < 1:
        raise FinwhaleError("--request-rate and --num-requests must be above 0")
    url = args.url.rstrip("/").removesuffix("/v1")
    key = os.environ.get("OPENAI_API_KEY")
    return Load(
        url=url,
        model=args.model,
        chat=args.chat,
        num_requests=args.num_requests,
        request_rate=args.request_rate,
        concurrency=args.concurrency,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        shared_prefix=args.shared_prefix,
        max_token_id=args.max_token_id,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        seed=args.seed,
        api_key=key,
    )


def _print(found: dict[str, Any]) -> None:
    table = Table(title="serving")
    for column in ("", "mean", "P50", "P99"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        values = found[name] or {}
        table.add_row(
            name, *(f"{values[k]:,.2f}" if values else "-" for k in ("mean", "p50", "p99"))
        )
    console = Console()
    console.print(table)
    console.print(
        f"{found['completed']} requests in {found['seconds']:.2f} s: "
        f"{found['requests_per_second']:.2f} requests/s; {found['output_tokens_per_second']:,.1f} "
        f"tokens/s generated, {found['total_tokens_per_second']:,.1f} tokens/s with prompts; "
        f"{found['cached_tokens']} of {found['prompt_tokens']} prompt tokens were cached"
    )
    if found["errors"]:
        console.print(f"errors: {found['errors']}", style="red")


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW:HIGH, from 1 on, got {text!r}")
    return span


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="finwhale bench serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The API key is read from OPENAI_API_KEY.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the endpoint (default: %(default)s)")
    add("--model", required=True, help="the endpoint's name of the model")
    add(
        "--chat",
        action="store_true",
        help="use /v1/chat/completions, with words instead of token ids",
    )
    add(
        "--num-requests",
        type=int,
        default=256,
        metavar="N",
        help="number of requests (default: 256)",
    )
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests per second, at random times (default: all at once)",
    )
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help="maximum number of requests at once (default: no limit)",
    )
    add(
        "--input-tokens",
        type=_span,
        default=(1024, 1024),
        metavar="N[:M]",
        help="length of a prompt, or a range of lengths (default: 1024)",
    )
    add(
        "--output-tokens",
        type=_span,
        default=(256, 256),
        metavar="N[:M]",
        help="length of an output, or a range of lengths (default: 256)",
    )
    add(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="N",
        help="number of tokens with which all prompts begin (default: 0)",
    )
    add(
        "--max-token-id",
        type=int,
        default=4000,
        metavar="N",
        help="largest token id in a prompt (default: %(default)s)",
    )
    add(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let the model end its output",
    )
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0)")
    add("--seed", type=int, default=0, help="seed of prompts and arrival times (default: 0)")
    add(
        "--record", type=Path, nargs="?", const=RESULTS / "serving.jsonl", metavar="FILE",
        help="append the results to this JSONL file (without FILE: %(const)s)",
    )  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="plot the run (.png or .svg; needs matplotlib)")
    return parser
