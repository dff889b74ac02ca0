"""Repairs of Triton's interpreter (3.6 to 3.9) on a CPU: bfloat16, float8 and autotuning.

As it comes, the interpreter computes with the bit patterns of bfloat16, truncates float32 to it,
loses carries into E4M3, leaves the order of a product's sums to BLAS and refuses several autotune
configurations. Here storage stays as it is (the interpreter's load and store need it); arithmetic
goes through float32, products through float64, and casts down round to nearest even, as a GPU does.
What takes it most of its time is made faster or left out: calls of functions, reductions, checks of
integers for overflow, descriptions of types and shapes, the conversion of operands.
To be imported before a kernel runs.
"""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("these repairs are for a process that was started with TRITON_INTERPRET=1")

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.runtime.autotuner import Autotuner

TORCH_TYPES = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Handle = interpreter.TensorHandle
convert_as_it_comes = interpreter._convert_float


def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    source, target = source.scalar, target.scalar
    truncates = rounding is not None and rounding == interpreter._ir.ROUNDING_MODE.RTZ
    if source not in TORCH_TYPES or target not in TORCH_TYPES or truncates:
        return convert_as_it_comes(values, source, target, rounding)
    array = np.ascontiguousarray(values)
    size = array.dtype.itemsize
    bits = array.view(f"i{size}" if size > 1 else "u1").copy()
    x = torch.from_numpy(bits).view(TORCH_TYPES[source]).to(torch.float32)
    if target in LARGEST:  # a GPU's cast saturates finite values
        limit = LARGEST[target]
        x = torch.where(x.isnan(), x, x.clamp(-limit, limit))
    y = x.to(TORCH_TYPES[target])
    unsigned = y.view(INTEGERS[y.element_size()]).numpy().view(f"u{y.element_size()}")
    return unsigned.reshape(np.shape(values))


def up(handle: Any) -> tuple[Any, bool]:
    """A bfloat16 handle as float32, and whether it was one."""
    if not isinstance(handle, Handle) or handle.dtype.scalar != tl.bfloat16:
        return handle, False
    if handle.data.dtype != np.uint16:
        return handle, False
    data = convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return Handle(data, tl.float32), True


def down(handle: Any) -> Any:
    data = convert_float(handle.data.astype(np.float32), tl.float32, tl.bfloat16, None)
    return Handle(data.view(np.uint16), tl.bfloat16)


def through_float32(operation: Any) -> Any:
    def run(self: Any, *args: Any) -> Any:
        for x in args:
            if type(x) is Handle and x.dtype.scalar.name == "bf16":
                break
        else:
            return operation(self, *args)
        raised = [up(arg) for arg in args]
        result = operation(self, *(arg for arg, _ in raised))
        was_bfloat16 = any(was for _, was in raised)
        if was_bfloat16 and isinstance(result, Handle) and result.data.dtype == np.float32:
            return down(result)
        return result

    return run


def cast(as_it_comes: Any) -> Any:
    def run(self: Any, source: Any, target: Any) -> Any:
        old, new = source.dtype.scalar, target.scalar
        if old == new or tl.bfloat16 not in (old, new):
            return as_it_comes(self, source, target)
        x = up(source)[0]
        if new == tl.bfloat16:
            return down(x)
        return Handle(x.data.astype(interpreter._get_np_dtype(target)), new)

    return run


def wide(operand: Any) -> Any:
    """A product's operand in float64; float8 is stored as its bits."""
    if operand.dtype.scalar in LARGEST:
        data = convert_float(operand.data, operand.dtype, tl.float32, None).view(np.float32)
        return data.astype(np.float64)
    return up(operand)[0].data.astype(np.float64)


def dot(_: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """In float64, then rounded once: as on a GPU, and unlike in a BLAS library, a row's bits do not
    depend on where in the tile it lies.
    """
    product = np.matmul(wide(a), wide(b))
    return Handle((product + total.data).astype(total.data.dtype), total.dtype.scalar)


def reduction(as_it_comes: Any) -> Any:
    """Reductions and scans take bfloat16 as float32."""

    def back(self: Any, x: Any) -> Any:
        if x.dtype.scalar != tl.float32:
            return x
        data = down(x.handle).data
        return self.to_tensor(data if x.type.is_block() else data.reshape(-1)[0], tl.bfloat16)

    def run(self: Any, inputs: Any) -> Any:
        if not any(isinstance(t, tl.tensor) and t.dtype.scalar == tl.bfloat16 for t in inputs):
            return as_it_comes(self, inputs)
        raised = tuple(
            self.to_tensor(up(t.handle)[0].data, tl.float32) if t.dtype.scalar == tl.bfloat16 else t
            for t in inputs
        )
        result = as_it_comes(self, raised)
        if isinstance(result, tl.tensor):
            return back(self, result)
        return tuple(back(self, x) for x in result)

    return run


def reduce_by_pairs(self: Any, inputs: Any) -> Any:
    """By any function: neighbours with each other, all of them at once, until one is left. As it
    comes, value by value.
    """
    assert self.axis is not None or len(inputs) == 1, "Triton flattens the first alone"
    shape = inputs[0].handle.data.shape
    parts, axis = self.unravel(inputs, self.axis)
    arrays = [np.moveaxis(part.handle.data, axis, 0) for part in parts]
    assert len(arrays[0]).bit_count() == 1
    while len(arrays[0]) > 1:
        even, odd = (
            [self.to_tensor(a[first::2], p.dtype) for a, p in zip(arrays, parts, strict=True)]
            for first in (0, 1)
        )
        result = self.combine_fn.fn(*even, *odd)
        arrays = [t.handle.data for t in (result if isinstance(result, tuple) else (result,))]
    if self.axis is None:
        shape = (1,) * len(shape) if self.keep_dims else ()
    else:
        shape = (*shape[:axis], *[1] * self.keep_dims, *shape[axis + 1 :])
    return [
        self.to_tensor(a.reshape(shape) if shape else a.item(), p.dtype)
        for a, p in zip(arrays, parts, strict=True)
    ]


def numpy_type(as_it_comes: Any) -> Any:
    """As it comes, every call makes a table of all types."""
    known: dict[str, Any] = {}

    def run(kind: Any) -> Any:
        scalar = kind.scalar
        found = known.get(scalar.name)
        if found is None:
            found = known[scalar.name] = as_it_comes(scalar)
        return found

    return run


def make_block_type(as_it_comes: Any) -> Any:
    """Take what a type has from the first one of its shape: nothing changes it."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def run(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [s.value if isinstance(s, tl.constexpr) else s for s in shape]
        key = element_ty.name, *sizes
        if key in known:
            self.__dict__.update(known[key], element_ty=element_ty)
            return
        as_it_comes(self, element_ty, shape)
        known[key] = self.__dict__.copy()

    return run


def make_tensor(as_it_comes: Any) -> Any:
    """Take a tensor's shape from the first tensor of its type."""
    known: dict[str, dict[str, Any]] = {}

    def run(self: Any, handle: Any, type: Any) -> None:
        if type.name in known:
            self.__dict__.update(known[type.name], handle=handle, type=type, dtype=type.scalar)
            return
        as_it_comes(self, handle, type)
        known[type.name] = self.__dict__ | {"handle": None}

    return run


def broadcast(as_it_comes: Any) -> Any:
    """Two blocks of one shape stay as they are, and so do two scalars."""

    def run(self: Any, x: Any, y: Any) -> Any:
        if x.type.is_block() is y.type.is_block() and x.handle.data.shape == y.handle.data.shape:
            return x, y
        return as_it_comes(self, x, y)

    return run


def check_operands(as_it_comes: Any) -> Any:
    """Operands of one type stay as they are, but for a quotient of narrow floats and pointers.
    A number becomes the tensor that it became beside the last operand of this type.
    """
    known: dict[tuple[Any, ...], Any] = {}

    def constant(self: Any, number: Any, x: Any, args: tuple[Any, ...], place: int) -> Any:
        key = number, type(number), x.type.name, args, place
        if key not in known:
            operands = as_it_comes(self, *((x, number) if place else (number, x)), *args)
            if operands[1 - place] is not x or x.handle.data.size > 4096:
                return operands
            operands[place].handle.data.flags.writeable = False
            if len(known) > 1000:
                known.clear()
            known[key] = operands[place]
        return (x, known[key]) if place else (known[key], x)

    def run(self: Any, x: Any, y: Any, *args: Any, **options: Any) -> Any:
        tensors = type(x) is tl.tensor, type(y) is tl.tensor
        if options or not any(tensors):
            return as_it_comes(self, x, y, *args, **options)
        if not tensors[1] and type(y) in (int, float):
            return constant(self, y, x, args, 1)
        if not tensors[0] and type(x) in (int, float):
            return constant(self, x, y, args, 0)
        if (
            all(tensors)
            and x.type.name == y.type.name
            and (x.dtype.name == "fp32" or (len(args) < 4 and not x.dtype.is_ptr()))
        ):
            return x, y
        return as_it_comes(self, x, y, *args)

    return run


def unwrap(as_it_comes: Any) -> Any:
    """What is nothing else first: as it comes, all other types are tried."""
    plain = {tl.tensor, int, float, bool}
    return lambda x: x if type(x) in plain else as_it_comes(x)


def call_builtin(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """As it comes, each call copies its arguments twice."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, run)


def with_mask(as_it_comes: Any, place: int) -> Any:
    """A mask with a scalar condition is int32, which Triton 3.9 refuses."""

    def run(*args: Any) -> Any:
        return as_it_comes(*args[:place], np.asarray(args[place], bool), *args[place + 1 :])

    return run


def equal_types(as_it_comes: Any) -> Any:
    return lambda self, other: self is other or as_it_comes(self, other)


def first_config(run_tuned: Any) -> Any:
    """There is nothing to time: the first configuration that is not pruned."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            self.configs = self.prune_configs(kwargs)[:1]
            self.nargs = None
        return run_tuned(self, *args, **kwargs)

    return run


def call_device_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As it comes, every call replaces the whole language once more, which takes most of the time:
    its kernel has replaced it.
    """
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as e:
        raise interpreter.InterpreterError(repr(e)) from e


def patch_whole_language(patch: Any) -> Any:
    """For the functions of Triton's own library too, which see it by another name."""
    whole = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    return lambda kernel: patch(whole)


def repair() -> None:
    builder = interpreter.InterpreterBuilder
    # Each integer sum and product is computed twice otherwise, a third of the time;
    # test_index_arithmetic.py looks for overflows.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter._patch_lang = patch_whole_language(interpreter._patch_lang)
    interpreter.InterpretedFunction.__call__ = call_device_function
    interpreter._convert_float = convert_float
    interpreter._get_np_dtype = numpy_type(interpreter._get_np_dtype)
    tl.block_type.__init__ = make_block_type(tl.block_type.__init__)
    tl.tensor.__init__ = make_tensor(tl.tensor.__init__)
    tl.dtype.__eq__ = equal_types(tl.dtype.__eq__)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = broadcast(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = check_operands(semantic.binary_op_type_checking_impl)
    interpreter._patch_attr = call_builtin
    tl.core._unwrap_if_constexpr = unwrap(tl.core._unwrap_if_constexpr)
    for name in ("binary_op", "ternary_op", "unary_op"):
        setattr(builder, name, through_float32(getattr(builder, name)))
    builder.cast_impl = cast(builder.cast_impl)
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(builder, f"create_{name}", lambda self, x, to: self.cast_impl(x, to))
    builder.create_dot = dot
    memory = interpreter._interpreter
    for name, place in (("load", 1), ("store", 2), ("atomic_rmw", 3)):
        setattr(memory, name, with_mask(getattr(memory, name), place))
    interpreter.ReduceOps.generic_reduce = reduce_by_pairs
    for operations in (interpreter.ReduceOps, interpreter.ScanOps):
        operations.apply_impl = reduction(operations.apply_impl)
    Autotuner.run = first_config(Autotuner.run)


repair()
