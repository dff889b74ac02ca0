"""Weights in the formats in which checkpoints store them, and which formats fit which weight."""

from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.checkpoint import formats
from finwhale.checkpoint.reader import DTYPES, TensorInfo
from finwhale.checkpoint.spec import FP8_BLOCKS, Slice, Storage, WeightSpec

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLAIN_STORAGES: dict[torch.dtype, Storage] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
}
PLAIN_DTYPES = {storage: dtype for dtype, storage in PLAIN_STORAGES.items()}
_SCALE_DTYPES = (torch.float8_e8m0fnu, torch.float32)


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight in its stored form.

    Attributes:
        data: bfloat16, float16, float32 or int64 of the logical shape; float8_e4m3fn [out, in];
            or int8 [out, in/2], two e2m1 codes a byte.
        scale: float8_e8m0fnu or float32, one per square block (FP8 block); float8_e8m0fnu, one per
            1x32 (FP8 row, FP4); None for plain storages.
        storage: the name of the format.
    """

    data: Tensor
    scale: Tensor | None
    storage: Storage

    def to(self, device: torch.device | str) -> "StoredWeight":
        """The same weight on a device. The result shares tensors that are already there."""
        scale = None if self.scale is None else self.scale.to(device)
        return StoredWeight(self.data.to(device), scale, self.storage)

    def sliced(self, part: Slice | None) -> "StoredWeight":
        """A slice of this weight with its scales, as views; None: the whole weight."""
        if part is None:
            return self
        data = data_slice(part, self.storage).of(self.data)
        scale = self.scale
        if scale is not None:
            scale = scale_slice(part, self.storage).of(scale)
        return StoredWeight(data, scale, self.storage)

    def dequantise(self, dtype: torch.dtype, device: torch.device | str | None = None) -> Tensor:
        """The values in the logical shape, as dtype; int64 stays int64.

        The stored bytes are first copied to the device. A plain weight that already has the dtype
        and device is returned unchanged; it may be a view of the checkpoint's file.
        """
        stored = self if device is None else self.to(device)
        if self.storage == "i64":
            return stored.data
        if stored.scale is None:
            return stored.data.to(dtype)
        if self.storage == "fp4":
            return formats.dequantise_fp4(stored.data, stored.scale, dtype)
        if self.storage == "fp8_row_32":
            return formats.dequantise_fp8_rows(stored.data, stored.scale, dtype)
        block = FP8_BLOCKS[self.storage]
        return formats.dequantise_fp8_block(stored.data, stored.scale, dtype, block)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A tensor that does not match the configuration; `found` and `wanted` describe both."""

    name: str
    found: str
    wanted: str

    def __str__(self) -> str:
        return f"{self.name} is {self.found}, wanted {self.wanted}"


def has_scale(storage: Storage) -> bool:
    return storage in ("fp4", "fp8_row_32") or storage in FP8_BLOCKS


def scale_shape(shape: tuple[int, ...], storage: Storage) -> tuple[int, ...]:
    """The shape of a weight's scales."""
    if storage in FP8_BLOCKS:
        return formats.fp8_scale_shape(shape, FP8_BLOCKS[storage])
    return formats.row_scale_shape(shape)


def row_dtype(storage: Storage) -> torch.dtype:
    """The dtype of the stored rows of a lookup table."""
    return torch.float8_e4m3fn if storage == "fp8_row_32" else PLAIN_DTYPES[storage]


def data_slice(part: Slice, storage: Storage) -> Slice:
    """The slice of a weight's stored data. Only matrices have slices along axis 1."""
    return part.over(2) if storage == "fp4" and part.axis == 1 else part


def scale_slice(part: Slice, storage: Storage) -> Slice:
    """The slice of a weight's scales: one for each block of FP8, for 1x32 values otherwise."""
    if storage in FP8_BLOCKS:
        return part.over(FP8_BLOCKS[storage])
    return part.over(formats.FP4_BLOCK) if part.axis == 1 else part


def storage_of(spec: WeightSpec, info: TensorInfo) -> Storage | Mismatch:
    """The stored format of a tensor, or a Mismatch if it does not fit its spec."""
    if spec.storage == "i64":
        found: Storage | None = "i64" if info.dtype == torch.int64 else None
    elif info.dtype == torch.float8_e4m3fn and has_scale(spec.storage):
        found = "fp8_block" if spec.storage == "fp4" else spec.storage
    elif info.dtype == torch.int8 and spec.storage == "fp4":
        found = "fp4"
    else:
        found = PLAIN_STORAGES.get(info.dtype)
    shape = spec.shape
    if found == "fp4":
        shape = (*spec.shape[:-1], spec.shape[-1] // 2)
    if found is None or info.shape != shape:
        have = f"{DTYPE_NAMES[info.dtype]} {list(info.shape)}"
        return Mismatch(spec.name, have, _wanted(spec))
    return found


def scale_mismatch(spec: WeightSpec, scale: TensorInfo, storage: Storage) -> Mismatch | None:
    shape = scale_shape(spec.shape, storage)
    dtypes = _SCALE_DTYPES if storage in FP8_BLOCKS else _SCALE_DTYPES[:1]
    if scale.shape == shape and scale.dtype in dtypes:
        return None
    return Mismatch(
        spec.scale_name,
        f"{DTYPE_NAMES[scale.dtype]} {list(scale.shape)}",
        f"{' or '.join(DTYPE_NAMES[d] for d in dtypes)} {list(shape)}",
    )


def _wanted(spec: WeightSpec) -> str:
    plain = f"BF16, F16 or F32 {list(spec.shape)}"
    if spec.storage == "i64":
        return f"I64 {list(spec.shape)}"
    if spec.storage == "fp4":
        packed = [*spec.shape[:-1], spec.shape[-1] // 2]
        return f"I8 {packed} or F8_E4M3, {plain}"
    return f"F8_E4M3, {plain}" if has_scale(spec.storage) else plain
