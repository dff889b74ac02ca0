"""The data of a report's plots: lines (drawn by uPlot) and bars."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from finwhale.bench.report_values import Group, Run


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one run. `dashed` marks a floor."""

    label: str
    points: list[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class LinePlot:
    title: str
    x: str
    y: str
    lines: list[Line]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of one or more parts, (label, value) each, whose sum is shown as `text`."""

    label: str
    parts: list[tuple[str, float]]
    text: str


@dataclass(frozen=True, slots=True)
class BarPlot:
    """Bars beside each other; `full` is the value of the whole width."""

    title: str
    bars: list[Bar]
    full: float


def plots_of(group: Group) -> list[LinePlot | BarPlot]:
    """The plots of a group of runs."""
    make = PLOTS.get(group.kind)
    try:
        return list(make(group)) if make else []
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return []  # Records of this kind have other fields and appear only in the table.


def _line(run: Run, label: str, points: Any, *, dashed: bool = False) -> Line:
    name = f"{run.name} {label}".strip()
    return Line(name, sorted({(float(x), float(y)) for x, y in points}), dashed)


def _offline(group: Group) -> Iterator[LinePlot]:
    floor = None
    steps: list[Line] = []
    speeds: list[Line] = []
    for run in group.runs:
        decodes = [one for one in run.data["results"] if one["batch"]]
        # Plot the most frequent context; decodes at others appear only in the table.
        contexts = [one["tokens"] for one in decodes]
        context = max(set(contexts), key=contexts.count) if contexts else None
        decodes = [one for one in decodes if one["tokens"] == context]
        if len(decodes) < 2:
            continue
        steps.append(_line(run, "", [(one["batch"], one["ms"]["median"]) for one in decodes]))
        # The floors of all runs are nearly the same, so plot one.
        floor = _line(run, "floor", [(x["batch"], x["floor_ms"]) for x in decodes], dashed=True)
        medians = [(one["batch"], one["ms"]["median"] / 1e3) for one in decodes]
        speeds.append(_line(run, "", [(1 / step, batch / step) for batch, step in medians]))
    if floor is not None:
        steps.append(floor)
        yield LinePlot("Step of a decode against batch", "sequences", "ms", steps, True)
        title = "Throughput against speed per user"
        yield LinePlot(title, "tokens/s of a user", "tokens/s", speeds)


def _ops(group: Group) -> Iterator[BarPlot]:
    """One plot for each number of tokens, with all runs."""
    sizes = sorted({one["tokens"] for run in group.runs for one in run.data["results"]})
    for tokens in sizes:
        bars = [
            Bar(
                f"{one['operator']} {one['case']} · {run.name}",
                [("share of the floor", one["share_of_floor"])],
                f"{one['share_of_floor']:.0%}",
            )
            for run in group.runs
            for one in run.data["results"]
            if one["tokens"] == tokens
        ]
        bars.sort(key=lambda bar: bar.label)
        yield BarPlot(f"Share of the floor, {tokens:,} token{'s' if tokens > 1 else ''}", bars, 1.0)


def _start(group: Group) -> Iterator[BarPlot]:
    bars = [
        Bar(
            f"{run.name} {one['start']}",
            list(one["phases"].items()),
            f"{sum(one['phases'].values()):.1f} s",
        )
        for run in group.runs
        for one in run.data["results"]
    ]
    full = max(sum(value for _, value in bar.parts) for bar in bars)
    yield BarPlot("Seconds of a start, by phase", bars, full)


PLOTS: dict[str, Callable[[Group], Iterator[LinePlot | BarPlot]]] = {
    "offline": _offline,
    "ops": _ops,
    "start": _start,
}
