"""The directory of what was compiled: whose it is, whether it is whole, and who fills it now.

One folder for each combination of device and versions (`platform_key`). In it the compilers keep
what they make, each in files of its own naming, keyed by source and constants; we add what they do
not: checksums of what was finished, a lock for whoever fills it, and a mark for each configuration
of which everything is there.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import struct
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from finwhale.errors import ResourceError

logger = logging.getLogger(__name__)

# Folders of an artefacts' folder, and how deep in them one artefact is a folder of its own.
KINDS = {"triton": 1, "deepgemm/cache": 1}
# What a process reads of an artefact: checked byte for byte.
CHECKED = (".cubin", ".hsaco", ".json", ".so", ".cu")
SEALS = "seals.json"


def default_directory(xdg_cache_home: str | None = None) -> Path:
    """Where compiled artefacts go unless told otherwise: finwhale in the XDG cache directory."""
    base = Path(xdg_cache_home) if xdg_cache_home else Path.home() / ".cache"
    return base / "finwhale"


def digest(value: object) -> str:
    """A short name for plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@cache
def source_digest() -> str:
    """Of this package's source: another version of it has other kernels and other shapes."""
    root = Path(__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:20]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; one that is killed lets go."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process, which fills %s", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """In one piece, whoever reads or writes it at the same time."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Artefacts:
    """The folder of one combination of device and versions.

    Args:
        directory: of all of them; made if missing.
        platform: device and versions, plain data; in words where a folder's name can hold them.

    Raises:
        ResourceError: it is not there and cannot be made.
    """

    def __init__(self, directory: str | Path, platform: Mapping[str, str]) -> None:
        words = "-".join(value for value in platform.values() if value)
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in words)
        self.path = Path(directory).expanduser() / f"{name[:100]}-{digest(dict(platform))}"
        try:
            for kind in KINDS:
                (self.path / kind).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"the cache directory {directory} cannot be used: {error.strerror or error}; "
                "choose another (--cache-dir)"
            ) from error
        self.writable = os.access(self.path, os.W_OK)

    def folder(self, kind: str) -> Path:
        """Where a compiler keeps its artefacts."""
        return self.path / kind

    # --- Marks ------------------------------------------------------------------------------------

    def is_complete(self, configuration: object) -> bool:
        """Whether all that a configuration of this source can need was built."""
        return self._mark(configuration).exists()

    def mark_complete(self, configuration: object, built: Iterable[str] = ()) -> None:
        """Say so, with checksums of what is there now.

        Args:
            built: names of what this configuration needs, for `known`.
        """
        if not self.writable:
            return
        self._seal()
        write_whole(self._mark(configuration), json.dumps(sorted(built)).encode())

    def known(self) -> set[str]:
        """What the configurations of this source need that are complete."""
        found: set[str] = set()
        for mark in self.path.glob(f"complete-{source_digest()}-*.json"):
            with suppress(OSError, ValueError):
                found.update(json.loads(mark.read_bytes()))
        return found

    def _mark(self, configuration: object) -> Path:
        return self.path / f"complete-{source_digest()}-{digest(configuration)}.json"

    # --- Filling ----------------------------------------------------------------------------------

    @contextmanager
    def filling(self) -> Iterator[None]:
        """One process at a time; the others wait, and find what it has made. A killed one's turn
        ends with it.
        """
        if not self.writable:
            yield
            return
        with locked(self.path / "lock"):
            yield

    # --- Wholeness --------------------------------------------------------------------------------

    def check(self) -> int:
        """Take out what is damaged, so that it is built again; how much that was.

        Raises:
            ResourceError: something is damaged and cannot be removed.
        """
        seals = self._seals()
        bad = [entry for entry in self._entries() if not self._is_whole(entry, seals)]
        if bad:
            logger.warning(
                "%s: %d damaged artefacts are removed and built again, such as %s",
                self.path,
                len(bad),
                bad[0].name,
            )
        for entry in bad:
            self._remove(entry)
            seals.pop(self._name(entry), None)
        if bad:
            # Nothing is complete; and what takes their places need not be the same, byte for byte.
            for mark in self.path.glob("complete-*.json"):
                mark.unlink(missing_ok=True)
            write_whole(self.path / SEALS, json.dumps(seals).encode())
        return len(bad)

    def _entries(self) -> Iterator[Path]:
        for kind in KINDS:
            with os.scandir(self.path / kind) as found:
                yield from sorted(Path(entry.path) for entry in found if entry.is_dir())

    def _is_whole(self, entry: Path, seals: Mapping[str, dict[str, str]]) -> bool:
        """By its checksums, or, where it has none yet, by what its files say of themselves."""
        try:
            sealed = seals.get(self._name(entry))
            if sealed is not None:
                return all(
                    checksum((entry / name).read_bytes()) == wanted
                    for name, wanted in sealed.items()
                )
            return all(_looks_whole(path) for path in _checked_files(entry)) and _has_parts(entry)
        except (OSError, ValueError):
            return False

    def _name(self, entry: Path) -> str:
        return str(entry.relative_to(self.path))

    def _remove(self, entry: Path) -> None:
        trash = self.path / f"removed-{uuid.uuid4().hex}"
        try:
            # At once, for whoever looks it up meanwhile.
            entry.rename(trash)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ResourceError(
                f"{entry} is damaged and cannot be removed: {error.strerror or error}; remove it, "
                "or choose another --cache-dir"
            ) from error
        shutil.rmtree(trash, ignore_errors=True)

    def _seals(self) -> dict[str, dict[str, str]]:
        try:
            found = json.loads((self.path / SEALS).read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError):
            logger.warning("%s is damaged and made again", self.path / SEALS)
            return {}
        return found if isinstance(found, dict) else {}

    def _seal(self) -> None:
        seals = self._seals()
        whole = {}
        for entry in self._entries():
            name, parts = self._name(entry), _checked_files(entry)
            if parts:
                whole[name] = seals.get(name) or {p.name: checksum(p.read_bytes()) for p in parts}
        write_whole(self.path / SEALS, json.dumps(whole).encode())


def _checked_files(entry: Path) -> list[Path]:
    with os.scandir(entry) as found:
        names = [f.path for f in found if f.is_file() and f.name.endswith(CHECKED)]
    return [Path(name) for name in sorted(names)]


def _has_parts(entry: Path) -> bool:
    """What Triton lists as one group is all there; DeepGEMM's source has its binary."""
    for group in entry.glob("__grp__*.json"):
        # By name: the paths beside the names are those of where it was made.
        names = json.loads(group.read_text())["child_paths"]
        if not all((entry / name).exists() for name in names):
            return False
    return not (entry / "kernel.cu").exists() or (entry / "kernel.cubin").exists()


def _looks_whole(path: Path) -> bool:
    """Whether JSON can be read, and a binary reaches to the end of its last section."""
    if path.suffix == ".json":
        json.loads(path.read_text())
        return True
    if path.suffix == ".cu":
        return path.stat().st_size > 0
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF" or header[4] != 2:
        return False
    sections: int = struct.unpack_from("<Q", header, 40)[0]
    size, count = struct.unpack_from("<HH", header, 58)
    return bool(sections + size * count <= path.stat().st_size)
