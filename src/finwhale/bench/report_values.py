"""Turns records into values that can be compared.

A result is a number whose name ends with its unit, such as step_ms, or is listed in MORE or LESS. A
summary counts with its median. A record without results becomes a list of all its fields, so that a
report leaves nothing out.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from finwhale.bench.record import Record

# Fields that describe a run instead of its results.
STAMP = ("date", "commit", "hardware", "versions", "command", "benchmark")
OTHER = "other"
# By the last word of a name: the unit. Less is better, except of memory.
UNITS = {"ms": "ms", "us": "µs", "ns": "ns", "s": "s", "seconds": "s", "gib": "GiB"}
# Of the numbers in an object.
INNER_UNITS = {"phases": "s", "errors": "requests"}
# Ends of names of numbers without a unit, of which more or less is better.
MORE = ("per_s", "per_second", "per_step", "speedup", "overlap", "same_top_1")
LESS = ("relative_error",)
# The fields of a result that say what it is.
WORDS = ("what", "operator", "case", "start", "engine", "implementation", "dtype", "launch")
SIZES = ("running", "batch", "draft_tokens", "rows", "width", "tokens")


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
class RunGroup:
    """Runs of one kind that measured the same work."""

    kind: str
    work: str
    runs: list[Run]


def groups_of(records: Sequence[Record]) -> list[RunGroup]:
    """RunGroup the records by kind and work, in the order of their first record."""
    groups: dict[tuple[str, str], RunGroup] = {}
    for number, record in enumerate(records, 1):
        kind, work = str(record.data.get("benchmark", OTHER)), _work(record.data)
        group = groups.setdefault((kind, work), RunGroup(kind, work, []))
        group.runs.append(Run(f"R{number}", record, values_of(record.data)))
    return list(groups.values())


def _work(data: dict[str, Any]) -> str:
    """What a record measured, in words; runs with the same words are compared."""
    load = data.get("load")
    if isinstance(load, dict):
        others = ("url", "model", "api_key", "seed")
        load = ", ".join(f"{k} {v}" for k, v in load.items() if k not in others and v is not None)
    words = [str(data[name]) for name in ("config", "model") if data.get(name) is not None]
    if data.get("layers") is not None:
        words.append(f"{data['layers']} layers")
    ranks = data.get("tensor_parallel_size") or data.get("ranks") or 1
    words += [f"{ranks} ranks"] if ranks != 1 else []
    return ", ".join([*words, load] if load else words)


def values_of(data: dict[str, Any]) -> Values:
    """The results of a record or, if it has none, all of its fields."""
    fields = {name: value for name, value in data.items() if name not in STAMP}
    return dict(_results(fields, "", "", {})) or dict(_all_fields(fields, ()))


def _results(
    fields: dict[str, Any], what: str, unit: str, floors: dict[str, Any]
) -> Iterator[tuple[Key, Value]]:
    """The results among some fields.

    Args:
        what: what they belong to.
        unit: unit of a number whose name has none.
        floors: the fields around these that are floors.
    """
    floors = {**floors, **{name: value for name, value in fields.items() if "floor" in name}}
    for name, value in fields.items():
        stem, _, last = name.rpartition("_")
        rate = name.endswith(MORE)
        own, shown = INNER_UNITS.get(name, unit), name
        if rate or name.endswith(LESS):
            own = ""
        elif last in UNITS:
            own, shown = UNITS[last], stem or "time"
        shown = shown.replace("_", " ")
        if isinstance(value, dict) and "median" in value:
            value = value["median"]
        if isinstance(value, dict):
            inner = what if name == "results" else _join(what, shown)
            yield from _results(value, inner, own, floors)
        elif isinstance(value, list):
            seen: dict[str, int] = {}
            for part in value:
                if isinstance(part, dict):
                    inner = _name(part)
                    seen[inner] = seen.get(inner, 0) + 1
                    inner += f" {seen[inner]}" if seen[inner] > 1 else ""
                    yield from _results(part, _join(what, inner), "", floors)
        elif name not in floors and (own or rate or name.endswith(LESS)) and _is_finite(value):
            floor = floors.get(f"{stem}_floor_{last}")
            if floor is None and stem in ("", "kernel", "step"):
                floor = floors.get(f"floor_{last}")
            better = None if own == "GiB" else rate
            yield (what, shown), Value(value, own, better, floor if _is_finite(floor) else None)


def _name(result: dict[str, Any]) -> str:
    """The name of a result of a list. It has the sizes that the words do not mention."""
    words = " ".join(str(result[name]) for name in WORDS if result.get(name))
    known = words.replace(",", " ").split()
    sizes = ((name, result.get(name)) for name in SIZES)
    more = [f"{k} {v}" for k, v in sizes if isinstance(v, int | str) and str(v) not in known]
    if isinstance(result.get("accept"), int | float):
        more.append(f"{result['accept']:.0%} right")
    return _join(words, *more)


def _join(*words: str) -> str:
    return ", ".join(filter(None, words))


def _is_finite(value: Any) -> bool:
    """Whether the page can compute with a value."""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _all_fields(value: Any, path: tuple[str, ...]) -> Iterator[tuple[Key, Value]]:
    """Every field of a record of unknown kind."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _all_fields(part, (*path, str(name)))
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for i, part in enumerate(value):
            yield from _all_fields(part, (*path, str(i + 1)))
    else:
        shown = value if _is_finite(value) else str(value)
        yield (", ".join(path[:-1]), path[-1] if path else ""), Value(shown)
