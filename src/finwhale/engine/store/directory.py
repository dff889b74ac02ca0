"""A prefix store in a directory: one immutable file for each record.

    DIR/salt                         the salt of the keys, which only its user can read
    DIR/FINGERPRINT/about.json       what the fingerprint stands for (fingerprint.py)
    DIR/FINGERPRINT/OWNER/ab/KEY.block, .state

Several servers may use one directory. A file appears by `rename`, so it is whole or absent, unless
the machine loses power. A checksum finds what is damaged then, and such a file is removed. The page
cache of the operating system keeps what is read often. Nothing is encrypted.

The files' modification times say when they were last used. The server that holds the lock removes
the oldest files when the directory becomes too large.
"""

import errno
import fcntl
import itertools
import json
import logging
import os
import secrets
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from finwhale.engine.plan.prefix_store import Record, StoreCounts
from finwhale.errors import ResourceError

logger = logging.getLogger(__name__)

MAGIC = b"finwhale-prefix1"
HEADER = struct.Struct("<16sQI")  # MAGIC, bytes and CRC-32 of the content
TEMPORARY = ".writing-"
NUMBERS = itertools.count()  # of the temporary files of this process
ABOUT, SALT, LOCK = "about.json", "salt", "lock"
EVERYONE = "everyone"  # the folder of records without an owner
# A use changes the file's time only if that is older.
USED_AGAIN_S = 60
ABANDONED_S = 3600  # a file that a server which has died began to write
# The directory is measured again when this share of its limit was written, and shrunk to that one.
MEASURE_SHARE, LEFT_SHARE = 1 / 32, 0.95


class DirectoryStore:
    """Records of one fingerprint in a directory (plan/prefix_store.py has the contract).

    Args:
        about: what the fingerprint stands for, which people read when another one is not found.
        limit: the most bytes of all files of the directory; None: no limit.
        counts: of which this counts the evictions.

    Raises:
        ResourceError: the directory cannot be made or written to.
    """

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        about: Mapping[str, str],
        limit: int | None = None,
        counts: StoreCounts | None = None,
    ) -> None:
        self.path, self.limit = path, limit
        self._about = dict(about)
        self._counts = counts or StoreCounts()
        self._folder = path / fingerprint
        self._mutex = threading.Lock()
        self._unmeasured = limit or 0  # bytes written since the last measurement; first: measure
        self._failed = False
        self._shrinking: subprocess.Popen[bytes] | None = None
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            others = descriptions(path)
            if others and not self._folder.exists():
                *_, last = others.values()
                logger.warning(
                    "the prefix store %s has no prefixes for this server, which differs from the "
                    "last one in: %s",
                    *(path, ", ".join(differing(about, last))),
                )
            self._make_folder()
        except OSError as error:
            raise ResourceError(f"the prefix store {path} cannot be used: {error}") from None

    def _make_folder(self) -> None:
        """Make the folder of this fingerprint, with its description."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        known = self._folder / ABOUT
        if not known.exists():
            _replace(str(known), json.dumps(self._about, indent=1).encode())

    def contains(self, records: Sequence[Record]) -> list[bool]:
        now = time.time_ns()
        return [self._use(self._file(record), now - i) for i, record in enumerate(records)]

    def _use(self, file: str, now: int) -> bool:
        """Note a use of a file; False: it does not exist."""
        try:
            if now - os.stat(file).st_mtime_ns > USED_AGAIN_S * 10**9:
                os.utime(file, ns=(now, now))
        except OSError:
            return False
        return True

    def read(self, record: Record, into: memoryview) -> bool:
        file = self._file(record)
        header = bytearray(HEADER.size)
        try:
            descriptor = os.open(file, os.O_RDONLY)
        except OSError:
            return False
        try:  # a longer file fills the last byte, too
            count = os.readv(descriptor, [header, into, bytearray(1)])
        except OSError:
            return False
        finally:
            os.close(descriptor)
        whole = count == len(header) + len(into)
        if whole and header == HEADER.pack(MAGIC, len(into), zlib.crc32(into)):
            return True
        logger.warning("the prefix store removes a damaged file: %s", file)
        with suppress(OSError):
            os.unlink(file)
        return False

    def write(self, record: Record, content: memoryview) -> bool:
        file = self._file(record)
        if self._use(file, time.time_ns()):
            return True
        header = HEADER.pack(MAGIC, len(content), zlib.crc32(content))
        try:
            try:
                _replace(file, header, content)
            except FileNotFoundError:  # the first of its folder, or `finwhale store` removed it
                self._make_folder()
                for folder in Path(file).parents[1::-1]:
                    folder.mkdir(mode=0o700, exist_ok=True)
                _replace(file, header, content)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.warning("the prefix store %s cannot save: %s", self.path, error)
            return False
        self._failed = False
        self._count(len(header) + len(content))
        return True

    def close(self) -> None:
        if self._shrinking is not None:
            self._shrinking.kill()
            self._shrinking.communicate()

    def _file(self, record: Record) -> str:
        name = record.key.hex()
        owner = record.owner.hex() or EVERYONE
        return f"{self._folder}/{owner}/{name[:2]}/{name}.{record.kind}"

    def _count(self, written: int) -> None:
        """Count written bytes, and make room when the directory may have become too large."""
        with self._mutex:
            self._counts.written_bytes += written
            if self.limit is None:
                return
            self._unmeasured += written
            if self._unmeasured < self.limit * MEASURE_SHARE:
                return
            if self._shrinking is not None:
                if self._shrinking.poll() is None:
                    return
                self._counts.evicted += int(self._shrinking.communicate()[0] or 0)
            self._unmeasured = 0
            # A process of its own: reading 100,000 names would hold this interpreter for seconds.
            module = [sys.executable, "-m", "finwhale.engine.store.directory"]
            with suppress(OSError):
                self._shrinking = subprocess.Popen(
                    [*module, str(self.path), str(self.limit)],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )


def descriptions(path: Path) -> dict[str, dict[str, str]]:
    """What each fingerprint of a store stands for; the one that was made last comes last."""
    found = {}
    for about in sorted(path.glob(f"*/{ABOUT}"), key=lambda file: file.stat().st_mtime):
        with suppress(OSError, ValueError):
            found[about.parent.name] = dict(json.loads(about.read_text()))
    return found


def differing(about: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The parts in which two descriptions differ."""
    return [name for name in {**about, **other} if about.get(name) != other.get(name)]


@dataclass(frozen=True, slots=True)
class Contents:
    """The records of one owner.

    Attributes:
        used: when one of them was last used, in seconds since 1970; 0: there are none.
    """

    owner: str
    records: int
    bytes: int
    used: float


def contents(path: Path, fingerprint: str) -> list[Contents]:
    """What a store holds for servers with this fingerprint, by owner."""
    found = []
    for folder in sorted(path.joinpath(fingerprint).iterdir()):
        if folder.is_dir():
            files = list(_files(folder))
            used = max((file.used_ns / 1e9 for file in files), default=0.0)
            found.append(Contents(folder.name, len(files), sum(f.size for f in files), used))
    return found


def shrink(path: Path, limit: int) -> int:
    """Remove the files of a store that were used longest ago, if all have more bytes than `limit`.
    Does nothing while another process or thread does it. Returns the number of removed records.
    """
    removed = 0
    with (path / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        found = sorted(_files(path), key=lambda file: file.used_ns)
        total = sum(file.size for file in found)
        left = limit if total <= limit else limit * LEFT_SHARE
        abandoned = time.time_ns() - ABANDONED_S * 10**9
        for file in found:
            unfinished = os.path.basename(file.path).startswith(TEMPORARY)
            if file.used_ns < abandoned if unfinished else total > left:
                with suppress(OSError):
                    os.unlink(file.path)
                    removed += not unfinished
                total -= file.size
    return removed


@dataclass(frozen=True, slots=True)
class _File:
    path: str
    size: int
    used_ns: int


def _files(path: Path | str) -> Iterator[_File]:
    """The files of records in a directory and the folders below it."""
    with suppress(FileNotFoundError), os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path)
            elif entry.name not in (ABOUT, SALT, LOCK):
                with suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield _File(entry.path, found.st_size, found.st_mtime_ns)


def salt_of(path: Path) -> str:
    """The salt of a store's keys. It is made when the store is used for the first time.

    Raises:
        ResourceError: the directory cannot be read or written to.
    """
    file = path / SALT
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            # Another server sees the salt only when it is whole.
            name = path / f"{TEMPORARY}{os.getpid()}-{next(NUMBERS)}"
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as out:
                out.write(secrets.token_hex(16))
            try:
                with suppress(FileExistsError):
                    os.link(name, file)
            finally:
                os.unlink(name)
        return file.read_text().strip()
    except OSError as error:
        raise ResourceError(f"the prefix store {path} cannot be used: {error}") from None


def _replace(file: str, *parts: bytes | memoryview) -> None:
    """Write a file that appears when it is whole."""
    name = f"{os.path.dirname(file)}/{TEMPORARY}{os.getpid()}-{next(NUMBERS)}"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            if os.writev(descriptor, parts) < sum(map(len, parts)):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)
        os.rename(name, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


if __name__ == "__main__":
    os.nice(19)
    print(shrink(Path(sys.argv[1]), int(sys.argv[2])))
