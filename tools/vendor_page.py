"""Writes the libraries of the server's page into src/finwhale/server/web/vendor.

    python tools/vendor_page.py [--check]

npm downloads each package at the version below, and its content must have the hash below. The files
become JavaScript modules without other changes. With --check, nothing is written, and the exit code
is 1 if the folder differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

VENDOR = Path(__file__).parents[1] / "src/finwhale/server/web/vendor"


@dataclass(frozen=True)
class Package:
    """A package of npm's registry.

    Attributes:
        integrity: the hash of its archive, as in package-lock.json.
        file: its path in the archive.
        target: its name in the folder.
        export: what the file defines, if the file is a script and not a module.
    """

    name: str
    version: str
    integrity: str
    licence: str
    file: str
    target: str
    export: str = ""
    licence_file: str = "LICENSE"
    more: tuple[tuple[str, str], ...] = ()


PACKAGES = (
    Package(
        "marked",
        "18.2.1",
        "sha512-ii4bxCTCqqwpT86XZWgJNs+ZnAIZksmLGYMViWA7PDIXYIeNo1x6cDdX3JOip9NM/cI6p8z57FxliACboTruMA==",
        "MIT",
        "lib/marked.esm.js",
        "marked.js",
    ),
    Package(
        "dompurify",
        "3.4.18",
        "sha512-ofe3wI/uNm68HInABYFJYqQxRw1EaKAjNdrFVKqjUY+UZurvNd2L/HuQe097s/4RivWiZyP6tT7aoT8atjfhwg==",
        "Apache-2.0",
        "dist/purify.min.js",
        "purify.js",
        export="globalThis.DOMPurify",
    ),
    Package(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        "BSD-3-Clause",
        "es/highlight.min.js",
        "highlight.js",
    ),
    Package(
        "temml",
        "0.13.5",
        "sha512-aPkDDgunanpLNL0ql32HbolqLep+w8DRcVXRql7rWrMt/PhczdLgL4UBYYVU3BYjCNjkGq4EqwIicu/zWr1iOg==",
        "MIT",
        "dist/temml.min.js",
        "temml.js",
        export="temml",
    ),
    Package(
        "uplot",
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        "MIT",
        "dist/uPlot.iife.min.js",
        "uplot.js",
        export="uPlot",
        more=(("dist/uPlot.min.css", "uplot.css"),),
    ),
)


def files(package: Package, folder: Path) -> dict[str, bytes]:
    """The content of each vendored file of a package. Raises ValueError if its hash differs."""
    command = ["npm", "pack", "--json", f"{package.name}@{package.version}"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=120)
    (packed,) = json.loads(done.stdout)
    if packed["integrity"] != package.integrity:
        raise ValueError(f"{package.name}: the hash is {packed['integrity']}")
    with tarfile.open(folder / packed["filename"]) as archive:

        def read(path: str) -> bytes:
            member = archive.extractfile(f"package/{path}")
            assert member is not None
            return member.read()

        script = read(package.file)
        if package.export:
            script = script.rstrip() + f"\nexport default {package.export};\n".encode()
        found = {package.target: script}
        found |= {target: read(path) for path, target in package.more}
        stem = package.target.partition(".")[0]
        found[f"{stem}.LICENSE.txt"] = read(package.licence_file)
    return found


def versions() -> bytes:
    """The list of packages that lies beside the files."""
    listed = [
        {"name": one.name, "version": one.version, "licence": one.licence} for one in PACKAGES
    ]
    return (json.dumps(listed, indent=1) + "\n").encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    found = {"versions.json": versions()}
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            found |= files(package, Path(folder))
    if check:
        here = {path.name: path.read_bytes() for path in VENDOR.iterdir()}
        wrong = sorted(name for name in here | found if here.get(name) != found.get(name))
        raise SystemExit(f"differs: {', '.join(wrong)}" if wrong else 0)
    VENDOR.mkdir(exist_ok=True)
    for path in VENDOR.iterdir():
        path.unlink()
    for name, content in found.items():
        (VENDOR / name).write_bytes(content)


if __name__ == "__main__":
    main()
