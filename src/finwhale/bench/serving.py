"""Load-test any OpenAI-compatible endpoint: latency and throughput.

Requests stream. Time to first token (TTFT) is the time from sending a request to its first piece.
Time between tokens (ITL) is the time between successive pieces. Time per output token (TPOT) is the
time from the first piece to the last, divided by the number of tokens after the first. The server
counts the tokens (usage).

With --sweep, the load runs at several rates or concurrencies. The knee is the load with the most
throughput for its latency. Goodput counts the requests that meet --ttft-limit and --itl-limit.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finwhale.bench import sweep as sweeping
from finwhale.bench.latency import Limits, summarise
from finwhale.bench.load_client import Endpoint, Result, check_client, check_endpoint, run_load
from finwhale.bench.printing import new_console, new_table
from finwhale.bench.record import append_record, keep_record, stamp
from finwhale.bench.serving_options import load_parser, read_endpoint, read_load
from finwhale.bench.sweep import FEWEST, REQUESTS_PER_CLIENT, SECONDS, Sweep
from finwhale.bench.workload import Load, described

CONCURRENCIES = "concurrency=1,2,4,8,16,32,64,128"


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench serving`. Returns 1 if a request failed, 130 if a sweep was stopped."""
    parser = _parser()
    args = parser.parse_args(argv)
    endpoint, load = read_endpoint(args.url, args.model), read_load(args, parser)
    limits = Limits(args.ttft_limit, args.itl_limit)
    if args.sweep is not None and args.plot:
        parser.error("--plot shows one load: `finwhale bench report` plots a sweep")
    if args.resume and (args.sweep is None or args.record is None):
        parser.error("--resume continues a --sweep with --record")
    asyncio.run(check_endpoint(endpoint))
    if args.sweep is not None:
        return _sweep(args, argv, endpoint, load, limits)
    check_client(load)
    found, results = _measure(endpoint, load, limits)
    _print(found)
    about = stamp("serving", argv, ("aiohttp",)) | _described(endpoint, load, limits)
    keep_record(args.record, about | found)
    if args.plot:
        from finwhale.bench.load_plot import plot  # only a plot needs matplotlib

        plot(args.plot, results, found)
        print(f"plotted in {args.plot}", file=sys.stderr)
    return 0 if found["completed"] == load.num_requests else 1


def _sweep(
    args: argparse.Namespace, argv: Sequence[str], endpoint: Endpoint, load: Load, limits: Limits
) -> int:
    sweep: Sweep = args.sweep
    loads = sweep.loads(load, args.num_requests)
    for one in loads:
        check_client(one)
    console, points, stopped = new_console(), [], False
    try:
        for value, one in zip(sweep.values, loads, strict=True):
            about = {
                **_described(endpoint, one, limits),
                "sweep": {"over": sweep.over, "value": value},
            }
            record = sweeping.recorded(args.record, about) if args.resume else None
            if record is None:
                found, _ = _measure(endpoint, one, limits)
                record = {**stamp("serving", argv, ("aiohttp",)), **about, **found}
                if args.record:
                    append_record(args.record, record)
            points.append(record)
            console.print(
                f"{sweep.over} {value:g}: {record['output_tokens_per_second']:,.1f} tokens/s, "
                f"{sum(record['errors'].values())} errors",
                highlight=False,
            )
    except KeyboardInterrupt:
        stopped = True
    if points:
        sweeping.show(console, sweep.over, points)
    if args.record and points:
        print(f"recorded in {args.record}", file=sys.stderr)
    if stopped:
        again = ": --resume continues" if args.record else ""
        print(f"stopped after {len(points)} of {len(loads)} loads{again}", file=sys.stderr)
        return 130
    return 1 if any(point["errors"] for point in points) else 0


def _measure(endpoint: Endpoint, load: Load, limits: Limits) -> tuple[dict[str, Any], list[Result]]:
    results, seconds = asyncio.run(run_load(endpoint, load))
    return summarise(results, seconds, limits), results


def _described(endpoint: Endpoint, load: Load, limits: Limits) -> dict[str, Any]:
    server = {
        "url": endpoint.url,
        "model": endpoint.model,
        "api_key": bool(endpoint.api_key),
        "timeout_s": endpoint.timeout_s,
    }
    found: dict[str, Any] = {"load": {**server, **described(load)}}
    if limits:
        found["limits"] = {"ttft_ms": limits.ttft_ms, "itl_ms": limits.itl_ms}
    return found


def _print(found: dict[str, Any]) -> None:
    table = new_table("serving", "", "mean", "P50", "P99")
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        values = found[name] or {}
        table.add_row(
            name, *(f"{values[k]:,.2f}" if values else "-" for k in ("mean", "p50", "p99"))
        )
    console = new_console()
    console.print(table)
    console.print(
        f"{found['completed']} requests in {found['seconds']:.2f} s: "
        f"{found['requests_per_second']:.2f} requests/s; {found['output_tokens_per_second']:,.1f} "
        f"tokens/s generated, {found['total_tokens_per_second']:,.1f} tokens/s with prompts; "
        f"{found['cached_tokens']} of {found['prompt_tokens']} prompt tokens were cached"
    )
    if "goodput" in found:
        goodput = found["goodput"]
        console.print(
            f"goodput: {goodput['requests_per_second']:,.2f} requests/s; "
            f"{goodput['share']:.0%} of the requests meet the limits"
        )
    if found["errors"]:
        console.print(f"errors: {found['errors']}", style="red")


def _parser() -> argparse.ArgumentParser:
    parser = load_parser(
        "serving",
        __doc__,
        f"256; in a sweep {REQUESTS_PER_CLIENT} for each request at once, or those of {SECONDS} "
        f"seconds, but at least {FEWEST}",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="URL of the endpoint (default: %(default)s)")
    add("--model", required=True, help="the endpoint's name of the model")
    add(
        "--sweep",
        type=Sweep.parse,
        nargs="?",
        const=Sweep.parse(CONCURRENCIES),
        metavar="LOADS",
        help='run several loads, like "rate=0.5,1,2" or "concurrency=1,8"; each has its own '
        f"prompts and record (without LOADS: {CONCURRENCIES})",
    )
    about = "leave out the loads of a sweep that FILE of --record already has"
    add("--resume", action="store_true", help=about)
    add("--ttft-limit", type=float, metavar="MS", help="limit on a request's TTFT, for goodput")
    add("--itl-limit", type=float, metavar="MS", help="limit on a request's mean ITL, for goodput")
    add("--plot", type=Path, metavar="FILE", help="plot the run (.png or .svg; needs matplotlib)")
    return parser
