"""Summaries of a load test: latencies, throughput, goodput, and the knee of several loads."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finwhale.bench.load_client import Result

QUANTILES = (50, 99)
# A load meets the limits if this share of its requests does. DistServe (OSDI 2024) uses 90% too.
ATTAINMENT = 0.9


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on latency in milliseconds; None: no limit.

    Attributes:
        ttft_ms: time to first token.
        itl_ms: a request's mean time between pieces.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __bool__(self) -> bool:
        return self.ttft_ms is not None or self.itl_ms is not None

    def met_by(self, result: Result) -> bool:
        if result.error is not None:
            return False
        if self.ttft_ms is not None and result.ttft * 1e3 > self.ttft_ms:
            return False
        gaps = result.between
        return self.itl_ms is None or not gaps or statistics.fmean(gaps) * 1e3 <= self.itl_ms


def summarise(
    results: Sequence[Result], seconds: float, limits: Limits | None = None
) -> dict[str, Any]:
    """Compute the mean, P50 and P99 of each latency in milliseconds, and the throughput.

    With limits, "goodput" counts the requests that meet all of them.
    """
    good = [r for r in results if r.error is None]
    errors = Counter(r.error for r in results if r.error is not None)
    output = sum(r.output_tokens for r in good)
    prompt = sum(r.prompt_tokens for r in good)
    tpots = [r.tpot for r in good if r.tpot is not None]
    found = {
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
    if limits:
        met = sum(map(limits.met_by, results))
        found["goodput"] = {
            "ttft_limit_ms": limits.ttft_ms,
            "itl_limit_ms": limits.itl_ms,
            "share": round(met / len(results), 4),
            "requests_per_second": round(met / seconds, 3),
        }
    return found


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {"mean": statistics.fmean(ordered) * 1e3}
    for q in QUANTILES:
        # The nearest rank is always a measured value.
        found[f"p{q}"] = ordered[math.ceil(q / 100 * len(ordered)) - 1] * 1e3
    return {name: round(value, 3) for name, value in found.items()}


def knee(points: Sequence[dict[str, Any]]) -> int | None:
    """The load with the most "power": throughput over latency (Kleinrock, ICC 1979).

    Below the knee, more load gives more throughput at nearly the same latency; above it, more load
    gives more latency at nearly the same throughput.

    Args:
        points: results of `summarise`, one for each load.

    Returns:
        The position in `points`; None if no request of any point was answered.
    """
    powers = {
        i: point["output_tokens_per_second"] / point["e2e_ms"]["mean"]
        for i, point in enumerate(points)
        if point["e2e_ms"]
    }
    return max(powers, key=lambda i: powers[i]) if powers else None


def best_goodput(points: Sequence[dict[str, Any]]) -> int | None:
    """The load with the most requests per second that meet the limits.

    Returns:
        The position in `points`; None if no point has enough requests (ATTAINMENT) within limits.
    """
    rates = {
        i: point["goodput"]["requests_per_second"]
        for i, point in enumerate(points)
        if "goodput" in point and point["goodput"]["share"] >= ATTAINMENT
    }
    return max(rates, key=lambda i: rates[i]) if rates else None
