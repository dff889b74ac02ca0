"""Plots a load test: the distributions of latency, and the throughput over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from finwhale.bench.load_client import Result


def plot(path: Path, results: Sequence[Result], summary: dict[str, Any]) -> None:
    """Write the plot. The suffix of `path` determines the format.

    Args:
        summary: result of `latency.summarise`.
    """
    good = [r for r in results if r.error is None]
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    latency, gaps, rate = figure.subplots(1, 3)
    _cumulative(latency, [r.ttft * 1e3 for r in good], "time to first token, ms")
    _cumulative(gaps, [gap * 1e3 for r in good for gap in r.between], "between tokens, ms")
    seconds = int(summary["seconds"]) + 1
    counts = [0] * seconds
    for result in good:
        for piece in result.pieces:
            counts[min(seconds - 1, int(result.begin + piece))] += 1
    rate.step(range(seconds), counts, where="post")
    rate.set_xlabel("seconds")
    rate.set_ylabel("pieces per second")
    speed = summary["output_tokens_per_second"]
    figure.suptitle(f"{summary['completed']} requests, {speed:,.0f} tokens/s generated")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _cumulative(axes: Any, values: Sequence[float], label: str) -> None:
    ordered = sorted(values)
    shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
    axes.step(ordered, shares, where="post")
    axes.set_xlabel(label)
    axes.set_ylabel("share")
    axes.set_ylim(0, 1.02)
    for share in (0.5, 0.99):
        axes.axhline(share, color="grey", linewidth=0.5, linestyle=":")
