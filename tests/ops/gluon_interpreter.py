"""Runs Gluon kernels on the CPU with NumPy, and checks how their partitions synchronise.

    with emulated_launches(Schedule(seed=1)):
        sparse_attention_hopper.attend(problem, plan)

Within the block, a launch of any Gluon kernel runs here, one program after the other. A kernel's
functions run as plain Python with other globals: `Language` stands for gl and for the modules of
Hopper's instructions.

Each partition of gl.warp_specialize is a thread, and one of them runs at a time. Before each access
to shared memory and each operation on an mbarrier or MMA, the schedule chooses which one goes on.
Vector clocks tell which accesses are ordered with any schedule. These raise KernelFault:

- a deadlock;
- an arrival that is not ordered after the end of its barrier's last phase: with another schedule,
  it comes in an earlier phase, which then has too many arrivals;
- a wait that misses its phase: a wait knows only the phase's parity;
- two accesses to a byte of shared memory without an order, one of which is a write. An MMA reads
  its operands from its issue to the wait for it;
- an MMA that reads stored bytes without a fence_async_shared by the writer between the store and
  the arrival that publishes it (or the MMA itself);
- a result of an MMA that did not pass through the wait for it, and an MMA without a wait;
- a read of shared memory before a write, and an access outside of a tensor.

Not modelled: layouts, swizzles, registers, the threads of a partition, asynchronous copies, order
of accesses to global memory, and time. GEMMs and sums are computed in float64 and rounded once.
"""

import builtins
import linecache
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from tests.support.ptx import run_ptx
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction

from .gluon_programs import IN_FLIGHT, Allocation, Barrier, Mma, Program, Schedule, Shared
from .gluon_values import (
    ARRAYS,
    KERNEL_MARK,
    Pointer,
    Value,
    elementwise,
    from_memory,
    is_float,
    itemsize,
    kernel_frame,
    result_type,
    to_memory,
    unwrap,
)


def pair_of_bfloat16(high: Any, low: Any) -> Value:
    both = np.stack(np.broadcast_arrays(low.data, high.data), -1)
    return Value(to_memory(both, gl.bfloat16).view(np.int32)[..., 0], gl.int32)


def inline_asm(asm: str, constraints: str, args: Any, **options: Any) -> Any:
    if asm.startswith("cvt.rn.bf16x2.f32"):
        return pair_of_bfloat16(*args)
    if not args or asm.startswith("prefetch"):
        return Value(0, gl.int32)  # these instructions change no value
    arrays = np.broadcast_arrays(*(arg.data for arg in args))
    words = run_ptx(asm, *(torch.from_numpy(x.astype(np.int64) & 0xFFFFFFFF) for x in arrays))
    return tuple(Value(word.numpy().astype(np.uint32).view(np.int32), gl.int32) for word in words)


def reduction(function: Any) -> Any:
    def run(x: Any, axis: Any = None, keep_dims: bool = False) -> Value:
        wide = x.data.astype(np.float64) if is_float(x.dtype) else x.data
        return Value(function(wide, axis=axis, keepdims=keep_dims), x.dtype)

    return run


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(np.full([int(n) for n in shape], unwrap(value)), dtype)


def where(condition: Any, x: Any, y: Any) -> Value:
    return Value(np.where(unwrap(condition), unwrap(x), unwrap(y)), result_type(x, y))


# Functions of gl that need no program.
FUNCTIONS: dict[str, Any] = {
    "constexpr": lambda x: x,
    "static_range": range,
    "arange": lambda start, end, layout=None: Value(np.arange(int(start), int(end)), gl.int32),
    "full": full,
    "zeros": lambda shape, dtype, layout=None: full(shape, 0, dtype),
    "where": where,
    "cdiv": lambda x, y: (x + y - 1) // y,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "expand_dims": lambda x, axis: x.like(np.expand_dims(x.data, axis)),
    "reshape": lambda x, shape: x.like(x.data.reshape([int(n) for n in shape])),
    "permute": lambda x, order: x.like(x.data.transpose(order)),
    "join": lambda x, y: x.like(np.stack((x.data, y.data), -1)),
    "split": lambda x: (x.like(x.data[..., 0]), x.like(x.data[..., 1])),
    "sum": reduction(np.sum),
    "max": reduction(np.max),
    "min": reduction(np.min),
    "maximum": elementwise(np.maximum),
    "minimum": elementwise(np.minimum),
    "abs": elementwise(np.abs),
    "exp2": elementwise(np.exp2),
    "log2": elementwise(np.log2),
    "rsqrt": elementwise(lambda x: 1 / np.sqrt(x)),
    "fma": elementwise(lambda x, y, z: x * y + z),
    "inline_asm_elementwise": inline_asm,
    "reinterpret": Shared.reinterpret,
    "_reinterpret": Shared.reinterpret,
}


class Language:
    """What a kernel calls: gl, and the functions of gl.nvidia.hopper and of its mbarrier module.

    One object stands for all modules, because no two functions have the same name.
    """

    program: Program

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid = grid
        self.functions: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        if name in ("nvidia", "hopper", "mbarrier"):
            return self
        if name.endswith("Layout"):
            return lambda *args, **options: None
        if name == "pointer_type" or isinstance(getattr(gl, name, None), gl.dtype):
            return getattr(gl, name)

        def missing(*args: Any, **options: Any) -> NoReturn:
            raise NotImplementedError(f"gluon_interpreter.py has no {name}")

        return missing

    # A kernel's functions and their globals.

    def function(self, fn: Any) -> Any:
        """A copy of a kernel's function whose globals are emulated."""
        if fn not in self.functions:
            scope: dict[str, Any] = {"__builtins__": builtins, "range": self.range}
            scope[KERNEL_MARK] = True
            defaults = fn.__defaults__ and tuple(map(self.emulated, fn.__defaults__))
            made = FunctionType(fn.__code__, scope, fn.__name__, defaults, fn.__closure__)
            self.functions[fn] = made
            for name in self.names(fn.__code__) & fn.__globals__.keys():
                scope[name] = self.emulated(fn.__globals__[name])
        return self.functions[fn]

    def names(self, code: CodeType) -> set[str]:
        inner = (part for part in code.co_consts if isinstance(part, CodeType))
        return set(code.co_names).union(*map(self.names, inner))

    def emulated(self, x: Any) -> Any:
        """What stands for a global: of Triton, of a kernel, or another one, which stays."""
        if isinstance(x, gl.constexpr):
            return x.value
        if isinstance(x, ModuleType):
            return self if x.__name__.startswith("triton.") else x
        if (getattr(x, "__module__", None) or "").startswith("triton."):
            return x if isinstance(x, gl.dtype) else getattr(self, x.__name__)
        return self.function(x.fn) if hasattr(x, "fn") else x

    # The program and its partitions.

    def range(self, *limits: Any) -> Iterator[Value]:
        return (Value(i, result_type(*limits)) for i in range(*map(int, limits)))

    def program_id(self, axis: int) -> Value:
        return Value(self.program.ids[axis], gl.int32)

    def num_programs(self, axis: int) -> Value:
        return Value(self.grid[axis], gl.int32)

    def num_warps(self) -> int:
        return self.program.current.warps

    def warp_specialize(self, work: Any, worker_warps: Any, worker_registers: Any = None) -> None:
        self.program.specialise(work, worker_warps)

    def barrier(self, *args: Any) -> None:
        self.program.event()

    thread_barrier = barrier

    # Global memory.

    def load(self, pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Value:
        """Elements that the mask leaves out are garbage without `other`."""
        memory, numbers, mask = pointer.elements(mask)
        dtype = pointer.dtype.element_ty
        garbage = np.nan if is_float(dtype) else 85
        data = np.empty(mask.shape, ARRAYS[dtype.name])
        data[...] = garbage if other is None else unwrap(other)
        data[mask] = from_memory(memory[numbers], dtype)
        return Value(data, dtype)

    def store(self, pointer: Any, value: Any, mask: Any = None, **options: Any) -> None:
        memory, numbers, mask = pointer.elements(mask)
        data = np.broadcast_to(unwrap(value), mask.shape)[mask]
        memory[numbers] = to_memory(data, pointer.dtype.element_ty)

    # Shared memory and mbarriers, which have the name of the kernel's variable.

    def allocate_shared_memory(self, dtype: Any, shape: Any, layout: Any = None) -> Shared:
        frame = kernel_frame()
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        name = line.split("=")[0].strip() if "=" in line else "memory"
        self.program.names[name] += 1
        if self.program.names[name] > 1:
            name += f" ({self.program.names[name]})"
        shape = [int(n) for n in shape]
        sizes = [itemsize(dtype) * int(np.prod(shape[i:])) for i in range(len(shape) + 1)]
        return Shared(self.program, Allocation(name, sizes[0]), dtype, 0, shape, sizes[1:])

    def name_of(self, memory: Shared) -> str:
        return f"{memory.memory.name}[{memory.offset // 8}]"

    def barrier_of(self, memory: Shared) -> Barrier:
        name = self.name_of(memory)
        if name not in self.program.barriers:
            self.program.fault(f"{name} is used before mbarrier.init")
        return self.program.barriers[name]

    def init(self, memory: Shared, count: Any) -> None:
        name = self.name_of(memory)
        if name in self.program.barriers:
            self.program.fault(f"{name} has a second mbarrier.init")
        self.program.barriers[name] = Barrier(self.program, name, int(count))

    def arrive(self, memory: Shared, *, count: Any = 1, pred: Any = True) -> None:
        if pred:
            self.barrier_of(memory).arrive(int(count))

    def wait(self, memory: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if pred:
            self.barrier_of(memory).wait(int(phase))

    def fence_async_shared(self, *args: Any, **options: Any) -> None:
        me = self.program.current
        me.known.times[1, me.number] = me.known.times[0, me.number]

    # MMAs.

    def warpgroup_mma(
        self,
        a: Any,
        b: Any,
        acc: Any,
        *,
        use_acc: Any = True,
        is_async: bool = False,
        **options: Any,
    ) -> Any:
        self.program.event()
        if a.shape[1] != b.shape[0] or acc.shape != (a.shape[0], b.shape[1]):
            self.program.fault(f"warpgroup_mma of shapes {a.shape}, {b.shape} and {acc.shape}")
        me = self.program.current
        mma = Mma(me, a, b, acc, bool(use_acc))
        for operand in mma.shared:
            operand.check_read(by_mma=True)
            operand.mark_read(IN_FLIGHT)
        me.pending.append(mma)
        return mma if is_async else self.warpgroup_mma_wait(0, [mma])

    def warpgroup_mma_wait(self, num_outstanding: Any = 0, deps: Any = ()) -> Any:
        self.program.event()
        me = self.program.current
        time = me.tick()
        while len(me.pending) > int(num_outstanding):
            mma = me.pending.pop(0)
            mma.compute()
            for operand in mma.shared:
                operand.mark_read(time, ended=True)
        for mma in me.pending:
            for operand in mma.shared:
                operand.mark_read(IN_FLIGHT)
        pending = [*map(id, me.pending)]
        results = tuple(
            x.result if isinstance(x, Mma) and id(x) not in pending else x for x in deps
        )
        return results[0] if len(results) == 1 else results


# --- Launches -------------------------------------------------------------------------------------


def argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    return Value(x, result_type(x)) if isinstance(x, int | float) else x


def launch(
    kernel: Any, grid: Sequence[int], schedule: Schedule, args: Any, named: dict[str, Any]
) -> None:
    constexprs = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
    given = dict(zip(constexprs, args, strict=False)) | named
    num_warps = given.get("num_warps", 4)
    values = {
        name: given[name] if is_constexpr else argument(given[name])
        for name, is_constexpr in constexprs.items()
        if name in given
    }
    language = Language(tuple(map(int, (*grid, 1, 1)[:3])))
    function = language.function(kernel.fn)
    for ids in product(*map(range, language.grid)):
        language.program = Program(ids, schedule, num_warps)
        with np.errstate(all="ignore"):
            function(**values)
        language.program.current.end()


@contextmanager
def emulated_launches(schedule: Schedule | None = None) -> Iterator[None]:
    """Within the block, launches of Gluon kernels run here."""
    chosen = schedule or Schedule()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch(self, grid, chosen, args, named)

    GluonJITFunction.run = run  # hides JITFunction.run
    try:
        yield
    finally:
        del GluonJITFunction.run
