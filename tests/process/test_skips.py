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


def test_a_package_and_a_program_that_are_missing(tmp_path: Path) -> None:
    """A module's package; and a test's program: a machine may lack zsh, and not bash."""
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('it is hidden')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    files = ("tests/models/test_transformers_oracle.py", "tests/process/test_completion.py")
    goes_on = "--continue-on-collection-errors"
    status, output = run(*files, goes_on, "-k", "bash or zsh", PATH="", PYTHONPATH=path)
    assert "forbids: could not import 'transformers'" in output and "1 error" in output, output
    assert status == 1 and "forbids: bash is not installed" in output, output
    assert "zsh is not installed" in output and "forbids: zsh" not in output, output
