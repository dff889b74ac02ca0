"""Writes a checkpoint in the official layout: sharded, with index and config.json."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from finwhale.checkpoint.config_files import CONFIG_FILE
from finwhale.checkpoint.reader import INDEX_FILE, SINGLE_FILE
from finwhale.checkpoint.spec import Storage, WeightSpec
from finwhale.checkpoint.stored import DTYPE_NAMES, PLAIN_DTYPES, StoredWeight, scale_shape
from finwhale.errors import CheckpointError

_PLAIN_DTYPES: dict[Storage, torch.dtype] = {**PLAIN_DTYPES, "i64": torch.int64}
# The order in which save_file writes tensors; those of the same dtype are ordered by name.
_DTYPE_ORDER = ("I64", "F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "I8")
# Writes tensors to a file, with metadata.
Save = Callable[[dict[str, Tensor], Path, dict[str, str]], object]


def write_stored(
    path: str | Path,
    config: Mapping[str, Any],
    weights: Iterable[tuple[WeightSpec, StoredWeight]],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write weights in stored form, such as a DummySource's, as a checkpoint.

    Args:
        path: the directory, created if missing; it must not hold safetensors files.
        config: the contents of config.json.
        weights: each weight once. It may be a generator: the writer holds at most one file's
            tensors at a time.
        max_shard_bytes: a file holds at most this many bytes of data, or one weight. A single file
            is named model.safetensors; several files get an index.

    Raises:
        CheckpointError: the directory already holds weights.
    """

    def named(spec: WeightSpec, stored: StoredWeight) -> dict[str, Tensor]:
        scale = {} if stored.scale is None else {spec.scale_name: stored.scale.cpu()}
        return {spec.name: stored.data.cpu(), **scale}

    _write(path, config, starmap(named, weights), max_shard_bytes)


def write_zeros(
    path: str | Path,
    config: Mapping[str, Any],
    specs: Iterable[WeightSpec],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write a checkpoint whose values are all zero, in sparse files: it takes no room on the disk.

    The arguments and errors are those of write_stored.
    """
    _write(path, config, map(_without_values, specs), max_shard_bytes, _save_zeros)


def _without_values(spec: WeightSpec) -> dict[str, Tensor]:
    """A weight's stored tensors by official name, on the meta device."""

    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    if spec.storage in _PLAIN_DTYPES:
        return {spec.name: empty(spec.shape, _PLAIN_DTYPES[spec.storage])}
    *rows, columns = spec.shape
    data = empty(spec.shape, torch.float8_e4m3fn)
    if spec.storage == "fp4":
        data = empty((*rows, columns // 2), torch.int8)
    scale = empty(scale_shape(spec.shape, spec.storage), torch.float8_e8m0fnu)
    return {spec.name: data, spec.scale_name: scale}


def _save_zeros(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Like save_file, for zeros instead of the tensors' values."""
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    dtypes = {name: DTYPE_NAMES[tensor.dtype] for name, tensor in tensors.items()}
    for name in sorted(tensors, key=lambda name: (_DTYPE_ORDER.index(dtypes[name]), name)):
        shape, begin = list(tensors[name].shape), end
        end += tensors[name].nbytes
        header[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def _write(
    path: str | Path,
    config: Mapping[str, Any],
    weights: Iterable[dict[str, Tensor]],
    max_shard_bytes: int,
    save: Save = save_file,
) -> None:
    """Write a checkpoint. The stored tensors of a weight stand under its official name."""
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob("*.safetensors")) or (directory / INDEX_FILE).exists():
        raise CheckpointError(f"{directory} already holds a checkpoint; choose an empty directory")
    total_bytes = 0
    written: list[tuple[Path, list[str]]] = []
    for shard in _shards(weights, max_shard_bytes):
        temporary = directory / f"part-{len(written) + 1:05d}.incomplete"
        save(shard, temporary, {"format": "pt"})
        written.append((temporary, list(shard)))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    _name_files(directory, written, total_bytes)
    _write_json(directory / CONFIG_FILE, config)


def _shards(weights: Iterable[dict[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Collect tensors into files of limited size. Each dictionary is valid until the next one."""
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for stored in weights:
        more = sum(tensor.nbytes for tensor in stored.values())
        if shard and num_bytes + more > max_bytes:
            yield shard
            shard.clear()
            num_bytes = 0
        # Clone: save_file refuses tensors that share memory.
        shard.update({name: tensor.clone() for name, tensor in stored.items()})
        num_bytes += more
    if shard:
        yield shard


def _name_files(
    directory: Path, written: Sequence[tuple[Path, list[str]]], total_bytes: int
) -> None:
    """Give the files their names, and write the index of several files."""
    count = len(written)
    if count == 1:
        written[0][0].rename(directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (temporary, names) in enumerate(written, start=1):
        file = f"model-{number:05d}-of-{count:05d}.safetensors"
        temporary.rename(directory / file)
        weight_map.update(dict.fromkeys(names, file))
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(directory / INDEX_FILE, index)


def _write_json(path: Path, contents: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
