"""Records Triton's kernel launches without running them, and counts compilations.

Triton has no hook for recording a launch, so `intercept_launches` temporarily replaces its launch
method. The launches of the calling thread then go to a visitor instead of the GPU.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.runtime.jit import JITFunction

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel, compiled for one launch signature.

    Attributes:
        module, name: the module and the name of the kernel's function.
        specialization: Triton's description of the variant, for `JITFunction.preload`.
    """

    module: str
    name: str
    specialization: str


_NOT_COMPILED = object()


@contextmanager
def intercept_launches(
    visit: Callable[..., Any], others: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Pass the launches of the calling thread to `visit`.

    Args:
        visit: is called with the kernel and a function that compiles or loads its variant without
            launching it.
        others: a context manager that surrounds each launch of another thread, such as a lock.
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
    """List the variants that `launch_all` launches and that this process has not loaded.

    Nothing is compiled or launched. Launches of other threads wait until this returns, which takes
    a second or two.
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
        # A second launch of this variant finds the placeholder, so the hook is not called again.
        kernels = kernel.device_caches[compile["device"]][0]
        kernels[key] = _NOT_COMPILED
        noted.append((kernels, key))
        return True  # Triton then skips the compilation.

    with intercept_launches(lambda kernel, run: run(), others=busy), busy:
        knobs.runtime.jit_cache_hook = note
        try:
            launch_all()
        finally:
            knobs.runtime.jit_cache_hook = before
            for kernels, key in noted:
                del kernels[key]
    return found


def load(launch_all: Callable[[], None]) -> int:
    """Compile or load every variant that `launch_all` launches; returns their number.

    As a first launch would, this loads each variant onto the device and creates its launcher.
    """
    loaded: set[int] = set()

    def visit(kernel: Any, run: Callable[[], Any]) -> None:
        compiled = run()
        if compiled is not None and id(compiled) not in loaded:
            loaded.add(id(compiled))
            _ = compiled.run

    with intercept_launches(visit):
        launch_all()
    return len(loaded)


class Counter:
    """Counts the kernels that Triton compiles or loads in this process.

    Attributes:
        compiled: number of kernels that were compiled.
        late: number of kernels that were compiled, or loaded from Triton's cache, by a launch that
            waited for them, because they were not built ahead.
        warns: whether each late kernel is logged.
    """

    def __init__(self) -> None:
        self.compiled = 0
        self.late = 0
        self.warns = False
        me = weakref.ref(self)
        before, heard = knobs.runtime.jit_post_compile_hook, knobs.compilation.listener

        def note(*args: Any, **kwargs: Any) -> Any:
            counter = me()
            if counter is not None and not kwargs["is_manual_warmup"]:
                counter.late += 1
                if counter.warns:
                    text = "a step waited until the kernel %s was compiled or loaded"
                    logger.warning(text, kwargs["fn"].name)
            return before(*args, **kwargs) if before is not None else None

        def listen(*args: Any, **kwargs: Any) -> None:
            counter = me()
            if counter is not None and not kwargs.get("cache_hit", False):
                counter.compiled += 1
            if heard is not None:
                heard(*args, **kwargs)

        knobs.runtime.jit_post_compile_hook = note
        knobs.compilation.listener = listen
