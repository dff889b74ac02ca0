"""Reads config.json and generation_config.json of a checkpoint; imports no torch."""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finwhale.errors import CheckpointError, RequestError
from finwhale.files import is_file, mode_of, read_json
from finwhale.options import marked
from finwhale.request import SamplingParams

CONFIG_FILE = "config.json"
FILE = "generation_config.json"
# The values that requests get. `max_new_tokens` is none: each way to ask has its own default.
SAMPLING = marked(SamplingParams, "checkpoint")


def read_config(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint directory's config.json, with the end tokens of generation_config.json.

    The directory need not contain tensors.

    Raises:
        CheckpointError: the directory or config.json is missing, or a file is damaged.
    """
    directory = Path(path)
    mode = mode_of(directory)
    if not stat.S_ISDIR(mode):
        raise CheckpointError(
            f"no checkpoint at {directory}: "
            + ("it is a file, not a directory" if mode else "no such directory")
        )
    config = directory / CONFIG_FILE
    if not is_file(config):
        raise CheckpointError(f"{directory} has no {CONFIG_FILE}; a checkpoint directory holds one")
    found = read_json(config)
    _add_end_tokens(found, directory)
    return found


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """The values for fields of SamplingParams that a request leaves out. Raises CheckpointError."""
    found = _read(directory)
    values = {name: found[name] for name in SAMPLING if found.get(name) is not None}
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise CheckpointError(
            f"{directory / FILE}: {error}; generation_config none (--generation-config none) "
            "ignores these values"
        ) from error
    return values


def described(defaults: Mapping[str, Any]) -> str:
    """Defaults in words, with the option that ignores them."""
    values = ", ".join(f"{name} {value}" for name, value in defaults.items())
    return f"{values} by {FILE} (--generation-config none ignores it)"


def _add_end_tokens(config: dict[str, Any], directory: Path) -> None:
    """Add the end tokens of generation_config.json to a config.json's. Raises CheckpointError."""
    more = _read(directory).get("eos_token_id")
    if more is None:
        return
    more = more if isinstance(more, list) else [more]
    if not all(type(token) is int for token in more):
        raise CheckpointError(
            f"{directory / FILE}: eos_token_id must be a token id or a list of them, got {more!r}"
        )
    own = config.get("eos_token_id")
    ends = [] if own is None else own if isinstance(own, list) else [own]
    config["eos_token_id"] = ends + [token for token in more if token not in ends]


def _read(directory: Path) -> dict[str, Any]:
    path = directory / FILE
    return read_json(path) if is_file(path) else {}
