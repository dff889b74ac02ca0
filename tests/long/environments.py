"""Environments of their own for packages that Finwhale does not depend on."""

import subprocess
import sys
import sysconfig
from pathlib import Path


def make(directory: Path, *requirements: str) -> Path:
    """An environment with this one's packages and `requirements`; returns its programs."""
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    programs = directory / "bin"
    install = [str(programs / "python"), "-m", "pip", "install", "--quiet", *requirements]
    subprocess.run(install, check=True)
    return programs
