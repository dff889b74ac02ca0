"""Writes the tables of two pages from the code: `python tools/pages.py docs`."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from finwhale.config import EngineConfig
from finwhale.options import Option, options_of
from finwhale.request import SamplingParams
from finwhale.server.config import ServerConfig
from finwhale.server.protocols import schemas

BODIES: tuple[type[schemas.Body], ...] = (
    schemas.ChatBody,
    schemas.CompletionBody,
    schemas.ResponsesBody,
    schemas.MessagesBody,
)


def generated_rows() -> dict[str, dict[str, list[str]]]:
    """For each page, the rows of its tables and lists, as `with_rows` takes them."""
    names = dict.fromkeys(name for body in BODIES for name in body.model_fields)
    return {
        "options.md": {
            "| command line | Python | meaning |": _rows(EngineConfig, _flag, _argument, _meaning),
            "| command line | default | meaning |": _rows(
                ServerConfig, _flag, _default, lambda one: one.help
            ),
            "| Python | meaning |": _rows(SamplingParams, _argument, _meaning),
        },
        "fields.md": {
            "| field | chat | completions | responses | messages | meaning |": [
                _field_row(name) for name in names
            ],
            "`stream_options` has these fields:": _list(schemas.UsageStreamOptions),
            "`structured_outputs` has exactly one of these fields:": _list(
                schemas.StructuredOutputs
            ),
        },
    }


def with_rows(page: str, rows: Mapping[str, Iterable[str]]) -> str:
    """A page of the documentation with new rows in its tables and lists.

    Args:
        rows: by the line two lines above them: the head of a table, or the sentence before a list.
    """
    lines, old = [], iter(page.splitlines())
    for line in old:
        lines.append(line)
        if line in rows:
            lines += [next(old), *rows[line]]
            if any(not line for line in old):  # the old rows end with a blank line
                lines.append("")
    assert rows.keys() <= set(lines), "the page has no such table"
    return "\n".join([*lines, ""])


def _rows(config: type, *cells: Callable[[Option], str]) -> list[str]:
    rows = ([cell(one).replace("|", "\\|") for cell in cells] for one in options_of(config))
    return [f"| {' | '.join(row)} |" for row in rows]


def _flag(one: Option) -> str:
    value = one.metavar or "|".join(one.words)
    flag = one.flag
    if one.kind is bool and one.default is not False and not flag.startswith("--no-"):
        flag = flag.replace("--", "--[no-]", 1)
    return f"`{flag} {value}`" if value else f"`{flag}`"


def _argument(one: Option) -> str:
    return f"`{one.name}={one.default!r}`"


def _default(one: Option) -> str:
    return one.unset or ("off" if one.kind is bool else f"{one.default}")


def _meaning(one: Option) -> str:
    if one.flag.startswith("--no-"):
        return f"False: {one.help}"
    told = one.unset and one.unset != "none" and one.optional
    return f"{one.help} (None: {one.unset})" if told else one.help


def _field_row(name: str) -> str:
    having = [name in body.model_fields for body in BODIES]
    meanings = dict.fromkeys(
        body.model_fields[name].description or "" for body in BODIES if name in body.model_fields
    )
    marks = " | ".join("x" if has else "" for has in having)
    meaning = "; ".join(filter(None, meanings)).replace("|", "\\|")
    return f"| `{name}` | {marks} | {meaning} |"


def _list(body: type[schemas.Body]) -> list[str]:
    lines = []
    for name, field in body.model_fields.items():
        meaning = f": {field.description}" if field.description else ""
        lines.append(f"- `{field.alias or name}`{meaning}")
    return lines


def main(directory: Path) -> None:
    for name, rows in generated_rows().items():
        path = directory / name
        path.write_text(with_rows(path.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
