"""Records of measurements: JSON objects, one on each line, with the hardware and the versions."""

import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import finwhale
from finwhale.bench.results import print_results
from finwhale.errors import FinwhaleError
from finwhale.platform import processor_name, usable_cores
from finwhale.printing import new_console

RESULTS = Path("bench/results")


def stamp(
    what: str, argv: Sequence[str], packages: Sequence[str], program: str | None = None
) -> dict[str, Any]:
    """The name, time, hardware, command and versions of a measurement, also of `packages`.
    `program` is that of new_parser.
    """
    return {
        "benchmark": what,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "hardware": {
            "cpu": processor_name(),
            "cores": os.cpu_count(),
            "usable_cores": usable_cores(),
            "load_1min": round(os.getloadavg()[0], 2),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": {"python": platform.python_version(), "finwhale": finwhale.__version__}
        | {name: importlib.metadata.version(name) for name in packages},
        "command": shlex.join([*(program or f"finwhale bench {what}").split(), *argv]),
    }


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and spread of a series."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "count": len(ordered),
        "min": round(ordered[0], 4),
        "p10": round(ordered[last // 10], 4),
        "median": round(statistics.median(ordered), 4),
        "p90": round(ordered[last - last // 10], 4),
        "max": round(ordered[-1], 4),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    rank = math.ceil(round(share * len(ordered), 6))
    return round(ordered[max(rank, 1) - 1], 4)


def keep_record(path: Path | None, record: dict[str, Any]) -> None:
    """Print a record's results. Append it to the file of --record; None: the user wants no file."""
    print_results(new_console(160), record)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(f"recorded in {path}")


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a results file: its number, from 1, and its JSON object."""

    path: Path
    line: int
    data: dict[str, Any]


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Read all records of JSONL files; empty lines are left out. Raises FinwhaleError if a file
    cannot be read, or a line is no JSON object.
    """
    found = []
    for path in paths:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise FinwhaleError(f"cannot read {path}: {error.strerror}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                found.append(Record(path, number, _object(line, f"{path}:{number}")))
    return found


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FinwhaleError(f"{where}: expected a JSON object: {error}") from error
    if not isinstance(data, dict):
        raise FinwhaleError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return data


def _commit() -> str | None:
    """The commit of the package's source, with "+" if it has uncommitted changes."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", str(here.parent))
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
