"""Finds the results of a record, and prints them.

A result is a number whose name ends with its unit, such as step_ms, or as one of BETTER does. A
summary counts with its median. A record without results becomes a list of all its fields, so that a
report leaves nothing out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from finwhale.printing import print_table

# Fields that describe a run instead of its results.
STAMP = ("date", "commit", "hardware", "versions", "command", "benchmark")
# By the last word of a name: the unit. Less is better, except of memory.
UNITS = {"ms": "ms", "us": "µs", "ns": "ns", "s": "s", "seconds": "s", "gib": "GiB"}
# Of the numbers in an object.
INNER_UNITS = {"phases": "s", "errors": "requests"}
# By the end of a name, of numbers without a unit: whether more is better; None: neither.
BETTER = {
    **dict.fromkeys(("tokens_per_s", "per_second", "per_gpu", "per_step", "speedup"), True),
    **dict.fromkeys(("accepted", "speed_over_plain", "overlap"), True),
    **dict.fromkeys(("same_top_1", "same_tokens"), True),
    **dict.fromkeys(("relative_error", "step_over_plain"), False),
    **dict.fromkeys(("experts_hit", "found", "prompt_tokens", "cached_tokens"), None),
    **dict.fromkeys(("sm_mhz", "watts", "power_limited"), None),
}
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

    @property
    def floor_share(self) -> float | None:
        """How near the value is to its floor; None: it has no floor."""
        if self.floor is None or not self.value or isinstance(self.value, str):
            return None
        return self.floor / self.value


# A result is found by what was measured and by its name, such as ("decode, batch 1", "time").
Key = tuple[str, str]
Values = dict[Key, Value]


def print_results(console: Console, data: dict[str, Any]) -> None:
    """Print a record's results: a row for what was measured, a column for the name of a value."""
    rows: dict[str, dict[str, str]] = {}
    for (what, name), value in values_of(data).items():
        share = f" ({value.floor_share:.0%})" if value.floor_share else ""
        column = f"{name}, {value.unit}" if value.unit else name
        rows.setdefault(what, {})[column] = f"{in_digits(value.value)}{share}"
    tables: list[dict[str, dict[str, str]]] = []
    for what, cells in rows.items():
        # Rows share a table if they share a column.
        fitting = (one for one in tables if any(cells.keys() & row.keys() for row in one.values()))
        table = next(fitting, None)
        if table is None:
            tables.append(table := {})
        table[what] = cells
    for table in tables:
        columns = list(dict.fromkeys(column for cells in table.values() for column in cells))
        lines = ((what, *(cells.get(one, "") for one in columns)) for what, cells in table.items())
        print_table(console, None, ("", *columns), lines)
    console.print("times are medians; in brackets: the share of the floor")


def in_digits(value: float | str | None) -> str:
    """A value with four digits, or all of a whole number."""
    if isinstance(value, str | None):
        return value or ""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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
        end = next(filter(name.endswith, BETTER), None)
        own, shown = INNER_UNITS.get(name, unit), name
        if end is not None:
            own = ""
        elif last in UNITS and not name.endswith("_per_s"):
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
        elif name not in floors and (own or end is not None) and _is_finite(value):
            floor = floors.get(f"{stem}_floor_{last}")
            if floor is None and stem in ("", "kernel", "step"):
                floor = floors.get(f"floor_{last}")
            better = BETTER[end] if end is not None else None if own == "GiB" else False
            yield (what, shown), Value(value, own, better, floor if _is_finite(floor) else None)


def _name(result: dict[str, Any]) -> str:
    """The name of a result of a list. It has the sizes that the words do not mention."""
    words = " ".join(str(result[name]) for name in WORDS if result.get(name))
    known = words.replace(",", " ").split()
    # A batch of 0 is a prefill.
    sizes = ((name, result.get(name)) for name in SIZES if name != "batch" or result.get(name))
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
