"""Values in registers, addresses, and what they compute, for gluon_interpreter.py."""

import os
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl

KERNEL_MARK = "__emulated_kernel__"  # a global of a kernel's functions


class KernelFault(Exception):
    """A kernel does what is undefined on a GPU, or depends on the order of its partitions."""


# From the narrowest to the widest type: an operation converts its operands to the wider type.
# Narrow floats are held as float32.
ARRAYS: dict[str, Any] = {
    **{"int1": np.bool_, "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "int32": np.int32},
    **{"int64": np.int64, "fp8e4nv": np.float32, "bf16": np.float32, "fp32": np.float32},
}
RANKS = {name: rank for rank, name in enumerate(ARRAYS)}
NARROW = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16}
MEMORY = ARRAYS | {"fp8e4nv": np.uint8, "bf16": np.int16}
TORCH_NAMES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.float32: "fp32"}


def to_memory(data: Any, dtype: Any) -> Any:
    """Elements as they are in memory. Rounds to nearest even; E4M3 saturates."""
    if dtype.name not in NARROW:
        return np.asarray(data, ARRAYS[dtype.name])
    x = torch.from_numpy(np.array(data, np.float32))
    if dtype.name == "fp8e4nv":
        x = x.clamp(-448, 448)
    bits = torch.uint8 if dtype.name == "fp8e4nv" else torch.int16
    return x.to(NARROW[dtype.name]).view(bits).numpy()


def from_memory(data: Any, dtype: Any) -> Any:
    data = np.array(data)
    if dtype.name not in NARROW:
        return data
    return torch.from_numpy(data).view(NARROW[dtype.name]).float().numpy()


def itemsize(dtype: Any) -> int:
    return np.dtype(MEMORY[dtype.name]).itemsize


class Value:
    """A tensor or a scalar in registers."""

    data: Any
    type = SimpleNamespace(layout=None)

    def __init__(self, data: Any, dtype: Any) -> None:
        self.dtype = dtype
        self.data = to_memory(data, dtype)
        if dtype.name in NARROW:
            self.data = from_memory(self.data, dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def like(self, data: Any) -> Any:
        """Other elements of the same type."""
        return Value(data, self.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if not bitcast:
            return Value(self.data, dtype)
        raw = np.ascontiguousarray(to_memory(self.data, self.dtype)).reshape(self.shape)
        return Value(from_memory(raw.view(MEMORY[dtype.name]), dtype), dtype)

    def __getitem__(self, key: Any) -> Any:
        return self.like(self.data[key])

    def __index__(self) -> int:
        return self.data.item().__index__()

    def __bool__(self) -> bool:
        return bool(self.data.item())


class Pointer(Value):
    """Addresses in a tensor's storage, in bytes from its start."""

    def __init__(self, offsets: Any, dtype: Any, memory: Any) -> None:
        self.data, self.dtype, self.memory = np.asarray(offsets, np.int64), dtype, memory

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Pointer":
        name = TORCH_NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        memory = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
        offset = tensor.storage_offset() * tensor.element_size()
        return cls(offset, gl.pointer_type(tl.dtype(name)), memory)

    def like(self, data: Any) -> Any:
        return Pointer(data, self.dtype, self.memory)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        return Pointer(self.data, dtype, self.memory)

    def __add__(self, other: Any) -> Any:
        size = itemsize(self.dtype.element_ty)
        return self.like(self.data + np.asarray(unwrap(other), np.int64) * size)

    __radd__ = __add__

    def elements(self, mask: Any) -> tuple[Any, Any, Any]:
        """Returns all elements of the storage, the indices of those to access, and the mask."""
        size = itemsize(self.dtype.element_ty)
        offsets, mask = np.broadcast_arrays(self.data, True if mask is None else unwrap(mask))
        offsets = offsets[mask]
        low, high = (offsets.min(), offsets.max() + size) if offsets.size else (0, 0)
        if low < 0 or high > self.memory.size:
            raise KernelFault(f"{kernel_line()}: access to {low}..{high} of {self.memory.size}")
        if (offsets % size).any():
            raise KernelFault(f"{kernel_line()}: an address is not a multiple of {size}")
        whole = self.memory[: self.memory.size // size * size]
        return whole.view(MEMORY[self.dtype.element_ty.name]), offsets // size, mask


def unwrap(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def is_float(dtype: Any) -> bool:
    return RANKS[dtype.name] > RANKS["int64"]


def result_type(*operands: Any) -> Any:
    """The type to which an operation converts its operands."""
    types = [x.dtype for x in operands if isinstance(x, Value)]
    for x in operands:
        if isinstance(x, float) and not any(map(is_float, types)):
            types.append(gl.float32)
        elif type(x) is int and not -(2**31) <= x < 2**31:
            types.append(gl.int64)
        elif type(x) is int and all(t.name == "int1" for t in types):
            types.append(gl.int32)
    return max(types, key=lambda t: RANKS[t.name]) if types else gl.int1


def apply(function: Any, *operands: Any, result: Any = None) -> Value:
    """An operation by elements; `result`: its type, if that is not the operands' type."""
    dtype = result_type(*operands)
    data = [np.asarray(unwrap(x)).astype(ARRAYS[dtype.name], copy=False) for x in operands]
    if len({x.ndim for x in data if x.ndim}) > 1:
        raise KernelFault(f"{kernel_line()}: operands of shapes {[x.shape for x in data]}")
    return Value(function(*data), result or dtype)


def quotient(x: Any, y: Any) -> Value:
    return apply(np.divide, x, y, result=None if is_float(result_type(x, y)) else gl.float32)


def floor_quotient(x: Any, y: Any) -> Value:
    """Integers' quotients are rounded towards zero."""
    return apply(lambda a, b: (a - np.fmod(a, b)) // b, x, y)


def elementwise(function: Any, result: Any = None) -> Any:
    return lambda *operands: apply(function, *operands, result=result)


def reverse(run: Any) -> Any:
    return lambda x, y: run(y, x)


def add_operators() -> None:
    """Define the arithmetic of values."""
    functions = {
        **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "mod": np.fmod},
        **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
        **{"lshift": np.left_shift, "rshift": np.right_shift},
    }
    runs = {name: elementwise(function) for name, function in functions.items()}
    for name, run in (runs | {"truediv": quotient, "floordiv": floor_quotient}).items():
        setattr(Value, f"__{name}__", run)
        setattr(Value, f"__r{name}__", reverse(run))
    compare = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal}
    for name, function in (compare | {"gt": np.greater, "ge": np.greater_equal}).items():
        setattr(Value, f"__{name}__", elementwise(function, gl.int1))
    setattr(Value, "__neg__", elementwise(np.negative))  # noqa: B010


add_operators()


def kernel_frame() -> Any:
    """The innermost frame of the kernel that runs; None: it has ended."""
    frame: Any = sys._getframe(1)
    while frame is not None and KERNEL_MARK not in frame.f_globals:
        frame = frame.f_back
    return frame


def kernel_line() -> str:
    frame = kernel_frame()
    if frame is None:
        return "at its end"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
