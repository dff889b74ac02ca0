"""Writes the tables of docs/options.md: `python -m finwhale.cli.options_page docs/options.md`."""

import sys
from collections.abc import Callable
from pathlib import Path

from finwhale.config import EngineConfig
from finwhale.options import Option, options_of
from finwhale.printing import with_rows
from finwhale.request import SamplingParams
from finwhale.server.config import ServerConfig


def options_page(page: str) -> str:
    """The page with new tables."""
    return with_rows(
        page,
        {
            "| command line | Python | meaning |": _rows(EngineConfig, _flag, _argument, _meaning),
            "| command line | default | meaning |": _rows(
                ServerConfig, _flag, _default, lambda one: one.help
            ),
            "| Python | meaning |": _rows(SamplingParams, _argument, _meaning),
        },
    )


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


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(options_page(path.read_text(encoding="utf-8")), encoding="utf-8")
