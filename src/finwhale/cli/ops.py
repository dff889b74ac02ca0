"""`finwhale ops`: print the operator table in use."""

import argparse
from collections.abc import Sequence

from rich.console import Console

from finwhale.ops import load_ops, table_name
from finwhale.ops.tables import optional
from finwhale.options import Parser
from finwhale.platform import Platform
from finwhale.printing import print_table

PLATFORMS = {
    "cpu": Platform.cpu(),
    "nvidia": Platform("nvidia", "sm90"),
    "nvidia-sm100": Platform("nvidia", "sm100"),
    "amd": Platform("amd", "gfx942"),
}


def run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    platform = PLATFORMS[args.platform] if args.platform else Platform.detect()
    console, rows = Console(), load_ops(platform).implementations()
    title = f"operators on {platform.vendor} ({platform.arch})"
    print_table(console, title, ("operator", "implementation"), rows, num_texts=2)
    for note in optional.notes() if table_name(platform) == "nvidia_sm90" else ():
        console.print(note, highlight=False, soft_wrap=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="finwhale ops", description="List the implementation of each operator.")
    about = "show this platform's table instead of this machine's"
    parser.add_argument("--platform", choices=PLATFORMS, help=about)
    return parser
