"""Opens a checkpoint directory: its config.json and the headers of its safetensors files.

Opening reads no data and reports every fault that the headers show.
"""

import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from finwhale.checkpoint.config_files import read_config
from finwhale.checkpoint.names import ExpertPart, official_tensors
from finwhale.checkpoint.spec import Slice
from finwhale.collection import no_collection
from finwhale.errors import CheckpointError
from finwhale.files import is_file, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "I64": torch.int64,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
# Parsing a malformed header raises these errors (OverflowError: an infinite size).
_DAMAGED = (LookupError, TypeError, AttributeError, ValueError, RecursionError, OverflowError)
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit


class Layout(NamedTuple):
    """The position of a slice in its tensor. Many tensors, such as experts, share one layout.

    Attributes:
        start: offset of the slice's first byte from the tensor's.
        pitch: bytes from one row to the next; None: the rows are contiguous.
    """

    shape: tuple[int, ...]
    num_bytes: int
    start: int
    pitch: int | None


# Not frozen, because a checkpoint has up to 140,000 tensors and frozen data classes take five times
# as long to create. Nothing changes an instance.
@dataclass(slots=True)
class TensorInfo:
    """One tensor under its official name, and its location.

    Attributes:
        num_bytes: its size in the file; for one expert of a stacked tensor, the size of its slice.
        file: path relative to the directory: a name, or "../NAME/FILE" in a sibling directory.
        stored_name: the tensor's name in the file.
        offset: offset in the file of its first byte.
        part: the slice of the stored tensor; None: the whole tensor.
        pitch: bytes in the file from one row to the next; None: the rows are contiguous.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_bytes: int
    file: str
    stored_name: str
    offset: int
    part: ExpertPart | None = None
    pitch: int | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which are contiguous."""
        return self.num_bytes // self.shape[0]

    def layout_of(self, part: Slice) -> Layout:
        """The layout of a slice of this tensor: rows, or columns of a matrix."""
        assert self.pitch is None and part.axis < 2
        shape = part.shape_in(self.shape)
        size = self.dtype.itemsize
        num_bytes = math.prod(shape) * size
        if part.axis == 0:
            return Layout(shape, num_bytes, part.start * self.row_bytes, None)
        assert len(shape) == 2, self.shape
        return Layout(shape, num_bytes, part.start * size, self.row_bytes)

    def sliced(self, layout: Layout) -> "TensorInfo":
        """The slice of this tensor with this layout."""
        shape, num_bytes, start, pitch = layout
        # Not `replace`, which is slow.
        return TensorInfo(
            self.name,
            self.dtype,
            shape,
            num_bytes,
            self.file,
            self.stored_name,
            self.offset + start,
            self.part,
            pitch,
        )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory.

    Attributes:
        path: the directory.
        config: the contents of config.json, with the end tokens of generation_config.json.
        tensors: every tensor by its official name, in the order of the files.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]

    @classmethod
    def open(cls, path: str | Path) -> "Checkpoint":
        """Read config.json and the headers of all files.

        Raises:
            CheckpointError: the directory, config.json, the index or a file is missing, damaged or
                contradictory, or a tensor has a dtype that no DeepSeek-V4 checkpoint has.
        """
        config = read_config(path)
        with no_collection():
            return cls(Path(path), config, _inventory(Path(path)))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.num_bytes for info in self.tensors.values())

    def shards(self) -> list[tuple[str, list[str]]]:
        """(file, official names in it) for each file, in the best order for reading all tensors."""
        names = defaultdict(list)
        for info in self.tensors.values():
            names[info.file].append(info.name)
        return sorted(names.items())

    def reader(self) -> "TensorReader":
        """A context manager that reads tensors and keeps the files it needs open."""
        return TensorReader(self)


class TensorReader(ExitStack):
    """Reads tensors by official name; files stay open until `close_all` or the end of `with`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._files: dict[str, Any] = {}

    def read(self, name: str) -> Tensor:
        """The tensor as a view of the mapped file, which is read lazily. Writes do not reach it.

        Raises:
            CheckpointError: the tensor does not exist, or its file changed since it was opened.
        """
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._checkpoint.path} has no tensor {name}")
        try:
            tensor: Tensor = self._file(info.file).get_tensor(info.stored_name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name} from {info.file}: {error}") from error
        return tensor if info.part is None else tensor[info.part]

    def close_all(self) -> None:
        """Close the files. Tensors that were read remain valid."""
        self._files.clear()
        self.close()

    def _file(self, file: str) -> Any:
        if file not in self._files:
            handle = safe_open(self._checkpoint.path / file, framework="pt", device="cpu")
            self._files[file] = self.enter_context(handle)
        return self._files[file]


def _inventory(directory: Path) -> dict[str, TensorInfo]:
    expected = _expected_names(directory)
    try:
        headers = {file: _read_header(directory / file) for file in expected}
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}") from error
    owner: dict[str, str] = {}
    for file, header in headers.items():
        for name in header:
            if name in owner:
                raise CheckpointError(f"tensor {name} is in two files: {owner[name]} and {file}")
            owner[name] = file
    for file, names in expected.items():
        lost = sorted(names - headers[file].keys())
        if lost:
            raise CheckpointError(
                f"{INDEX_FILE} says that {lost[0]} is in {file}, which does not hold it "
                f"({len(lost)} such tensors); the index and the files are of different checkpoints"
            )
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for stored_name, stored in header.items():
            for info in _infos(file, stored_name, *stored):
                other = tensors.get(info.name)
                if other is not None:
                    raise CheckpointError(
                        f"{other.stored_name} in {other.file} and {stored_name} in {file} are "
                        f"both the tensor {info.name}"
                    )
                tensors[info.name] = info
    return tensors


def _infos(
    file: str, stored_name: str, dtype: torch.dtype, stored_shape: tuple[int, ...], offset: int
) -> Iterator[TensorInfo]:
    for name, shape, part in official_tensors(stored_name, stored_shape):
        start, size = offset, dtype.itemsize
        if part is not None:
            _, rows, columns = stored_shape
            start += (part[0] * rows + part[1].start) * columns * size
        num_bytes = math.prod(shape) * size
        yield TensorInfo(name, dtype, shape, num_bytes, file, stored_name, start, part)


def _expected_names(directory: Path) -> dict[str, set[str]]:
    """Sorted file names, each with the tensor names that the index gives (none without index)."""
    index_path, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not is_file(index_path):
        if not is_file(single):
            raise CheckpointError(f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {SINGLE_FILE: set()}
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path} has no weight_map of tensor names to file names")
    expected: dict[str, set[str]] = {}
    for name, file in sorted(weight_map.items(), key=lambda item: str(item[1])):
        if not isinstance(file, str) or (file not in expected and not _allowed(file)):
            raise CheckpointError(f"{index_path}: {name} has the file name {file!r}")
        expected.setdefault(file, set()).add(name)
    missing = [file for file in expected if not is_file(directory / file)]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of {len(expected)} files that {INDEX_FILE} names: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; download them again"
        )
    return expected


def _allowed(file: str) -> bool:
    """Whether an index may name this file: in the checkpoint's directory or a sibling of it.

    This lets two checkpoints that differ in the draft head share the other weights.
    """
    up, _, shared = file.partition("/")
    if up == "..":
        directory, _, file = shared.partition("/")
        if directory in ("", ".", ".."):
            return False
    return file not in ("", "..") and Path(file).name == file


def _read_header(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...], int]]:
    """Dtype, shape and offset of one file's tensors by stored name, in the order of its data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if prefix.startswith(b"version "):
            raise CheckpointError(f"{path} is a Git LFS pointer, not the data: run git lfs pull")
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file ({size} bytes)")
        if 8 + length > size:
            raise CheckpointError(
                f"{path} is truncated: {size} bytes, its header alone takes {8 + length}; "
                "download it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        end = max((entry["data_offsets"][1] for _, entry in entries), default=0)
        found = {}
        for name, entry in entries:
            shape, (begin, stop) = entry["shape"], entry["data_offsets"]
            if any(type(number) is not int for number in (begin, stop, *shape)):
                raise TypeError(f"{name} has a number that is not an integer")
            found[name] = (str(entry["dtype"]), tuple(shape), begin, stop)
    except _DAMAGED as error:
        raise CheckpointError(f"{path} has a damaged safetensors header") from error
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path} is {'truncated' if size < 8 + length + end else 'too long'}: {size} bytes, "
            f"its header promises {8 + length + end}; download it again"
        )
    stored = {}
    for name, (kind, shape, begin, stop) in found.items():
        dtype = _dtype(path, name, kind)
        # An empty stack of experts could claim any number of experts.
        least = 0 if len(shape) == 1 else 1
        if (
            begin < 0
            or min(shape, default=1) < least
            or stop - begin != math.prod(shape) * dtype.itemsize
        ):
            raise CheckpointError(
                f"{path} has a damaged safetensors header: {name[:100]!r} of {kind} cannot have "
                f"its shape and the bytes {begin} to {stop}"
            )
        stored[name] = dtype, shape, 8 + length + begin
    return stored


def _dtype(path: Path, name: str, dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{name} in {path} has the dtype {dtype}, which is not supported; wanted one of "
            f"{', '.join(DTYPES)}"
        )
    return DTYPES[dtype]
