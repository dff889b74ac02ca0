"""Reads generation_config.json: end tokens of a checkpoint, and its defaults of sampling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finwhale.errors import CheckpointError, RequestError
from finwhale.files import is_file, read_json
from finwhale.options import marked
from finwhale.request import SamplingParams

FILE = "generation_config.json"
# The values that requests get. `max_new_tokens` is none: each way to ask has its own default.
SAMPLING = marked(SamplingParams, "checkpoint")


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


def add_end_tokens(config: dict[str, Any], directory: Path) -> None:
    """Add the file's end tokens to those of a config.json. Raises CheckpointError."""
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
