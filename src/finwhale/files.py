"""Reads small files of a checkpoint, whose paths and contents may be wrong in any way."""

import json
import stat
from pathlib import Path
from typing import Any

from finwhale.errors import CheckpointError

# No config.json, index or tokenizer.json comes near this.
MAX_BYTES = 1 << 28


def mode_of(path: Path) -> int:
    """The st_mode of the file that a path names, after symbolic links; 0: there is no file. Raises
    CheckpointError if the path cannot be followed, for example because links form a loop.
    """
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise CheckpointError(f"{str(path)!a} is no path: {error}") from error


def is_file(path: Path) -> bool:
    """Whether there is a file. Raises CheckpointError if there is something else: reading a pipe or
    a device might never end.
    """
    mode = mode_of(path)
    if mode and not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is not a regular file")
    return bool(mode)


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises CheckpointError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_BYTES} bytes")
        with path.open("rb") as file:
            return file.read(MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    try:
        content = json.loads(read_file(path).decode())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return content
