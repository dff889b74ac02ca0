"""Shows which kernels another commit compiles to other code for SM90; needs no GPU.

    python tools/same_kernels.py 2ac59a2

After a change that should only rename or move things, no kernel should differ. The tool compiles
what tests/ops/test_sm90_compile.py compiles, for the given commit and for this tree, in some
minutes on two cores. It needs the `test` extra. The commit must contain this tool.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = ("sm90_compile", "sm90_attention", "sm90_experts", "sm90_collectives")
LIST = """
import importlib, json, sys
for name in sys.argv[1:]:
    for call in importlib.import_module("tests.ops." + name).CALLS:
        print(json.dumps([name, call, "compile", 90]))
"""


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The commit's files, in a temporary directory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        if subprocess.run([*git, "add", "--quiet", "--detach", str(path), commit]).returncode:
            raise SystemExit(f"git cannot check out {commit}")
        try:
            if not (path / "tools" / Path(__file__).name).exists():
                raise SystemExit(f"{commit} is older than this tool, and its tests report no code")
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def compiled(tree: Path) -> Counter[tuple[str, str]]:
    """Each kernel that the tests of a tree compile: its name, and a hash of its code."""
    with tempfile.TemporaryDirectory() as cache:
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)]),
            "TRITON_CACHE_DIR": cache,
            "TRITON_DISABLE_LINE_INFO": "1",
            "OMP_NUM_THREADS": "1",
        }
        env.pop("TRITON_INTERPRET", None)

        def run(*command: str, given: str = "") -> list[str]:
            done = subprocess.run(
                [sys.executable, *command],
                cwd=tree,
                env=env,
                input=given,
                stdout=subprocess.PIPE,
                text=True,
            )
            if done.returncode:
                raise SystemExit(f"the tests of {tree} cannot compile kernels")
            return done.stdout.splitlines()

        calls = run("-c", LIST, *MODULES)
        answers = run("-m", "tests.ops.sm90_worker", given="".join(f"{call}\n" for call in calls))
    found: dict[str, tuple[str, str]] = {}
    for call, answer in zip(calls, map(json.loads, answers), strict=True):
        if "error" in answer:
            raise SystemExit(f"{tree}: {call} does not compile\n{answer['error']}")
        for report in answer["reports"]:
            found[str(report)] = report["kernel"], report["code"]
    return Counter(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare compiled kernels with those of a commit.")
    parser.add_argument("commit", help="a commit of this repository, such as main")
    args = parser.parse_args()
    with checked_out(args.commit) as old, ThreadPoolExecutor(2) as pool:
        before, now = pool.map(compiled, (old, ROOT))
    names = sorted({name for name, _ in [*(before - now), *(now - before)]})
    for name in names:
        print(f"{name}: other code")
    print(f"{now.total()} kernels here, {before.total()} in {args.commit}; {len(names)} differ")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
