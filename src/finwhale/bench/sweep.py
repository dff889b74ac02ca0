"""Several loads of one kind, from low to high, and the table of their results."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from finwhale.bench.latency import ATTAINMENT, best_goodput, knee
from finwhale.bench.printing import new_table
from finwhale.bench.record import read_records
from finwhale.bench.workload import Load

OVER = {"concurrency": "concurrency", "rate": "request_rate"}
# The number of requests of a point, unless the user gives another.
REQUESTS_PER_CLIENT, SECONDS, FEWEST = 8, 60, 16


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values of `over` (a name in OVER), one for each load."""

    over: str
    values: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> "Sweep":
        """Read "concurrency=1,2,4" or "rate=0.5,1"."""
        over, _, values = text.partition("=")
        try:
            found = tuple(sorted(float(value) for value in values.split(",")))
        except ValueError:
            found = ()
        whole = over == "rate" or all(value == int(value) for value in found)
        if over not in OVER or not found or not found[0] > 0 or not whole:
            raise argparse.ArgumentTypeError(
                f'must be like "concurrency=1,2,4" or "rate=0.5,1,2", got {text!r}'
            )
        return Sweep(over, found)

    def loads(self, load: Load, num_requests: int | None) -> list[Load]:
        """One load for each value.

        Each load has its own seed, because the prompts of the load before may be cached.

        Args:
            num_requests: of each load; None: REQUESTS_PER_CLIENT for each client, or those of
                SECONDS.
        """
        found = []
        for i, value in enumerate(self.values):
            enough = value * (SECONDS if self.over == "rate" else REQUESTS_PER_CLIENT)
            changes: dict[str, Any] = {
                OVER[self.over]: value if self.over == "rate" else int(value),
                "num_requests": num_requests or max(FEWEST, round(enough)),
                # Arrival times use the seed after this one.
                "seed": load.seed + 2 * i,
            }
            found.append(replace(load, **changes))
        return found


def recorded(path: Path | None, wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The last record in a file that has all fields of `wanted`; None without one."""
    if path is None or not path.exists():
        return None
    wanted = json.loads(json.dumps(wanted))
    found = [
        record.data
        for record in read_records([path])
        if all(record.data.get(name) == value for name, value in wanted.items())
    ]
    return found[-1] if found else None


def show(console: Console, over: str, points: Sequence[dict[str, Any]]) -> None:
    """Print the table of a sweep's records, its knee and its goodput."""
    headers = (over, "requests/s", "tokens/s", "TTFT p50", "p99", "ITL p50", "p99", "cached",
               "errors", "within limits")  # fmt: skip
    limited = any("goodput" in point for point in points)
    columns = headers[: None if limited else -1]
    table = new_table("serving, by load; latencies in ms", *columns)
    for point in points:
        cells = [
            f"{point['sweep']['value']:g}",
            f"{point['requests_per_second']:,.2f}",
            f"{point['output_tokens_per_second']:,.1f}",
        ]
        for name in ("ttft_ms", "itl_ms"):
            values = point[name]
            cells += [f"{values[q]:,.1f}" if values else "-" for q in ("p50", "p99")]
        cells.append(f"{point['cached_tokens'] / max(point['prompt_tokens'], 1):.0%}")
        cells.append(str(sum(point["errors"].values())))
        if limited:
            cells.append(f"{point['goodput']['share']:.0%}")
        table.add_row(*cells)
    console.print(table)
    for line in findings(over, points):
        console.print(line)


def findings(over: str, points: Sequence[dict[str, Any]]) -> list[str]:
    """The knee and the goodput of a sweep, in words."""
    lines = []
    if (at := knee(points)) is not None:
        point = points[at]
        lines.append(
            f"knee (most throughput for its latency): {over} {point['sweep']['value']:g}, "
            f"{point['output_tokens_per_second']:,.1f} tokens/s"
        )
    if not any("goodput" in point for point in points):
        return lines
    if (at := best_goodput(points)) is None:
        lines.append(f"goodput: at no load do {ATTAINMENT:.0%} of the requests meet the limits")
    else:
        point = points[at]
        lines.append(
            f"goodput: {point['goodput']['requests_per_second']:,.2f} requests/s at {over} "
            f"{point['sweep']['value']:g}, where {point['goodput']['share']:.0%} of the requests "
            "meet the limits"
        )
    return lines
