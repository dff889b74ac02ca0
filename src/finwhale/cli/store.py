"""`finwhale store`: show what a prefix store holds, and remove a part of it."""

import argparse
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from finwhale.engine.store.directory import contents, descriptions, differing
from finwhale.errors import FinwhaleError
from finwhale.options import Parser
from finwhale.printing import new_console, print_table


def run(argv: Sequence[str]) -> int:
    """Returns 0."""
    args = _parser().parse_args(argv)
    path = Path(args.directory).expanduser()
    if not path.is_dir():
        raise FinwhaleError(f"no prefix store: {path} is not a directory")
    known = descriptions(path)
    if args.remove is not None:
        _remove(path, args.remove, known)
        return 0
    console = new_console()
    rows = [
        (name[:12], one.owner[:12], f"{one.records:,}", f"{one.bytes / 1e9:,.3f}", _age(one.used))
        for name in known
        for one in contents(path, name)
    ]
    columns = ("fingerprint", "owner", "records", "GB", "last used")
    print_table(console, f"prefix store {path}", columns, rows, num_texts=2)
    if not known:
        return 0
    *others, newest = known
    console.print(f"The newest fingerprint, {newest[:12]}, stands for:")
    for name, value in known[newest].items():
        console.print(f"  {name}: {value}", highlight=False)
    for name in others:
        parts = ", ".join(differing(known[newest], known[name]))
        console.print(f"{name[:12]} differs from it in: {parts}", highlight=False)
    return 0


def _remove(path: Path, what: str, known: Iterable[str]) -> None:
    """Remove the records of a fingerprint, of one of its owners, or all.

    A running server writes new ones.

    Raises:
        FinwhaleError: nothing has this name, or several have.
    """
    start, _, owner = what.partition("/")
    names = [name for name in known if what == "all" or name.startswith(start)]
    if what != "all" and len(names) != 1:
        raise FinwhaleError(f"{len(names)} fingerprints of {path} begin with {start!r}, wanted 1")
    folders = [path / name for name in names]
    if owner:
        folders = [folder for folder in folders[0].iterdir() if folder.name.startswith(owner)]
        if len(folders) != 1:
            raise FinwhaleError(f"{len(folders)} owners of {start} begin with {owner!r}, wanted 1")
    for folder in folders:
        shutil.rmtree(folder)
        print(f"removed {folder}")


def _age(used: float) -> str:
    """How long ago something was used, in one unit."""
    if not used:
        return "never"
    seconds = max(0.0, time.time() - used)
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit} ago"
    return f"{seconds:,.0f} seconds ago"


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale store",
        description="Show what a prefix store holds: by fingerprint (what decides the bytes of "
        "its records) and by owner (an API key or cache_salt, as a keyed hash). Servers may use "
        "the store meanwhile.",
    )
    parser.add_argument("directory", metavar="DIR", help="the directory of --prefix-store")
    parser.add_argument(
        "--remove",
        metavar="WHAT",
        help="remove the records of a fingerprint, of one of its owners (FINGERPRINT/OWNER; the "
        "first characters of both are enough), or all",
    )
    return parser
