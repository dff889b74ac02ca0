"""Triton's launches, seen without being launched, and counted.

Within `watching` the calling thread's launches go to a visitor instead of the GPU; those of other
threads go on, or wait. Triton has no hook for that, so its launch method is wrapped for the while.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.runtime.jit import JITFunction


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel as one launch specialises it.

    Attributes:
        module, name: where the kernel is found.
        specialization: Triton's own description of the variant, for `JITFunction.preload`.
    """

    module: str
    name: str
    specialization: str


_NOT_COMPILED = object()


@contextmanager
def watching(
    visit: Callable[..., Any], others: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """visit(kernel, run): `run()` compiles or loads the variant and launches nothing.

    others: what other threads' launches are in; None: nothing.
    """
    launch, owner = JITFunction.run, threading.get_ident()

    def run(self, *args, grid, warmup, **kwargs):
        if threading.get_ident() != owner:
            with others or nullcontext():
                return launch(self, *args, grid=grid, warmup=warmup, **kwargs)
        return visit(self, lambda: launch(self, *args, grid=grid, warmup=True, **kwargs))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def collect(launch_all: Callable[[], None]) -> list[Variant]:
    """The variants that `launch_all` launches and this process has not loaded; compiles nothing.

    Other threads' launches wait meanwhile: it takes a second or two.
    """
    found: list[Variant] = []
    noted: list[tuple[dict[str, Any], str]] = []
    owner, busy = threading.get_ident(), threading.Lock()
    before = knobs.runtime.jit_cache_hook

    def note(*, key, fn, compile, **more):
        if threading.get_ident() != owner:
            return bool(before and before(key=key, fn=fn, compile=compile, **more))
        kernel = fn.jit_function
        found.append(Variant(fn.module, kernel.fn.__qualname__, compile["specialization_data"]))
        # Launches of the same variant find this in the kernel's place, and ask no more.
        kernels = kernel.device_caches[compile["device"]][0]
        kernels[key] = _NOT_COMPILED
        noted.append((kernels, key))
        return True  # what Triton takes for "somebody else compiles it"

    with watching(lambda kernel, run: run(), others=busy), busy:
        knobs.runtime.jit_cache_hook = note
        try:
            launch_all()
        finally:
            knobs.runtime.jit_cache_hook = before
            for kernels, key in noted:
                del kernels[key]
    return found


def load(launch_all: Callable[[], None]) -> int:
    """Compile or load every variant that `launch_all` launches; returns how many there are.

    Each is loaded onto the device, and its launcher is made, as its first launch would.
    """
    loaded: set[int] = set()

    def visit(kernel: Any, run: Callable[[], Any]) -> None:
        compiled = run()
        if compiled is not None and id(compiled) not in loaded:
            loaded.add(id(compiled))
            _ = compiled.run

    with watching(visit):
        launch_all()
    return len(loaded)


class Counter:
    """Kernels that Triton has compiled, or loaded from its cache, in this process."""

    def __init__(self) -> None:
        self.total = 0
        self.compiled = 0
        me = weakref.ref(self)
        before, heard = knobs.runtime.jit_post_compile_hook, knobs.compilation.listener

        def note(*args: Any, **kwargs: Any) -> Any:
            counter = me()
            if counter is not None:
                counter.total += 1
            return before(*args, **kwargs) if before is not None else None

        def listen(*args: Any, **kwargs: Any) -> None:
            counter = me()
            if counter is not None and not kwargs.get("cache_hit", False):
                counter.compiled += 1
            if heard is not None:
                heard(*args, **kwargs)

        knobs.runtime.jit_post_compile_hook = note
        knobs.compilation.listener = listen
