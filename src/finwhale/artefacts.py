"""The directory of compiled artefacts, with checksums, a lock and marks of complete configurations.

It has one folder for each combination of device and versions (`platform_key`). The compilers store
their artefacts there under their own file names, which depend on source and constants. This module
adds checksums of finished artefacts, a lock for the process that fills the folder, and a mark for
each configuration whose artefacts are complete.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path

from finwhale.errors import ResourceError

logger = logging.getLogger(__name__)

# Folders of the compilers, in which each artefact is one folder.
KINDS = ("triton", "deepgemm/cache")
# Suffixes of the files that a process reads; their checksums cover every byte.
CHECKED = (".cubin", ".hsaco", ".json", ".so", ".cu")
SEALS = "seals.json"


def default_directory(xdg_cache_home: str | None = None) -> Path:
    """The default directory of compiled artefacts: finwhale in the XDG cache directory."""
    base = Path(xdg_cache_home) if xdg_cache_home else Path.home() / ".cache"
    return base / "finwhale"


def digest(value: object) -> str:
    """A short name for plain data."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


@cache
def source_digest() -> str:
    """Digest of this package's source, on which kernels and shapes depend."""
    root = Path(__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(str(path.relative_to(root)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:20]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes. The system releases it if the process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that fills %s", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically, safe against concurrent readers and writers. Raises OSError if it
    cannot be written; nothing is left of it.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def open_private(root: Path, *folders: str) -> None:
    """Create folders for code below `root` that only this user can use, unless they exist.

    Folders inside them may have any mode, because no other user can reach them.

    Raises:
        OSError: a folder cannot be created.
        ResourceError: another user (other than root) owns a folder, or its group or everybody can
            write to it.
    """
    paths = [root]
    for folder in folders:
        parts = folder.split("/")
        paths += [root.joinpath(*parts[: i + 1]) for i in range(len(parts))]
    root.parent.mkdir(parents=True, exist_ok=True)
    for path in paths:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.stat()
        if found.st_uid not in (os.geteuid(), 0):
            reason, remedy = f"belongs to another user (id {found.st_uid})", ""
        elif found.st_mode & 0o022:
            reason = f"can be written by other users (mode {found.st_mode & 0o7777:04o})"
            remedy = f"run chmod -R go-w {root}, or "
        else:
            continue
        raise ResourceError(
            f"the cache directory {path} {reason}, and this process would run code from it: "
            f"{remedy}choose another (--cache-dir)"
        )


class Artefacts:
    """The folder of one combination of device and versions.

    Attributes:
        path: the folder; each compiler stores its artefacts in a folder of KINDS in it.
        writable: whether this process may write to it.

    Args:
        directory: the parent directory of all folders; created if missing, for this user only.
        platform: device and versions as plain data; they also form the folder's name.

    Raises:
        ResourceError: the directory does not exist and cannot be created, or another user could
            put code into it.
    """

    def __init__(self, directory: str | Path, platform: Mapping[str, str]) -> None:
        words = "-".join(value for value in platform.values() if value)
        name = "".join(c if c.isalnum() or c in "-._" else "_" for c in words)
        root = Path(directory).expanduser()
        self.path = root / f"{name[:100]}-{digest(dict(platform))}"
        try:
            open_private(root, *(f"{self.path.name}/{kind}" for kind in KINDS))
        except OSError as error:
            raise ResourceError(
                f"the cache directory {directory} cannot be used: {error.strerror or error}; "
                "choose another (--cache-dir)"
            ) from error
        self.writable = os.access(self.path, os.W_OK)

    def is_complete(self, configuration: object) -> bool:
        """Whether every artefact for a configuration of this source has been built."""
        return self._mark(configuration).exists()

    def mark_complete(self, configuration: object, built: Iterable[str] = ()) -> None:
        """Mark a configuration as complete, and store checksums of the existing artefacts.

        Args:
            built: names of the artefacts of this configuration; `known` returns them.
        """
        if not self.writable:
            return
        self._seal()
        write_whole(self._mark(configuration), json.dumps(sorted(built)).encode())

    def known(self) -> set[str]:
        """Names of the artefacts of all complete configurations of this source."""
        found: set[str] = set()
        for mark in self.path.glob(f"complete-{source_digest()}-*.json"):
            with suppress(OSError, ValueError):
                found.update(json.loads(mark.read_bytes()))
        return found

    def _mark(self, configuration: object) -> Path:
        return self.path / f"complete-{source_digest()}-{digest(configuration)}.json"

    def filling(self) -> AbstractContextManager[None]:
        """Hold the lock for filling the folder. Others wait, and then find the artefacts."""
        return locked(self.path / "lock") if self.writable else nullcontext()

    def check(self) -> int:
        """Remove damaged artefacts, so that they are built again; returns their number. Raises
        ResourceError if one cannot be removed.
        """
        seals = self._seals()
        bad = [entry for entry in self._entries() if not self._is_whole(entry, seals)]
        if bad:
            text = "%s: %d damaged artefacts are removed and built again, such as %s"
            logger.warning(text, self.path, len(bad), bad[0].name)
        for entry in bad:
            self._remove(entry)
            seals.pop(self._name(entry), None)
        if bad:
            # No configuration is complete now, and a rebuilt artefact may differ in bytes.
            for mark in self.path.glob("complete-*.json"):
                mark.unlink(missing_ok=True)
            write_whole(self.path / SEALS, json.dumps(seals).encode())
        return len(bad)

    def _entries(self) -> Iterator[Path]:
        for kind in KINDS:
            with os.scandir(self.path / kind) as found:
                yield from sorted(Path(entry.path) for entry in found if entry.is_dir())

    def _is_whole(self, entry: Path, seals: Mapping[str, dict[str, str]]) -> bool:
        """Check an artefact by its checksums or, without any, by the structure of its files."""
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
            # Rename first, because it is atomic for concurrent readers.
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
            logger.warning("%s is damaged and is written again", self.path / SEALS)
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
    """Whether all files of Triton's group exist, and DeepGEMM's source has its binary."""
    for group in entry.glob("__grp__*.json"):
        # Use only the names, because the stored paths are those of the original location.
        names = json.loads(group.read_text())["child_paths"]
        if not all((entry / name).exists() for name in names):
            return False
    return not (entry / "kernel.cu").exists() or (entry / "kernel.cubin").exists()


def _looks_whole(path: Path) -> bool:
    """Whether JSON can be parsed, and a binary contains all of its last section."""
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
