"""Turn records of benchmarks into one HTML file of tables that compare them.

Runs of the same kind and the same work stand beside each other, with their differences from the
first run in per cent. The file loads nothing from other hosts and runs no script.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import finwhale
from finwhale.bench.record import Record, read_records
from finwhale.bench.results import Value, Values, in_digits, values_of
from finwhale.errors import FinwhaleError
from finwhale.options import Parser

MAX_ROWS = 1000  # of a table; a record of unknown kind may have any size
# Text of a record can never run or load anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


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
        kind, work = str(record.data.get("benchmark", "other")), _work(record.data)
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
    lanes = data.get("data_parallel_size", 1)
    words += [f"{lanes} data-parallel ranks"] if lanes != 1 else []
    return ", ".join([*words, load] if load else words)


def page(title: str, groups: Sequence[RunGroup]) -> str:
    """The whole page: one file, so that it can be opened from a disk or sent by mail."""
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        f"<p>Made by <code>finwhale bench report</code> {escape(finwhale.__version__)}. A share of "
        "the floor says how near a time is to the least that the hardware allows. Differences are "
        "against the first run of a table.</p>",
        '<nav aria-label="Contents"><ul><li><a href="#runs">Runs</a></li>',
    ]
    parts += [f'<li><a href="#g{i}">{_heading(group)}</a></li>' for i, group in enumerate(groups)]
    parts += ['</ul></nav><section id="runs"><h2>Runs</h2>', *_runs(groups), "</section>"]
    for number, group in enumerate(groups):
        parts += [f'<section id="g{number}"><h2>{_heading(group)}</h2>', *_comparison(group)]
        parts.append("</section>")
    return "".join([*parts, "</main></body></html>\n"])


def _heading(group: RunGroup) -> str:
    return escape(f"{group.kind}: {group.work}" if group.work else group.kind)


def _runs(groups: Sequence[RunGroup]) -> Iterator[str]:
    headers = ("run", "what", "when", "hardware", "versions", "command", "record")
    yield _table_head(headers)
    for group in groups:
        for run in group.runs:
            texts = (run.data.get("command"), run.data.get("note"))
            cells = [
                _heading(group),
                escape(str(run.data.get("date", ""))),
                escape(_hardware(run.data.get("hardware"))),
                escape(_versions(run.data)),
                "<br>".join(f"<code>{escape(str(text))}</code>" for text in texts if text),
                escape(f"{run.record.path}:{run.record.line}"),
            ]
            yield f'<tr><th scope="row">{run.name}</th>'
            yield "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"


def _hardware(found: Any) -> str:
    if not isinstance(found, dict):
        return str(found or "")
    cores = found.get("usable_cores", found.get("cores"))
    parts = [found.get("gpu"), found.get("cpu"), cores and f"{cores} cores"]
    if found.get("load_1min") is not None:
        parts.append(f"load {found['load_1min']}")
    return ", ".join(str(part) for part in parts if part)


def _versions(data: dict[str, Any]) -> str:
    found = data.get("versions")
    parts = [f"{k} {v}" for k, v in found.items()] if isinstance(found, dict) else []
    if data.get("commit"):
        parts.append(f"commit {data['commit']}")
    return ", ".join(parts)


def _comparison(group: RunGroup) -> Iterator[str]:
    keys = list(dict.fromkeys(key for run in group.runs for key in run.values))
    # Rows of one thing stand together, in the order of the first.
    order = {what: i for i, what in enumerate(dict.fromkeys(what for what, _ in keys))}
    keys.sort(key=lambda key: order[key[0]])
    days = [escape(str(run.data.get("date", ""))[:10]) for run in group.runs]
    names = [f"{r.name} <small>{day}</small>" for r, day in zip(group.runs, days, strict=True)]
    yield _table_head(("what", "value", *names))
    for what, rows in groupby(keys[:MAX_ROWS], key=lambda key: key[0]):
        found = list(rows)
        for i, key in enumerate(found):
            cells = [run.values.get(key) for run in group.runs]
            unit = next((cell.unit for cell in cells if cell is not None), "")
            yield "<tr>"
            if i == 0:
                yield f'<th scope="rowgroup" rowspan="{len(found)}">{escape(what)}</th>'
            yield f'<th scope="row">{escape(key[1])}{f", {escape(unit)}" if unit else ""}</th>'
            yield "".join(_cell(cell, cells[0] if j else None) for j, cell in enumerate(cells))
            yield "</tr>"
    yield "</tbody></table></div>"
    if len(keys) > MAX_ROWS:
        yield f"<p>{len(keys) - MAX_ROWS:,} more values are in the record.</p>"


def _table_head(headers: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col">{header}</th>' for header in headers)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{cells}</tr></thead><tbody>'


def _cell(cell: Value | None, base: Value | None) -> str:
    if cell is None or cell.value is None:
        return "<td></td>"
    if isinstance(cell.value, str):
        return f'<td class="text">{escape(cell.value)}</td>'
    parts = [f'<td class="number">{in_digits(cell.value)}']
    if cell.floor_share is not None:
        parts.append(f' <span class="floor">{cell.floor_share:.0%} of floor</span>')
    return "".join([*parts, f" {_difference(cell, cell.value, base)}</td>"])


def _difference(cell: Value, value: float, base: Value | None) -> str:
    """The difference from the first run in per cent."""
    if base is None or not base.value or isinstance(base.value, str):
        return '<span class="delta"></span>'
    change = 100 * (value - base.value) / abs(base.value)
    kind = ""
    if cell.more_is_better is not None and abs(change) >= 0.05:
        kind = " good" if (change > 0) == cell.more_is_better else " bad"
    return f'<span class="delta{kind}">{change:+.1f}%</span>'


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench report`."""
    args = _parser().parse_args(argv)
    records = read_records(args.records)
    if not records:
        raise FinwhaleError(f"no record in {', '.join(map(str, args.records))}")
    text = page(args.title, groups_of(records))
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FinwhaleError(f"cannot write {args.out}: {error.strerror}") from error
    print(f"{len(records)} records in {args.out}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="finwhale bench report", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("records", nargs="+", type=Path, metavar="RECORDS", help="JSONL files of --record")
    about = "the file to write (default: %(default)s)"
    add("--out", type=Path, default=Path("report.html"), metavar="FILE", help=about)
    add("--title", default="Finwhale benchmarks", help="title of the page")
    return parser
