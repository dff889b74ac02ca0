"""Reads a checkpoint's weights, after a check of all its tensors against the model."""

import logging
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from finwhale.checkpoint.formats import find_nan
from finwhale.checkpoint.reader import Checkpoint, Layout, TensorInfo, TensorReader
from finwhale.checkpoint.spec import FP8_BLOCKS, Progress, Storage, WeightSpec, name_of_scale
from finwhale.checkpoint.stored import (
    Mismatch,
    StoredWeight,
    data_slice,
    has_scale,
    scale_mismatch,
    scale_slice,
    storage_of,
)
from finwhale.collection import no_collection
from finwhale.errors import CheckpointError
from finwhale.weights.destinations import Destinations
from finwhale.weights.joint import JointReader
from finwhale.weights.joint_ranks import JointRanks
from finwhale.weights.staging import (
    THREADS,
    THREADS_BESIDE_JOINT,
    Faults,
    Staging,
    destination_checks,
    read_into,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The comparison of a checkpoint's tensors with a model's weights.

    Attributes:
        missing: names that the checkpoint lacks, including scales of quantised weights.
        unexpected: names that the model does not have.
        mismatched: tensors with a wrong shape or dtype.
        ignored: names that the loader ignores on purpose.
        storages: the stored format of each matching weight.
        matches: how each weight that the checkpoint has matches its spec.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[Mismatch, ...]
    ignored: tuple[str, ...]
    storages: Mapping[str, Storage]
    matches: Mapping[str, "Match"]

    @property
    def complete(self) -> bool:
        """Whether no tensor is missing, unexpected or mismatched."""
        return not (self.missing or self.unexpected or self.mismatched)


def inventory_report(
    checkpoint: Checkpoint,
    specs: Mapping[str, WeightSpec],
    ignored: Mapping[str, str] | None = None,
) -> Inventory:
    """Compare a checkpoint's headers with a model's weights.

    Args:
        checkpoint: an opened checkpoint.
        specs: the model's weights by name.
        ignored: prefixes of names to ignore, with the reason.
    """
    tensors = checkpoint.tensors
    missing: list[str] = []
    mismatched: list[Mismatch] = []
    storages: dict[str, Storage] = {}
    matches: dict[str, Match] = {}
    scale_names: set[str] = set()
    # Thousands of experts differ only in their names, so they share a match. Faults are not shared,
    # because they name the tensor.
    known: dict[object, Match] = {}
    for name, spec in specs.items():
        _, shape, spec_storage, part = spec[:4]
        scale_name = name_of_scale(name)
        data, scale = tensors.get(name), tensors.get(scale_name)
        if data is None:
            missing.append(name)
            continue
        kind: object = (shape, spec_storage, part, data.shape, data.dtype)
        if scale is not None:
            kind = (kind, scale.shape, scale.dtype)
        match = known.get(kind)
        if match is None:
            match = _match(spec, data, scale)
            if match.fault is None:
                known[kind] = match
            else:
                mismatched.append(match.fault)
        matches[name] = match
        if match.storage is not None:
            storages[name] = match.storage
        if match.may_have_scale:
            if scale is not None:
                scale_names.add(scale_name)
            elif match.storage is not None:
                missing.append(scale_name)
    left_out = tuple(ignored or ())
    rest: list[str] = []
    if len(tensors) != len(matches) + len(scale_names):
        rest = [name for name in tensors if name not in matches and name not in scale_names]
    return Inventory(
        missing=tuple(missing),
        unexpected=tuple(n for n in rest if not n.startswith(left_out)),
        mismatched=tuple(mismatched),
        ignored=tuple(n for n in rest if n.startswith(left_out)),
        storages=storages,
        matches=matches,
    )


class WeightSource:
    """Iterates over a checkpoint's weights, as (spec, stored weight), one file after the other.

    The iterator yields each weight once, or the slice that its spec names. It reads no other bytes,
    unless ranks read together. It maps files into memory on a CPU, and reads them with several
    threads for a GPU. A weight may be stored as its spec says, as bfloat16, float16 or float32
    unless the spec is int64, or in FP8 if the spec is FP4. FP8 scales may be E8M0 or float32. The
    constructor logs the stored formats.

    Args:
        checkpoint: an opened checkpoint.
        specs: every weight of the model by name.
        ignored: prefixes of names to ignore, with the reason; a warning is logged for each.
        device: the device of the weights, a GPU or the CPU.
        progress: called with (bytes done, total bytes) after each weight.

    Raises:
        CheckpointError: from the constructor, if tensors are missing, unexpected, or have a wrong
            shape or dtype; from the iterator, if a file has changed, or a weight or its scales hold
            NaN (on a GPU, raised after the last weight).
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        specs: Mapping[str, WeightSpec],
        *,
        ignored: Mapping[str, str] | None = None,
        device: torch.device | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device or torch.device("cpu")
        self._progress = progress
        with no_collection():
            self.inventory = inventory_report(checkpoint, specs, ignored)
            _require_complete(checkpoint, specs, self.inventory)
            _log(checkpoint, self.inventory, ignored or {})
            self._specs = specs

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the weights that this process holds, scales included."""
        return sum(match.num_bytes for match in self.inventory.matches.values())

    def _parts(self, name: str) -> list[TensorInfo]:
        """What this process reads of a weight: its scales, if it has any, then its data."""
        match, tensors = self.inventory.matches[name], self._checkpoint.tensors
        data = tensors[name]
        data = data if match.data is None else data.sliced(match.data)
        if not has_scale(self.storages[name]):
            return [data]
        scale = tensors[name_of_scale(name)]
        return [scale if match.scale is None else scale.sliced(match.scale), data]

    @property
    def storages(self) -> Mapping[str, Storage]:
        """The stored format of each weight."""
        return self.inventory.storages

    def __iter__(self) -> Iterator[tuple[WeightSpec, StoredWeight]]:
        for spec, stored in self.into(Destinations()):
            assert stored is not None
            yield spec, stored

    def into(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        """Iterate over the weights (WeightStream). Only a GPU's are read into their destinations.
        Lookup tables come first, and go from the files straight to host memory.

        Their bytes have arrived when the iteration ends. GPUs of one host read what has a
        destination once for all `ranks`, each of which iterates over its own slices.
        """
        on_gpu = self._device.type == "cuda"
        streamed = self._staged(destinations, ranks) if on_gpu else self._mapped(destinations)
        weights = chain(self._read_lookups(destinations), streamed)
        if self._progress is None:
            yield from weights
            return
        done = 0
        for spec, stored in weights:
            yield spec, stored
            done += self.inventory.matches[spec.name].num_bytes
            self._progress(done, self.total_bytes)

    def _read_lookups(self, destinations: Destinations) -> Iterator[tuple[WeightSpec, None]]:
        """Read this rank's rows of the lookup tables, whose other rows other ranks read."""
        for name in filter(self._specs.__contains__, destinations.lookups):
            for info in self._parts(name):
                read_into(destinations[info.name], self._checkpoint.path, info)
            yield self._specs[name], None

    def _mapped(self, destinations: Destinations) -> Iterator[tuple[WeightSpec, StoredWeight]]:
        waiting = {n: s for n, s in self._specs.items() if n not in destinations.lookups}
        with self._checkpoint.reader() as reader:
            for _, names in self._checkpoint.shards():
                for name in names:
                    spec = waiting.pop(name, None)
                    if spec is not None:
                        yield spec, self._read(reader, spec)
                reader.close_all()
        assert not waiting, waiting

    def _staged(
        self, destinations: Destinations, ranks: JointRanks | None = None
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        """Iterate as for a GPU. Weights that the ranks read jointly come as they become ready."""
        destinations = self._fitting(destinations)
        if ranks is not None and ranks.size > 1 and ranks.open(destinations):
            yield from self._read_jointly(destinations, self._joint_reader(destinations, ranks))
        else:
            yield from self._read_alone(destinations)

    def _fitting(self, destinations: Destinations) -> Destinations:
        """Drop the destinations of FP8 weights with float32 scales: they are for E8M0 scales."""
        tensors, other = self._checkpoint.tensors, set[str]()
        for name, storage in self.storages.items():
            if storage in FP8_BLOCKS and tensors[name_of_scale(name)].dtype == torch.float32:
                other |= {name, name_of_scale(name)}
        return destinations.without(other) if other else destinations

    def _joint_reader(self, destinations: Destinations, ranks: JointRanks) -> JointReader:
        """A reader of the tensors that have a destination."""
        axes: dict[str, int | None] = {}
        parts = destinations.parts
        for name, spec in self._specs.items():
            if name in parts:
                axes[name] = axis = None if spec.slice is None else spec.slice.axis
                scale_name = name_of_scale(name)
                if scale_name in parts:
                    axes[scale_name] = axis
        infos = (info for name, info in self._checkpoint.tensors.items() if name in axes)
        return JointReader(self._checkpoint.path, infos, axes, ranks)

    def _read_jointly(
        self, destinations: Destinations, reader: JointReader
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        stop: BaseException | None = CheckpointError("loading stopped")
        try:
            reader.start()
            for weight in self._read_alone(destinations, reader.axes):
                yield weight
                if reader.should_stop():
                    break
                yield from self._weights_among(reader.names(wait=False))
            # This takes a while, so it comes before the others' last bytes have arrived.
            tensors = self._checkpoint.tensors
            checks = destination_checks((tensors[name] for name in reader.axes), destinations)
            yield from self._weights_among(reader.names(wait=True))
            stop = None
        except Exception as error:
            stop = error
            raise
        finally:
            reader.close(stop)
            del stop  # breaks the reference cycle of exception and frame
        faults = Faults()
        faults.add_checks(checks)
        faults.raise_first()

    def _weights_among(self, names: Iterable[str]) -> Iterator[tuple[WeightSpec, None]]:
        """The weights among tensors whose bytes went to their destinations."""
        for name in names:
            if name in self._specs:
                yield self._specs[name], None

    def _read_alone(
        self, destinations: Destinations, joint: Container[str] = ()
    ) -> Iterator[tuple[WeightSpec, StoredWeight | None]]:
        """Iterate over the tensors that are not `joint` through Staging, file by file.

        In each file, tensors without a destination come first, scales before weights; the iterator
        keeps a scale until its weight arrives. Tensors with a destination follow in file order.
        """
        scales: dict[str, Tensor | None] = {}
        threads = THREADS_BESIDE_JOINT if joint else THREADS
        path, device = self._checkpoint.path, self._device
        staging = Staging(path, device, destinations=destinations, threads=threads)
        for info, tensor in staging.tensors(self._in_order(destinations, joint)):
            spec = self._specs.get(info.name)
            if spec is None:
                scales[info.name] = tensor
            elif tensor is None:
                yield spec, None
            else:
                storage = self.inventory.storages[spec.name]
                scale = scales.pop(spec.scale_name) if has_scale(storage) else None
                yield spec, StoredWeight(tensor, scale, storage)
        assert not any(scale is not None for scale in scales.values()), list(scales)

    def _in_order(self, destinations: Destinations, joint: Container[str]) -> list[TensorInfo]:
        order, read = list[TensorInfo](), destinations.lookups
        for _, names in self._checkpoint.shards():
            chosen = [n for n in names if n in self._specs and not (n in joint or n in read)]
            parts = [self._parts(name) for name in chosen]
            files = [*(info for one in parts for info in one[:-1]), *(one[-1] for one in parts)]
            direct = [info for info in files if info.name in destinations]
            order += [info for info in files if info.name not in destinations]
            order += sorted(direct, key=lambda info: (info.file, info.offset))
        return order

    def _read(self, reader: TensorReader, spec: WeightSpec) -> StoredWeight:
        storage = self.inventory.storages[spec.name]
        data = reader.read(spec.name)
        scale = reader.read(spec.scale_name) if has_scale(storage) else None
        stored = StoredWeight(data, scale, storage).sliced(spec.slice)
        fault = find_nan(stored.data, stored.scale)
        if fault is not None:
            file = self._checkpoint.tensors[spec.name].file
            raise CheckpointError(f"{spec.name} in {file} holds {fault}; the file is damaged")
        return stored


class Match(NamedTuple):
    """How a weight and its scales match a spec.

    Attributes:
        storage: the stored format; None: the weight has a wrong shape or dtype.
        data: the layout of the slice of the weight; None: the whole weight.
        scale: the layout of the slice of its scales.
        num_bytes: bytes of the weight and its scales that this process reads.
        fault: the wrong shape or dtype, of the weight or its scales.
        may_have_scale: a tensor with the name of its scales belongs to it.
    """

    storage: Storage | None
    data: Layout | None = None
    scale: Layout | None = None
    num_bytes: int = 0
    fault: Mismatch | None = None
    may_have_scale: bool = True


def _match(spec: WeightSpec, data: TensorInfo, scale: TensorInfo | None) -> Match:
    """Match a weight with its spec. Scales that the stored format does not have are ignored."""
    storage = storage_of(spec, data)
    if isinstance(storage, Mismatch):
        return Match(None, fault=storage)
    scaled = has_scale(storage)
    if not scaled:
        scale = None
    fault = None if scale is None else scale_mismatch(spec, scale, storage)
    part, data_layout, scale_layout = spec.slice, None, None
    if fault is not None:
        return Match(storage, fault=fault)
    if part is not None:
        data_layout = data.layout_of(data_slice(part, storage))
        scale_layout = None if scale is None else scale.layout_of(scale_slice(part, storage))
    num_bytes = sum(x.num_bytes for x in (data_layout or data, scale_layout or scale) if x)
    return Match(storage, data_layout, scale_layout, num_bytes, None, scaled)


def _log(checkpoint: Checkpoint, found: Inventory, ignored: Mapping[str, str]) -> None:
    for prefix, reason in ignored.items():
        count = sum(name.startswith(prefix) for name in found.ignored)
        if count:
            logger.warning("ignoring %d tensors %s*: %s", count, prefix, reason)
    by_format = Counter(found.storages.values()).most_common()
    counts = ", ".join(f"{n} {kind}" for kind, n in by_format)
    logger.info("%s: weights stored as %s", checkpoint.path, counts)


def _require_complete(
    checkpoint: Checkpoint, specs: Mapping[str, WeightSpec], found: Inventory
) -> None:
    if found.complete:
        return
    if found.mismatched:
        # Report these first, because with another model's config.json names are missing too.
        raise CheckpointError(
            f"config.json and the tensors in {checkpoint.path} disagree on {len(found.mismatched)} "
            f"of {len(specs)} weights: {_first(found.mismatched, '; ')}. Check that config.json "
            "belongs to these files"
        )
    if found.missing:
        hint = "the files are incomplete or config.json describes another model"
        if all(name.startswith("mtp.") for name in found.missing):
            hint = "num_nextn_predict_layers 0 in config.json runs the model without drafting"
        raise CheckpointError(
            f"{checkpoint.path} lacks {len(found.missing)} tensors that config.json implies: "
            f"{_first(found.missing)}; {hint}"
        )
    raise CheckpointError(
        f"{checkpoint.path} holds {len(found.unexpected)} tensors that config.json does not imply: "
        f"{_first(found.unexpected)}; config.json describes another model, or the checkpoint is "
        "newer than this version of Finwhale"
    )


def _first(items: tuple[object, ...], separator: str = ", ") -> str:
    shown = separator.join(str(item) for item in items[:3])
    return shown + (f"{separator}..." if len(items) > 3 else "")
