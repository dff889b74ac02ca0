"""Writes unquantised weights as an official checkpoint: quantised to FP8 and FP4, in files.

Needs the finwhale package, which has the formats and writes the files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale.checkpoint.formats import quantise_fp4, quantise_fp8_block
from finwhale.checkpoint.spec import FP8_BLOCKS, WeightSpec
from finwhale.checkpoint.stored import PLAIN_DTYPES, PLAIN_STORAGES, StoredWeight
from finwhale.checkpoint.writer import write_stored
from finwhale.errors import CheckpointError


def write_checkpoint(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, WeightSpec],
    *,
    scale_dtype: torch.dtype = torch.float8_e8m0fnu,
    plain_dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write unquantised weights as a checkpoint.

    Args:
        path: the directory, created if missing; it must not hold safetensors files.
        config: the contents of config.json.
        tensors: each weight of `specs` once, in any order, under its official name, float32,
            bfloat16 or int64, with its spec's shape. It may be a generator: the writer holds at
            most one file's tensors at a time.
        specs: the shape and stored format of each weight.
        scale_dtype: dtype of FP8 scales: float8_e8m0fnu, or float32 as in the Base checkpoints.
        plain_dtype: store every floating weight in this dtype and quantise nothing.
        max_shard_bytes: a file holds at most this many bytes of data, or one weight.

    Raises:
        CheckpointError: a tensor is unknown, given twice, missing or of another shape, has a
            value that is not finite, or the directory already holds weights.
    """

    def encoded() -> Iterator[tuple[WeightSpec, StoredWeight]]:
        missing = dict(specs)
        for name, tensor in tensors:
            if name not in specs:
                raise CheckpointError(f"cannot write {name}: the model has no such tensor")
            if name not in missing:
                raise CheckpointError(f"cannot write {name} twice")
            spec = missing.pop(name)
            if tuple(tensor.shape) != spec.shape:
                raise CheckpointError(
                    f"cannot write {name} of shape {list(tensor.shape)}, wanted {list(spec.shape)}"
                )
            yield spec, encode(spec, tensor, scale_dtype, plain_dtype)
        if missing:
            raise CheckpointError(
                f"{len(missing)} tensors were not given: {', '.join(list(missing)[:3])}"
            )

    write_stored(path, config, encoded(), max_shard_bytes=max_shard_bytes)


def encode(
    spec: WeightSpec,
    tensor: Tensor,
    scale_dtype: torch.dtype = torch.float8_e8m0fnu,
    plain_dtype: torch.dtype | None = None,
) -> StoredWeight:
    """A weight in its stored form, on the CPU."""
    tensor = tensor.detach()
    scale = None
    storage = spec.storage
    try:
        if storage == "i64":
            data = tensor.to(torch.int64)
        elif plain_dtype is not None:
            data, storage = tensor.to(plain_dtype), PLAIN_STORAGES[plain_dtype]
        elif storage in FP8_BLOCKS:
            data, scale = quantise_fp8_block(tensor, scale_dtype, FP8_BLOCKS[storage])
        elif storage == "fp4":
            data, scale = quantise_fp4(tensor)
        else:
            data = tensor.to(PLAIN_DTYPES[storage])
    except CheckpointError as error:
        raise CheckpointError(f"cannot write {spec.name}: {error}") from error
    return StoredWeight(data.contiguous(), scale, storage).to("cpu")
