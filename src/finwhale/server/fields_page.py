"""Writes the tables of docs/fields.md: `python -m finwhale.server.fields_page docs/fields.md`."""

import sys
from pathlib import Path

from finwhale.printing import with_rows
from finwhale.server.protocols import schemas

COLUMNS: tuple[type[schemas.Body], ...] = (
    schemas.ChatBody,
    schemas.CompletionBody,
    schemas.ResponsesBody,
    schemas.MessagesBody,
)


def fields_page(page: str) -> str:
    """The page with new tables and lists."""
    names = dict.fromkeys(name for body in COLUMNS for name in body.model_fields)
    return with_rows(
        page,
        {
            "| field | chat | completions | responses | messages | meaning |": map(_row, names),
            "`stream_options` has these fields:": _list(schemas.UsageStreamOptions),
            "`structured_outputs` has exactly one of these fields:": _list(
                schemas.StructuredOutputs
            ),
        },
    )


def _row(name: str) -> str:
    having = [name in body.model_fields for body in COLUMNS]
    meanings = dict.fromkeys(
        body.model_fields[name].description or "" for body in COLUMNS if name in body.model_fields
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


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(fields_page(path.read_text(encoding="utf-8")), encoding="utf-8")
