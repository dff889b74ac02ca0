"""Runs Gluon kernels on the CPU with NumPy, and checks how their partitions synchronise.

    with emulated_launches(Schedule(seed=1)):
        sparse_attention_hopper.attend(problem, plan)

Within the block, a launch of any Gluon kernel runs here, one program after the other. A kernel's
functions run as plain Python with other globals: `Language` stands for gl and for the modules of
Hopper's instructions.

Each partition of gl.warp_specialize is a thread, and one of them runs at a time. Before each access
to shared memory and each operation on an mbarrier or MMA, the schedule chooses which one goes on.
A TMA load or an asynchronous copy (cp.async) is in flight from its issue on. It ends when the
schedule chooses it: then its bytes are in shared memory, and its barrier has received them. Vector
clocks tell which accesses are ordered with any schedule. These raise KernelFault:

- a deadlock, such as a wait for more bytes than TMA loads bring;
- a phase that gets more bytes than it expects;
- an arrival (also async_copy.mbarrier_arrive) or a TMA load that is not ordered after the end of
  its barrier's last phase: with another schedule, it comes in an earlier phase, which then has too
  many of them;
- a wait that comes two phases late, for which the parity is the same;
- two accesses to a byte of shared memory without an order, one of which is a write. An MMA reads
  its operands from its issue to the wait for it. A TMA load is ordered after all that its issue is
  ordered after, and before every wait for its phase. A copy is ordered after its issue in the same
  way, and before a wait for its group or for the phase of the next async_copy.mbarrier_arrive. That
  arrival also publishes what is ordered before the last copy's issue, but not a later store;
- a missing fence_async_shared: after an ordinary store or the wait for a copy, if an MMA reads or a
  TMA load overwrites the bytes; after an ordinary load, if a TMA load of another partition
  overwrites them; after mbarrier.init, if a TMA load signals the barrier. The fence must be ordered
  after the access and before the MMA or the issue of the TMA load. Any partition may execute it:
  the writer before its arrival, or the reader after its wait. The compiler adds some fences within
  a partition;
- a TMA load to memory of another shape, swizzle or alignment, and a TMA load or a copy that no wait
  follows;
- a result of an MMA that did not pass through the wait for it, and an MMA without a wait;
- a read of unwritten shared memory. An MMA's operand may have whole unwritten rows or columns:
  their results are NaN;
- an access outside of a tensor's storage, and one to swizzled memory through a layout without the
  swizzle.

Not modelled: layouts, registers, the threads of a partition (so a missing gl.barrier is not found),
asynchronous stores, clusters, the order of accesses to global memory, early launches, and
time. GEMMs and sums are computed in float64 and rounded once. With `pack` > 1, a register of inline
PTX holds adjacent elements of the last dimension.
"""

import builtins
import linecache
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

import numpy as np
import torch
from tests.support.ptx import run_ptx
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gluon_copies import AsyncCopy, Copies
from .gluon_memory import Allocation, Mma, Shared, row_major, swizzle_bytes
from .gluon_programs import IN_FLIGHT, Barrier, Program, Schedule
from .gluon_tma import Descriptor, TmaLoad
from .gluon_values import (
    ARRAYS,
    KERNEL_MARK,
    MEMORY,
    Pointer,
    Value,
    elementwise,
    from_memory,
    is_float,
    itemsize,
    kernel_frame,
    kernel_line,
    result_type,
    to_memory,
    unwrap,
)


def registers(x: Value, shape: Sequence[int], pack: int) -> list[torch.Tensor]:
    """32-bit registers, int64 here. `pack` adjacent elements of the last dimension share one, or
    several if they need more bits.
    """
    data = np.broadcast_to(to_memory(x.data, x.dtype), shape)
    packed = np.ascontiguousarray(
        data.reshape(*shape[:-1], -1, pack) if pack > 1 else data[..., None]
    )
    words = packed.view(f"u{min(4, packed.itemsize * pack)}")
    return [torch.from_numpy(words[..., i].astype(np.int64)) for i in range(words.shape[-1])]


def from_registers(words: list[torch.Tensor], dtype: Any, pack: int) -> Value:
    size = min(4, itemsize(dtype) * pack)
    packed = np.stack([word.numpy().astype(f"u{size}") for word in words], -1)
    data = packed.view(MEMORY[dtype.name])
    data = data.reshape(*data.shape[:-2], -1) if pack > 1 else data[..., 0]
    return Value(from_memory(data, dtype), dtype)


def inline_asm(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool = True, pack: int = 1
) -> Any:
    types = dtype if isinstance(dtype, tuple) else (dtype,)
    if not args or asm.startswith("prefetch"):
        return Value(0, types[0])  # these instructions change no value
    shape = np.broadcast_shapes(*(arg.shape for arg in args))
    words = run_ptx(asm, *(word for arg in args for word in registers(arg, shape, pack)))
    each = len(words) // len(types)
    values = (
        from_registers(words[i * each : (i + 1) * each], kind, pack) for i, kind in enumerate(types)
    )
    return tuple(values) if isinstance(dtype, tuple) else next(values)


def reduction(function: Any) -> Any:
    def run(x: Any, axis: Any = None, keep_dims: bool = False) -> Value:
        wide = x.data.astype(np.float64) if is_float(x.dtype) else x.data
        return Value(function(wide, axis=axis, keepdims=keep_dims), x.dtype)

    return run


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Value:
    return Value(np.full([int(n) for n in shape], unwrap(value)), dtype)


def where(condition: Any, x: Any, y: Any) -> Value:
    return Value(np.where(unwrap(condition), unwrap(x), unwrap(y)), result_type(x, y))


def assigned_name() -> str:
    """The kernel's variable that gets what is computed, here or in the function that called."""
    frame = kernel_frame()
    while KERNEL_MARK in frame.f_globals:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if "=" in line:
            return line.split("=")[0].rstrip("+ ").strip()
        frame = frame.f_back
    return "memory"


def checked(condition: Any, message: str = "") -> None:
    assert condition, message


# Functions of gl that need no program.
FUNCTIONS: dict[str, Any] = {
    "static_range": range,
    "arange": lambda start, end, layout=None: Value(np.arange(int(start), int(end)), gl.int32),
    "full": full,
    "where": where,
    "broadcast": lambda x, y: tuple(
        value.like(data)
        for value, data in zip((x, y), np.broadcast_arrays(x.data, y.data), strict=True)
    ),
    "multiple_of": lambda x, size: x,
    "static_assert": checked,
    "cdiv": lambda x, y: (x + y - 1) // y,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "expand_dims": lambda x, axis: x.like(np.expand_dims(x.data, axis)),
    "reshape": lambda x, shape: x.like(x.data.reshape([int(n) for n in shape])),
    "permute": lambda x, order: x.like(x.data.transpose(order)),
    "join": lambda x, y: x.like(np.stack((x.data, y.data), -1)),
    "split": lambda x: (x.like(x.data[..., 0]), x.like(x.data[..., 1])),
    "sum": reduction(np.sum),
    "max": reduction(np.max),
    "maximum": elementwise(np.maximum),
    "minimum": elementwise(np.minimum),
    "abs": elementwise(np.abs),
    "exp2": elementwise(np.exp2),
    "rsqrt": elementwise(lambda x: 1 / np.sqrt(x)),
    "inline_asm_elementwise": inline_asm,
    "reinterpret": Shared.reinterpret,
    "_reinterpret": Shared.reinterpret,
}


class Language:
    """Stands for the modules that a kernel calls: gl, gl.nvidia.hopper, and its modules.

    One object stands for all of them, because only async_copy_global_to_shared has a name twice.
    """

    program: Program
    skipped_fences: tuple[str, ...] = ()

    def __init__(self, grid: tuple[int, ...]) -> None:
        self.grid = grid
        self.functions: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name in FUNCTIONS:
            return FUNCTIONS[name]
        if name in ("nvidia", "ampere", "hopper", "mbarrier", "tma", "async_copy"):
            return self
        if name in ("NVMMASharedLayout", "SwizzledSharedLayout"):
            return getattr(gl, name)
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

    # Shared memory and mbarriers.

    def allocate_shared_memory(
        self, dtype: Any, shape: Any, layout: Any = None, value: Value | None = None
    ) -> Shared:
        name = assigned_name()
        self.program.names[name] += 1
        if self.program.names[name] > 1:
            name += f" ({self.program.names[name]})"
        shape = tuple(int(n) for n in shape)
        strides = row_major(shape, itemsize(dtype))
        memory = Allocation(name, shape[0] * strides[0])
        shared = Shared(self.program, memory, dtype, 0, shape, strides, swizzle_bytes(layout))
        if value is not None:
            shared.store(value)
        return shared

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

    def expect(self, memory: Shared, num_bytes: Any, pred: Any = True) -> None:
        if pred:
            self.barrier_of(memory).arrive(1, int(num_bytes))

    def wait(self, memory: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if pred:
            self.barrier_of(memory).wait(int(phase))

    def fence_async_shared(self, *args: Any, **options: Any) -> None:
        me = self.program.current
        if kernel_line() not in self.skipped_fences:
            me.clock.times[1] = me.clock.times[0]

    def async_load(
        self, desc: Descriptor, coord: Any, barrier: Shared, result: Shared, pred: Any = True
    ) -> None:
        self.program.event()
        if pred:
            load = TmaLoad(desc, [*map(int, coord)], self.barrier_of(barrier), result)
            self.program.loads.append(load)

    def async_copy_global_to_shared(self, *args: Any, **options: Any) -> None:
        """The function of async_copy, or that of tma, which newer versions call async_load."""
        is_tma = args and isinstance(args[0], Descriptor)
        (self.async_load if is_tma else self.copy_to_shared)(*args, **options)

    # Asynchronous copies by threads.

    def copy_to_shared(self, smem: Shared, pointer: Any, mask: Any = None, **options: Any) -> None:
        self.program.event()
        copy = AsyncCopy(Copies.of(self.program.current), smem, pointer, mask)
        self.program.loads.append(copy)

    def mbarrier_arrive(self, mbarrier: Shared, increment_count: bool = True) -> None:
        if increment_count:
            raise NotImplementedError("async_copy.mbarrier_arrive needs increment_count=False here")
        self.program.event()
        Copies.of(self.program.current).arrive(self.barrier_of(mbarrier))

    def commit_group(self) -> None:
        copies = Copies.of(self.program.current)
        copies.groups.append(copies.num_issued)

    def wait_group(self, num_outstanding: Any = 0) -> None:
        Copies.of(self.program.current).wait_group(int(num_outstanding))

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
        for operand, inner in mma.shared:
            operand.check_operand(inner)
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
            for operand, _ in mma.shared:
                operand.mark_read(time, ended=True)
        for mma in me.pending:
            for operand, _ in mma.shared:
                operand.mark_read(IN_FLIGHT)
        pending = [*map(id, me.pending)]
        results = tuple(
            x.result if isinstance(x, Mma) and id(x) not in pending else x for x in deps
        )
        return results[0] if len(results) == 1 else results


# --- Launches -------------------------------------------------------------------------------------


OPTIONS = {"num_warps", "maxnreg", "launch_pdl"}  # of a launch


def argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    if isinstance(x, TensorDescriptor):
        return Descriptor(x)
    return Value(x, result_type(x)) if isinstance(x, int | float) else x


def launch(
    kernel: Any, grid: Sequence[int], schedule: Schedule, args: Any, named: dict[str, Any]
) -> None:
    constexprs = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
    given = dict(zip(list(constexprs)[: len(args)], args, strict=True)) | named
    unknown = given.keys() - constexprs.keys() - OPTIONS
    assert not unknown, f"the kernel has no parameters {unknown}"
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
        language.program.end()


@contextmanager
def emulated_launches(schedule: Schedule | None = None) -> Iterator[None]:
    """Within the block, launches of Gluon kernels run here."""
    chosen = schedule or Schedule()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch(self, grid, chosen, args, named)

    with patch.object(GluonJITFunction, "run", run):
        yield


def fences(*modules: ModuleType) -> list[str]:
    """The lines of fence_async_shared in kernels, such as "experts_hopper_few.py:101"."""
    paths = [Path(str(module.__file__)) for module in modules]
    return [
        f"{path.name}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.strip().startswith("fence_async_shared()")
    ]


@contextmanager
def without_fences(*lines: str) -> Iterator[None]:
    """Within the block, the fences of these lines do nothing."""
    with patch.object(Language, "skipped_fences", lines):
        yield
