"""With FINWHALE_NO_SKIPS, a skip for something missing fails."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*words: str, **variables: str) -> tuple[int, str]:
    """pytest's exit status and output."""
    environment = {**os.environ, "FINWHALE_NO_SKIPS": "1", **variables}
    command = [sys.executable, "-m", "pytest", "-n0", "-rs", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_a_package_and_a_program_are_missing(tmp_path: Path) -> None:
    """Of a module, and of tests. A machine may lack zsh, and not bash."""
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('it is hidden')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    tests = ("tests/models/test_transformers_oracle.py", "tests/process/test_completion.py")
    chosen = ("--continue-on-collection-errors", "-k", "bash or zsh")
    status, output = run(*tests, *chosen, PYTHONPATH=path, PATH="")
    assert status == 1 and "forbids: could not import 'transformers'" in output, output
    assert "forbids: bash is not installed" in output, output
    assert "zsh is not installed" in output and "forbids: zsh" not in output, output
