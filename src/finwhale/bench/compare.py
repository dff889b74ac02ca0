"""Compare two OpenAI-compatible servers under one load, in turns.

Each round sends the same requests to both servers, one server after the other: A B, B A, A B and so
on, so that a slow change of the machine affects both alike. Rounds have different prompts, so that
no server finds those of an earlier round in its cache. A round's difference is the ratio of the two
servers' values. The table shows the mean difference of all rounds with its 95% confidence interval
(Student's t on the logarithms of the ratios). One more round comes first and is not counted.
"""

import argparse
import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from finwhale.bench.latency import summarise
from finwhale.bench.load_client import Endpoint, check_client, check_endpoint, run_load
from finwhale.bench.printing import new_console, new_table
from finwhale.bench.record import keep_record, stamp
from finwhale.bench.serving_options import load_parser, read_endpoint, read_load
from finwhale.bench.workload import Load, described
from finwhale.errors import FinwhaleError

REQUESTS, ROUNDS = 64, 6
# The compared values: their names in `summarise`, and whether more is better.
VALUES: dict[str, tuple[tuple[str, ...], bool]] = {
    "output tokens/s": (("output_tokens_per_second",), True),
    "TTFT, mean": (("ttft_ms", "mean"), False),
    "TTFT, p99": (("ttft_ms", "p99"), False),
    "TPOT, mean": (("tpot_ms", "mean"), False),
    "ITL, p99": (("itl_ms", "p99"), False),
    "whole request, mean": (("e2e_ms", "mean"), False),
}
# The 97.5% quantiles of Student's t with 1, 2, ... degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
         2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060,
         2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip


def difference(a: Sequence[float], b: Sequence[float]) -> dict[str, float]:
    """The paired difference (B - A) / A of two or more rounds, with a 95% confidence interval.

    Args:
        a, b: the positive values of the rounds, in the same order.
    """
    logs = [math.log(right / left) for left, right in zip(a, b, strict=True)]
    mean, free = statistics.fmean(logs), len(logs) - 1
    quantile = T_975[free - 1] if free <= len(T_975) else 1.96 + 2.5 / free
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    ends = {"difference": mean, "low": mean - half, "high": mean + half}
    return {name: round(math.expm1(value), 5) for name, value in ends.items()}


def order(round_: int) -> tuple[int, int]:
    """The servers in the order of a round: A B, B A, A B and so on."""
    return (0, 1) if round_ % 2 == 0 else (1, 0)


def value_of(found: dict[str, Any], names: Sequence[str]) -> float | None:
    """A value of `summarise`; None if no request was answered."""
    value: Any = found
    for name in names:
        value = value and value.get(name)
    return float(value) if value else None


def differences(rounds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Both servers' medians of each of VALUES, and their difference.

    Args:
        rounds: the summaries of A and of B, for each round.
    """
    found: dict[str, Any] = {}
    for title, (names, _) in VALUES.items():
        pairs = [(value_of(one, names), value_of(other, names)) for one, other in rounds]
        whole = [(one, other) for one, other in pairs if one is not None and other is not None]
        if len(whole) < 2:
            continue
        a, b = ([pair[i] for pair in whole] for i in (0, 1))
        medians = {"a": statistics.median(a), "b": statistics.median(b)}
        found[title] = {k: round(v, 3) for k, v in medians.items()} | difference(a, b)
    return found


async def run_rounds(
    endpoints: Sequence[Endpoint], load: Load, num_rounds: int, console: Console
) -> list[list[dict[str, Any]]]:
    """Run one round that is not counted, and `num_rounds` others; returns their summaries."""
    rounds: list[list[dict[str, Any]]] = []
    for number in range(-1, num_rounds):
        # Arrival times use the seed after this one.
        now = replace(load, seed=load.seed + 2 * (number + 1))
        pair: list[dict[str, Any]] = [{}, {}]
        for i in order(number):
            pair[i] = summarise(*await run_load(endpoints[i], now))
        failed = [f"{'AB'[i]}: {one['errors']}" for i, one in enumerate(pair) if one["errors"]]
        if failed:
            raise FinwhaleError(f"requests failed in round {number + 1}: {'; '.join(failed)}")
        if number < 0:
            continue
        rounds.append(pair)
        a, b = (f"{one['output_tokens_per_second']:,.1f} tokens/s" for one in pair)
        console.print(f"round {number + 1}: A {a}, B {b}", highlight=False)
    return rounds


def show(console: Console, endpoints: Sequence[Endpoint], found: dict[str, Any]) -> None:
    columns = ("", "A", "B", "difference", "95% interval", "")
    table = new_table("medians of the rounds; B against A", *columns)
    for title, line in found.items():
        better = (line["difference"] > 0) == VALUES[title][1]
        clear = line["low"] > 0 or line["high"] < 0
        table.add_row(
            title,
            f"{line['a']:,.2f}",
            f"{line['b']:,.2f}",
            f"{line['difference']:+.1%}",
            f"{line['low']:+.1%} to {line['high']:+.1%}",
            ("B is better" if better else "A is better") if clear else "no clear difference",
        )
    console.print(table)
    for name, endpoint in zip("AB", endpoints, strict=True):
        console.print(f"{name}: {endpoint.url}, {endpoint.model}; latencies in ms", highlight=False)


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench compare`."""
    parser = _parser()
    args = parser.parse_args(argv)
    if len(args.url) != 2 or len(args.model) > 2:
        parser.error("give --url twice, and --model once or twice")
    if args.rounds < 2:
        parser.error("--rounds must be at least 2")
    args.num_requests = args.num_requests or REQUESTS
    load = read_load(args, parser)
    models = args.model * 2 if len(args.model) == 1 else args.model
    endpoints = [read_endpoint(*pair) for pair in zip(args.url, models, strict=True)]
    check_client(load)
    console = new_console()

    async def run() -> list[list[dict[str, Any]]]:
        for endpoint in endpoints:
            await check_endpoint(endpoint)
        return await run_rounds(endpoints, load, args.rounds, console)

    rounds = asyncio.run(run())
    found = differences(rounds)
    show(console, endpoints, found)
    servers = [{"url": endpoint.url, "model": endpoint.model} for endpoint in endpoints]
    record = {
        **stamp("compare", argv, ("aiohttp",)),
        "load": described(load),
        "servers": dict(zip("ab", servers, strict=True)),
        "results": found,
        "rounds": [dict(zip("ab", pair, strict=True)) for pair in rounds],
    }
    keep_record(args.record, record)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = load_parser("compare", __doc__, f"{REQUESTS} in each round")
    add = parser.add_argument
    add("--url", action="append", required=True, help="URL of a server; give it twice: A, then B")
    add("--model", action="append", required=True, help="name of the model, or those of A and of B")
    about = "number of rounds that count (default: %(default)s)"
    add("--rounds", type=int, default=ROUNDS, metavar="N", help=about)
    return parser
