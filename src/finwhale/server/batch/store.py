"""Files and batches on disk: a private directory, with a folder for each owner.

All API keys with the same name are one owner; without API keys, all clients are one. An owner
cannot reach another owner's folder. A file is its content and, once it is complete, a description
beside it.
"""

import fcntl
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from finwhale.artefacts import open_private, write_whole
from finwhale.errors import FinwhaleError
from finwhale.server.errors import ApiError, ErrorCode
from finwhale.server.keys import ApiKey

T = TypeVar("T")

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


@dataclass(slots=True)
class StoredFile:
    """The description of a file."""

    id: str
    bytes: int
    filename: str
    purpose: str
    created_at: int = field(default_factory=lambda: int(time.time()))

    def answer(self) -> dict[str, Any]:
        return {"object": "file", **asdict(self), "status": "processed", "expires_at": None}


@dataclass(slots=True)
class StoredBatch:
    """The description of a batch, with the ids that its result files will have."""

    id: str
    endpoint: str
    input_file_id: str
    expires_at: int
    metadata: dict[str, str] | None = None
    good_file_id: str = field(default_factory=lambda: new_id("file-"))
    bad_file_id: str = field(default_factory=lambda: new_id("file-"))
    created_at: int = field(default_factory=lambda: int(time.time()))
    status: str = "validating"
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def enter(self, status: str) -> None:
        self.status = status
        self.times.setdefault(f"{status}_at", int(time.time()))

    def answer(self) -> dict[str, Any]:
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
                 "cancelled")  # fmt: skip
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.good_file_id if self.good_file_id in self.files else None,
            "error_file_id": self.bad_file_id if self.bad_file_id in self.files else None,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": counts,
            "metadata": self.metadata,
        }


class Owner:
    """The files and batches of one owner, the oldest first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for folder in (directory, directory / "files", directory / "batches"):
            folder.mkdir(mode=0o700, exist_ok=True)
        files = (StoredFile(**found) for found in _read(directory / "files"))
        self.files = {one.id: one for one in sorted(files, key=lambda one: one.created_at)}
        batches = (StoredBatch(**found) for found in _read(directory / "batches"))
        self.batches = {one.id: one for one in sorted(batches, key=lambda one: one.created_at)}
        self.uploading = 0
        self._remove_incomplete()

    def content(self, file_id: str) -> Path:
        return self.directory / "files" / f"{file_id}.jsonl"

    def begun(self, batch: StoredBatch) -> Path:
        """The file of the lines that have begun."""
        return self.directory / "batches" / f"{batch.id}.begun"

    def find_file(self, file_id: str) -> StoredFile:
        """Raises ApiError (404)."""
        return _found(self.files, "file", file_id, "file_not_found")

    def find_batch(self, batch_id: str) -> StoredBatch:
        """Raises ApiError (404)."""
        return _found(self.batches, "batch", batch_id, "batch_not_found")

    def add(self, file: StoredFile) -> None:
        """Describes a file whose content is complete."""
        self._write("files", file)
        self.files[file.id] = file

    def delete(self, file_id: str) -> None:
        """Raises ApiError (404, 409)."""
        self.find_file(file_id)
        for batch in self.batches.values():
            if batch.input_file_id == file_id and not batch.ended:
                raise ApiError(409, f"{batch.id} reads this file: cancel it first", code="in_use")
        (self.directory / "files" / f"{file_id}.json").unlink(missing_ok=True)
        self.content(file_id).unlink(missing_ok=True)
        del self.files[file_id]

    def save(self, batch: StoredBatch) -> None:
        self._write("batches", batch)
        self.batches[batch.id] = batch

    def _write(self, folder: str, described: StoredFile | StoredBatch) -> None:
        text = json.dumps(asdict(described)).encode()
        write_whole(self.directory / folder / f"{described.id}.json", text)

    def make_room(self, max_batches: int) -> None:
        """Forgets the oldest ended batches. Raises ApiError (429): too many have not ended."""
        ended = [batch for batch in self.batches.values() if batch.ended]
        if len(self.batches) - len(ended) >= max_batches:
            message = f"{max_batches} batches wait or run; this server allows no more"
            raise ApiError(429, message, code="too_many_batches", retry_after_s=60)
        for batch in ended[: max(0, len(self.batches) + 1 - max_batches)]:
            (self.directory / "batches" / f"{batch.id}.json").unlink(missing_ok=True)
            del self.batches[batch.id]

    def _remove_incomplete(self) -> None:
        """Removes the incomplete uploads that a killed server has left."""
        running = [batch for batch in self.batches.values() if not batch.ended]
        kept = {*self.files, *(one.good_file_id for one in running),
                *(one.bad_file_id for one in running)}  # fmt: skip
        for folder, known in ((self.directory / "files", kept),
                              (self.directory / "batches", set(self.batches))):  # fmt: skip
            for path in folder.iterdir():
                if path.stem not in known or path.suffix not in (".json", ".jsonl", ".begun"):
                    path.unlink()


class Store:
    """The directory of a server. Only one server at a time may use it."""

    def __init__(self, directory: str) -> None:
        """Raises FinwhaleError: the directory cannot be used."""
        self._root = root = Path(directory).expanduser()
        try:
            open_private(root)
            self._lock = (root / "lock").open("a")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            names = [path.name for path in root.iterdir() if path.is_dir()]
            self.owners = {name: Owner(root / name) for name in names}
        except BlockingIOError as error:
            raise FinwhaleError(f"another server uses the batch directory {root}") from error
        except (OSError, ValueError, TypeError) as error:
            raise FinwhaleError(f"cannot use the batch directory {root}: {error}") from error

    def owner(self, key: ApiKey | None) -> Owner:
        name = owner_name(key)
        if name not in self.owners:
            self.owners[name] = Owner(self._root / name)
        return self.owners[name]

    def close(self) -> None:
        self._lock.close()


def owner_name(key: ApiKey | None) -> str:
    """The folder of a key's files. Keys of one name share it, and it does not reveal the key."""
    if key is None:
        return "everybody"
    return hashlib.sha256(f"batches of {key.identity}".encode()).hexdigest()[:32]


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def page_of(
    found: Iterable[StoredFile | StoredBatch], limit: int, after: str | None
) -> dict[str, Any]:
    """A page of a list. Raises ApiError (400) if `after` is none of its ids."""
    every = list(found)
    begin = 0
    if after is not None:
        ids = [one.id for one in every]
        if after not in ids:
            raise ApiError(400, "after is not an id of this list", code="invalid_value",
                           param="after")  # fmt: skip
        begin = ids.index(after) + 1
    data = [one.answer() for one in every[begin : begin + limit]]
    return {
        "object": "list",
        "data": data,
        "has_more": begin + limit < len(every),
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _read(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in folder.glob("*.json"):
        value = json.loads(path.read_bytes())
        if not (isinstance(value, dict) and value.get("id") == path.stem):
            raise ValueError(f"{path} is damaged")
        found.append(value)
    return found


def _found(known: Mapping[str, T], what: str, name: str, code: ErrorCode) -> T:
    if name in known:
        return known[name]
    shown = re.sub("[^A-Za-z0-9_-]", "?", name[:100])
    raise ApiError(404, f"no {what} has the id {shown}", code=code, param="id")


def no_space(error: OSError) -> ApiError:
    return ApiError(507, f"the server cannot store the file: {os.strerror(error.errno or 0)}",
                    code="no_space")  # fmt: skip
