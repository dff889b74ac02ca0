"""Load-test any OpenAI-compatible endpoint: throughput, and latencies in the record.

Requests stream. Time to first token (TTFT) is the time from sending a request to its first piece.
Time between tokens (ITL) is the time between successive pieces. Time per output token (TPOT) is the
time from the first piece to the last, divided by the number of tokens after the first. The server
counts the tokens (usage).
"""

import argparse
import asyncio
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from finwhale.bench.load_client import Endpoint, Result, check_client, check_endpoint, run_load
from finwhale.bench.preflight import record_path
from finwhale.bench.printing import new_console
from finwhale.bench.record import RESULTS, keep_record, percentile, stamp
from finwhale.bench.workload import AGENTS, UNIFORM, Load, described
from finwhale.options import Parser, add_options, read_options


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench serving`. Returns 1 if a request failed, otherwise 0."""
    parser = _parser()
    args = parser.parse_args(argv)
    endpoint, load = _read_endpoint(args.url, args.model), _read_load(args, parser)
    asyncio.run(check_endpoint(endpoint))
    check_client(load)
    found = summarise(*asyncio.run(run_load(endpoint, load)))
    _print(found)
    server = {
        "url": endpoint.url,
        "model": endpoint.model,
        "api_key": bool(endpoint.api_key),
        "timeout_s": endpoint.timeout_s,
    }
    record = stamp("serving", argv, ("aiohttp",)) | {"load": server | described(load)} | found
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


def _print(found: dict[str, Any]) -> None:
    console = new_console()
    console.print(
        f"{found['completed']} requests in {found['seconds']:.2f} s: "
        f"{found['requests_per_second']:.2f} requests/s; {found['output_tokens_per_second']:,.1f} "
        f"tokens/s generated, {found['total_tokens_per_second']:,.1f} tokens/s with prompts; "
        f"{found['cached_tokens']} of {found['prompt_tokens']} prompt tokens were cached"
    )
    if found["errors"]:
        console.print(f"errors: {found['errors']}", style="red")


def _read_load(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Load:
    """The load that the arguments describe.

    Raises:
        FinwhaleError: a value is out of range.
    """
    sized = ("input_tokens", "output_tokens", "shared_prefix")
    given = {name: getattr(args, name) for name in sized if getattr(args, name) is not None}
    if args.dataset == "chat" and given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        parser.error(f"--dataset chat has its own lengths: leave out {flags}")
    sizes = AGENTS if args.dataset == "agents" else UNIFORM
    values: dict[str, Any] = {name: getattr(sizes, name) for name in sized} | given
    if args.num_requests is not None:
        values["num_requests"] = args.num_requests
    load = read_options(args, Load, **values)
    load.check()
    return load


def _read_endpoint(url: str, model: str) -> Endpoint:
    """An endpoint; its URL may end in /v1."""
    root = url.rstrip("/").removesuffix("/v1")
    return Endpoint(url=root, model=model, api_key=os.environ.get("OPENAI_API_KEY"))


def _default(span: tuple[int, int]) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}:{span[1]}"


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW:HIGH, from 1 on, got {text!r}")
    return span


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale bench serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The API key is read from OPENAI_API_KEY.",
    )
    add_options(parser, Load)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the endpoint (default: %(default)s)")
    add("--model", required=True, help="the endpoint's name of the model")
    about = f"number of requests (default: {Load().num_requests})"
    add("--num-requests", type=int, metavar="N", help=about)
    add(
        "--input-tokens",
        type=_span,
        metavar="N[:M]",
        help="length of a prompt, or a range of lengths; of agents: what each turn adds "
        f"(default: {_default(UNIFORM.input_tokens)}; agents: {_default(AGENTS.input_tokens)})",
    )
    add(
        "--output-tokens",
        type=_span,
        metavar="N[:M]",
        help="length of an output, or a range of lengths "
        f"(default: {_default(UNIFORM.output_tokens)}; agents: {_default(AGENTS.output_tokens)})",
    )
    add(
        "--shared-prefix",
        type=int,
        metavar="N",
        help="number of tokens with which all prompts begin; of agents: the system prompt "
        f"(default: {UNIFORM.shared_prefix}; agents: {AGENTS.shared_prefix})",
    )
    add(
        "--record",
        type=record_path,
        nargs="?",
        const=str(RESULTS / "serving.jsonl"),
        metavar="FILE",
        help="append the results to this JSONL file (without FILE: %(const)s)",
    )
    return parser
