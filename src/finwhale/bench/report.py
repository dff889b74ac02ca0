"""Turn records of benchmarks into one HTML file with plots and comparisons.

Runs of the same kind and the same work stand beside each other, with their differences in per cent.
The file loads nothing from other hosts.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from finwhale.bench.record import read_records
from finwhale.bench.report_page import page
from finwhale.bench.report_values import groups_of
from finwhale.errors import FinwhaleError
from finwhale.options import Parser


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
    parser = Parser(
        prog="finwhale bench report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "records", nargs="+", type=Path, metavar="RECORDS", help="JSONL files of --record"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument("--title", default="Finwhale benchmarks", help="title of the page")
    return parser
