"""Environments of their own for packages that Finwhale does not depend on."""

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path


def make(directory: Path, *requirements: str) -> Path:
    """An environment with this one's packages and `requirements`; returns its programs."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    # The parent's own .pth files count too: one of them may say where Finwhale is.
    parent = sysconfig.get_path("purelib")
    (site / "parent.pth").write_text(f"import site; site.addsitedir({parent!r})\n")
    programs = directory / "bin"
    install = [str(programs / "python"), "-m", "pip", "install", "--quiet", *requirements]
    subprocess.run(install, check=True)
    return programs


def make_npm(directory: Path, package: str) -> Path:
    """A prefix of npm with one package; returns its programs."""
    install = ["npm", "install", "--prefix", str(directory), "--no-audit", "--no-fund", package]
    subprocess.run(install, check=True, timeout=300)
    # npm 11 runs no scripts of packages; this one puts Claude Code's program into its place.
    for script in directory.glob("node_modules/@anthropic-ai/claude-code/install.cjs"):
        subprocess.run(["node", str(script)], check=True, timeout=60)
    return directory / "node_modules/.bin"


def run(
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    seconds: float,
    codes: Sequence[int] = (0,),
) -> str:
    """Runs a program in its own session and with this environment alone; returns its output.

    All processes of the session end after `seconds`, or when the program ends. The program must
    end with one of `codes`.
    """
    process = subprocess.Popen(
        command,
        cwd=directory,
        env={"PATH": os.environ["PATH"], **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode in codes, output
    return output
