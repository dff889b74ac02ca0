"""Turns records into values that can be compared: one reader for each kind of record.

A record whose kind is unknown, or whose fields are not those of its kind, becomes a list of all its
fields, so that a report leaves nothing out.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finwhale.bench.record import Record

# Fields that describe a run instead of its results.
STAMP = ("date", "commit", "hardware", "versions", "command", "benchmark")
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Value:
    """One result.

    Attributes:
        floor: the least that the hardware allows, in the same unit; None: unknown.
        more_is_better: None: neither more nor less is better.
    """

    value: float | str | None
    unit: str = ""
    more_is_better: bool | None = None
    floor: float | None = None


# What was measured and the name of the value, such as ("decode, batch 1", "time").
Key = tuple[str, str]
Values = dict[Key, Value]


@dataclass(slots=True)
class Run:
    """A record, which is a column of a comparison."""

    name: str
    record: Record
    values: Values

    @property
    def data(self) -> dict[str, Any]:
        return self.record.data


@dataclass(slots=True)
class Group:
    """Runs of one kind that measured the same work."""

    kind: str
    work: str
    runs: list[Run]


def groups_of(records: Sequence[Record]) -> list[Group]:
    """Group the records by kind and work, in the order of their first record."""
    groups: dict[tuple[str, str], Group] = {}
    for number, record in enumerate(records, 1):
        kind, values = _read(record.data)
        work = _work(kind, record.data)
        group = groups.setdefault((kind, work), Group(kind, work, []))
        group.runs.append(Run(f"R{number}", record, values))
    return list(groups.values())


def _work(kind: str, data: dict[str, Any]) -> str:
    """What a record measured, in words; runs with the same words are compared."""
    load = data.get("load")
    if kind == "serving" and isinstance(load, dict):
        return _load_in_words(load)
    words = [str(data[name]) for name in ("config", "model") if data.get(name) is not None]
    if data.get("layers") is not None:
        words.append(f"{data['layers']} layers")
    ranks = data.get("tensor_parallel_size") or data.get("ranks") or 1
    words += [f"{ranks} ranks"] if ranks != 1 else []
    if isinstance(load, str):
        words.append(load)
    return ", ".join(words)


def _load_in_words(load: dict[str, Any]) -> str:
    words = ["chat completions" if load.get("chat") else "completions"]
    words.append(str(load.get("dataset", "uniform")))
    for name, way in (("input_tokens", "in"), ("output_tokens", "out")):
        words.append(f"{_span(load.get(name))} tokens {way}")
    if load.get("shared_prefix"):
        words.append(f"{load['shared_prefix']} shared")
    if load.get("dataset") == "agents":
        words.append(f"{load.get('turns')} turns")
    return ", ".join(words)


def _span(span: Any) -> str:
    low, high = span if isinstance(span, list) and len(span) == 2 else (span, span)
    return f"{low}" if low == high else f"{low} to {high}"


def _read(data: dict[str, Any]) -> tuple[str, Values]:
    kind = str(data.get("benchmark"))
    reader = READERS.get(kind)
    if reader is not None:
        try:
            values = dict(reader(data))
            # The page computes with the values, so each must be a finite number.
            if all(_is_number(value) for value in values.values()):
                return kind, values
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            pass
    fields = {name: value for name, value in data.items() if name not in STAMP}
    return (kind if data.get("benchmark") else OTHER), dict(_all_fields(fields, ()))


def _is_number(value: Value) -> bool:
    numbers = [one for one in (value.value, value.floor) if one is not None]
    return all(isinstance(one, int | float) and math.isfinite(one) for one in numbers)


def _all_fields(value: Any, path: tuple[str, ...]) -> Iterator[tuple[Key, Value]]:
    """Every field of a record of unknown kind."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _all_fields(part, (*path, str(name)))
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for i, part in enumerate(value):
            yield from _all_fields(part, (*path, str(i + 1)))
    else:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        shown = value if number and math.isfinite(value) else str(value)
        yield (", ".join(path[:-1]), path[-1] if path else ""), Value(shown)


def _less(value: Any, unit: str, floor: Any = None) -> Value:
    return Value(value, unit, more_is_better=False, floor=floor)


def _more(value: Any, unit: str) -> Value:
    return Value(value, unit, more_is_better=True)


Reader = Callable[[dict[str, Any]], Iterable[tuple[Key, Value]]]


def _offline(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for result in data["results"]:
        what, median = result["what"], result["ms"]["median"]
        yield (what, "time"), _less(median, "ms", result["floor_ms"])
        tokens = result["batch"] or result["tokens"]
        yield (what, "speed"), _more(tokens / median * 1e3, "tokens/s")
    for name, value in data.get("memory", {}).items():
        yield ("memory", name.removesuffix("_gib")), Value(value, "GiB")


def _drafts(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for result in data["results"]:
        what = f"batch {result['batch']}, {result['draft_tokens']} drafts"
        if result.get("accept") is not None:
            what += f", {result['accept']:.0%} right"
        yield (what, "speed"), _more(result["tokens_per_s"], "tokens/s")
        yield (what, "step"), _less(result["step_ms"]["median"], "ms")
        yield (what, "tokens of a step"), _more(result["tokens_per_step"], "")


def _ops(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for result in data["results"]:
        what = f"{result['operator']} {result['case']}".strip() + f", tokens: {result['tokens']}"
        yield (what, "time"), _less(result["kernel_us"]["median"], "µs", result["floor_us"])


def _start(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    count: dict[str, int] = {}
    for result in data["results"]:
        kind = result["start"]
        count[kind] = count.get(kind, 0) + 1
        what = f"{kind} start" + (f" {count[kind]}" if count[kind] > 1 else "")
        for phase, seconds in result["phases"].items():
            yield (what, phase), _less(seconds, "s")
        yield (what, "first token"), _less(result["first_token_s"], "s")


def _throughput(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for what, result in data["results"].items():
        yield (what, "speed"), _more(result["output_tokens_per_s"], "tokens/s")
        yield (what, "step"), _less(result["step_ms"]["median"], "ms")
        for name in ("p50", "p99"):
            between = result["between_tokens_ms"][name]
            yield (what, f"between tokens, {name}"), _less(between, "ms")


def _load(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for what, seconds in data["seconds"].items():
        floor = data["seconds"]["plain read"]["median"] if what == "load" else None
        yield (what, "time"), _less(seconds["median"], "s", floor)
        if what != "fold":
            yield (what, "speed"), _more(data["bytes"] / seconds["median"] / 1e9, "GB/s")


def _cpu(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for result in data["results"]:
        for engine in result["engines"]:
            what = f"{result['what']}: {engine['engine']}"
            yield (what, "time"), _less(engine["ms"]["median"], "ms", result["floor_ms"])
            yield (what, "speed"), _more(engine["tokens_per_s"], "tokens/s")


def _overhead(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for result in data["results"]:
        what = f"{result['what']}, {result['running']} running"
        yield (what, "host time of a step"), _less(result["us"]["median"], "µs")
        yield (what, "limit"), Value(result["allowed_us"], "µs")


def _prefix(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for result in data["results"]:
        what = f"{result['tokens']} tokens"
        yield (what, "keys"), _less(result["keys_ns"]["median"], "ns a token")
        yield (what, "until planned"), _less(result["whole_ns"]["median"], "ns a token")


def _collectives(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for result in data["results"]:
        names = ("what", "implementation", "dtype", "launch")
        what = " ".join(str(result[name]) for name in names if result.get(name) is not None)
        if "rows" in result:
            what += f", {result['rows']} x {result['width']}"
        elif "bytes" in result:
            what += f", {result['bytes']} bytes"
        if "us" in result:
            yield (what, "time"), _less(result["us"]["median"], "µs", result.get("floor_us"))
        elif "seconds" in result:
            yield (what, "time"), _less(result["seconds"], "s")


def _accuracy(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    for name, ways in data.items():
        if name not in STAMP and isinstance(ways, dict):
            for way, errors in ways.items():
                for error, value in errors.items():
                    what, shown = f"{name}: {way}", error.replace("_", " ")
                    yield (what, shown), Value(value, "", error != "relative_error")


def _serving(data: dict[str, Any]) -> Iterator[tuple[Key, Value]]:
    load = data["load"]
    what = f"{load['concurrency']} at once" if load["concurrency"] else "no limit at once"
    if load["request_rate"] != "inf":
        what = f"{float(load['request_rate']):g} requests/s" + (
            f", {what}" if load["concurrency"] else ""
        )
    yield (what, "output"), _more(data["output_tokens_per_second"], "tokens/s")
    yield (what, "requests"), _more(data["requests_per_second"], "/s")
    for name, shown in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("itl_ms", "ITL")):
        for quantile in ("p50", "p99") if data[name] else ():
            yield (what, f"{shown} {quantile}"), _less(data[name][quantile], "ms")
    cached = data["cached_tokens"] / max(data["prompt_tokens"], 1)
    yield (what, "prompt tokens cached"), Value(100 * cached, "%")
    if data["errors"]:
        yield (what, "errors"), _less(sum(data["errors"].values()), "")


READERS: dict[str, Reader] = {
    "offline": _offline,
    "offline with drafts": _drafts,
    "ops": _ops,
    "start": _start,
    "throughput": _throughput,
    "load": _load,
    "cpu": _cpu,
    "overhead": _overhead,
    "prefix": _prefix,
    "collectives": _collectives,
    "accuracy": _accuracy,
    "serving": _serving,
}
