"""The HTML page of a report: one file, so that it can be opened from a disk or sent by mail."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import finwhale
from finwhale.bench.record import Record
from finwhale.bench.report_plots import BarPlot, LinePlot, plots_of
from finwhale.bench.report_values import Group, Run, Value
from finwhale.errors import FinwhaleError

_ROOT = Path(str(resources.files("finwhale")))
_WEB = _ROOT / "bench/report_web"
# The server's page uses the same library; tools/vendor_page.py writes it.
_UPLOT = _ROOT / "server/web/vendor"
_EXPORT = "export default uPlot;"

TITLES = {
    "offline": "Whole steps of the engine",
    "offline with drafts": "Decoding with drafts",
    "ops": "Kernels",
    "start": "Starts",
    "throughput": "Many requests",
    "load": "Loading a checkpoint",
    "cpu": "CPU, beside transformers",
    "overhead": "The host's work in a step",
    "prefix": "Finding a cached prefix",
    "collectives": "Communication between GPUs",
    "accuracy": "Accuracy of the operators",
    "serving": "Serving under load",
    "other": "Other records",
}
MAX_ROWS = 1000  # of a table; a record of unknown kind may have any size


def page(title: str, groups: Sequence[Group]) -> str:
    """The whole page."""
    licence = f"/*!\n{_file(_UPLOT / 'uplot.LICENSE.txt')}*/\n"
    uplot = licence + _file(_UPLOT / "uplot.js").replace(_EXPORT, "")
    script = uplot + _file(_WEB / "report.js")
    style = _file(_UPLOT / "uplot.css") + _file(_WEB / "report.css")
    # The hash allows this one script, so text of a record can never run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
        f"<p>Made by <code>finwhale bench report</code> {escape(finwhale.__version__)}. A share of "
        "the floor says how near a time is to the least that the hardware allows. Differences are "
        "against the first run; the button with another run's name compares with that run.</p>",
    ]
    body = [*_contents(groups), *_runs(groups)]
    for number, group in enumerate(groups):
        body += _section(number, group)
    return "".join([*head, *body, f"</main><script>{script}</script></body></html>\n"])


def _file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise FinwhaleError(f"the installation of Finwhale lacks {path}") from error


def _heading(group: Group) -> str:
    title = TITLES.get(group.kind, group.kind)
    return escape(f"{title}: {group.work}" if group.work else title)


def _contents(groups: Sequence[Group]) -> Iterator[str]:
    yield '<nav aria-label="Contents"><ul><li><a href="#runs">Runs</a></li>'
    for number, group in enumerate(groups):
        yield f'<li><a href="#g{number}">{_heading(group)}</a></li>'
    yield "</ul></nav>"


def _runs(groups: Sequence[Group]) -> Iterator[str]:
    yield '<section id="runs"><h2>Runs</h2>'
    headers = ("run", "what", "when", "hardware", "versions", "command", "record")
    yield _table_head(headers)
    for group in groups:
        for run in group.runs:
            cells = [
                _heading(group),
                escape(str(run.data.get("date", ""))),
                escape(_hardware(run.data.get("hardware"))),
                escape(_versions(run.data)),
                "<br>".join(f"<code>{escape(command)}</code>" for command in _commands(run.data)),
                escape(_place(run.record)),
            ]
            yield f'<tr><th scope="row">{run.name}</th>'
            yield "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div></section>"


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


def _commands(data: dict[str, Any]) -> list[str]:
    """A record's command and note."""
    found = (data.get(name) for name in ("command", "note"))
    return [str(text) for text in found if text is not None]


def _place(record: Record) -> str:
    return f"{record.path}:{record.line}"


def _section(number: int, group: Group) -> Iterator[str]:
    yield f'<section id="g{number}"><h2>{_heading(group)}</h2>'
    if any(plots := plots_of(group)):
        yield '<div class="plots">'
        for plot in plots:
            yield from _lines(plot) if isinstance(plot, LinePlot) else _bars(plot)
        yield "</div>"
    yield from _comparison(group)
    yield "</section>"


def _lines(plot: LinePlot) -> Iterator[str]:
    data = json.dumps(asdict(plot)).replace("<", "\\u003c")
    yield f'<figure><figcaption>{escape(plot.title)}</figcaption><div class="plot"></div>'
    yield f'<script type="application/json">{data}</script></figure>'


def _bars(plot: BarPlot) -> Iterator[str]:
    names = list(dict.fromkeys(name for bar in plot.bars for name, _ in bar.parts))
    yield f'<figure class="bars"><figcaption>{escape(plot.title)}</figcaption>'
    if len(names) > 1:
        marks = (
            f'<span class="key c{names.index(name) % 8}">{escape(name)}</span>' for name in names
        )
        yield f"<p>{' '.join(marks)}</p>"
    yield "<table>"
    for bar in plot.bars:
        yield f'<tr><th scope="row">{escape(bar.label)}</th><td class="track">'
        for name, value in bar.parts:
            width = 100 * min(1.0, max(0.0, value / plot.full)) if plot.full else 0.0
            yield f'<span class="c{names.index(name) % 8}" style="width:{width:.2f}%" '
            yield f'title="{escape(name)}: {_number(value)}"></span>'
        yield f"</td><td>{escape(bar.text)}</td></tr>"
    yield "</table></figure>"


def _comparison(group: Group) -> Iterator[str]:
    keys = list(dict.fromkeys(key for run in group.runs for key in run.values))
    # Rows of one thing stand together, in the order of the first.
    order = {what: i for i, what in enumerate(dict.fromkeys(what for what, _ in keys))}
    keys.sort(key=lambda key: order[key[0]])
    several = len(group.runs) > 1
    names = [_run_header(run, i, several) for i, run in enumerate(group.runs)]
    yield _table_head(("what", "value", *names), escaped=True)
    for what, rows in groupby(keys[:MAX_ROWS], key=lambda key: key[0]):
        found = list(rows)
        for i, key in enumerate(found):
            cells = [run.values.get(key) for run in group.runs]
            unit = next((cell.unit for cell in cells if cell is not None), "")
            yield "<tr>"
            if i == 0:
                yield f'<th scope="rowgroup" rowspan="{len(found)}">{escape(what)}</th>'
            yield f'<th scope="row">{escape(key[1])}{f", {escape(unit)}" if unit else ""}</th>'
            base = cells[0]
            yield "".join(_cell(cell, base if j else None) for j, cell in enumerate(cells))
            yield "</tr>"
    yield "</tbody></table></div>"
    if len(keys) > MAX_ROWS:
        yield f"<p>{len(keys) - MAX_ROWS:,} more values are in the record.</p>"


def _run_header(run: Run, number: int, several: bool) -> str:
    day = f"<small>{escape(str(run.data.get('date', ''))[:10])}</small>"
    if not several:
        return f"{run.name} {day}"
    pressed, about = "true" if number == 0 else "false", escape(_place(run.record))
    button = f'<button type="button" aria-pressed="{pressed}" title="{about}">{run.name}</button>'
    return f"{button} {day}"


def _table_head(headers: Sequence[str], *, escaped: bool = False) -> str:
    cells = "".join(
        f'<th scope="col">{header if escaped else escape(header)}</th>' for header in headers
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{cells}</tr></thead><tbody>'


def _cell(cell: Value | None, base: Value | None) -> str:
    if cell is None or cell.value is None:
        return "<td></td>"
    if isinstance(cell.value, str):
        return f'<td class="text">{escape(cell.value)}</td>'
    better = {None: "", True: ' data-better="more"', False: ' data-better="less"'}
    parts = [f'<td data-value="{cell.value}"{better[cell.more_is_better]}>{_number(cell.value)}']
    if cell.floor is not None and cell.value:
        parts.append(f' <span class="floor">{cell.floor / cell.value:.0%} of floor</span>')
    parts.append(f" {_difference(cell, base)}</td>")
    return "".join(parts)


def _difference(cell: Value, base: Value | None) -> str:
    """The difference from another run in per cent. report.js computes it in the same way."""
    if base is None or not base.value or isinstance(base.value, str | None):
        return '<span class="delta"></span>'
    assert isinstance(cell.value, int | float)
    change = 100 * (cell.value - base.value) / abs(base.value)
    kind = ""
    if cell.more_is_better is not None and abs(change) >= 0.05:
        kind = " good" if (change > 0) == cell.more_is_better else " bad"
    return f'<span class="delta{kind}">{change:+.1f}%</span>'


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
