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


def test_a_module_whose_package_is_missing(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('it is hidden')")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    status, output = run("tests/models/test_transformers_oracle.py", PYTHONPATH=path)
    assert status == 2 and "forbids: could not import 'transformers'" in output, output


def test_a_test_whose_program_is_missing() -> None:
    """A machine may lack zsh, and not bash."""
    status, output = run("tests/process/test_completion.py", "-k", "bash or zsh", PATH="")
    assert status == 1 and "forbids: bash is not installed" in output, output
    assert "zsh is not installed" in output and "forbids: zsh" not in output, output
