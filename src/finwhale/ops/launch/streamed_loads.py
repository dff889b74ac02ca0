"""TMA loads of weights that leave the rest of the L2 cache alone.

A step of few tokens reads each weight once, and a layer's weights are several times as large as the
L2 cache. Loaded as usual, they displace all that the next layers read again: the code of the
kernels, page tables, activations. `tl.load` takes an eviction policy for that, but Gluon's TMA
loads take none. So a kernel calls `stream_tma_loads`, which leaves a mark in its PTX, and a hook of
Triton's compiler gives the policy to every TMA load of a kernel with the mark. Without the hook,
the kernel computes the same bits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MARK = "// streamed TMA loads"
KEY = "finwhale streamed loads 1"
# With the predicate of the instruction in `when`, and its operands.
_LOAD = re.compile(
    r"(?P<when>@!?%\w+ )?"
    r"(?P<load>cp\.async\.bulk\.tensor\S*complete_tx::bytes)"
    r"(?P<operands>\s[^;]*);"
)
_STREAMED = (
    r"{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0; "
    r"\g<when>\g<load>.L2::cache_hint\g<operands>, policy; }"
)


@gluon.jit
def stream_tma_loads():
    """Give all TMA loads of this kernel the L2 policy evict_first."""
    # No constant of the module: what a shared function reads is part of every kernel's key.
    gl.inline_asm_elementwise(
        "// streamed TMA loads\n\tmov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


def streamed(ptx: str) -> str:
    """PTX in which every TMA load has the policy, if the PTX has the mark."""
    return _LOAD.sub(_STREAMED, ptx) if MARK in ptx else ptx


@dataclass(frozen=True, slots=True)
class _Hook:
    """See triton.knobs.runtime.add_stages_inspection_hook. `before`: the hook that was there."""

    before: Callable[..., Any] | None

    def __call__(
        self, backend: Any = None, stages: dict[str, Any] | None = None, *more: Any
    ) -> tuple[str, str] | None:
        """Triton 3.7 calls it without arguments, too, for what it adds to a kernel's cache key."""
        if stages is None:
            key, digest = ("", "") if self.before is None else self.before()
            return f"{key}{KEY}", f"{digest}{KEY}"
        if self.before is not None:
            self.before(backend, stages, *more)
        if "ptx" in stages:
            make = stages["ptx"]
            stages["ptx"] = lambda source, metadata: streamed(make(source, metadata))
        return None


def install_hook() -> None:
    """Let Triton stream the loads of kernels with the mark that it compiles from now on.

    Other kernels of the process change only in their cache keys.
    """
    before = knobs.runtime.add_stages_inspection_hook
    if not isinstance(before, _Hook):
        knobs.runtime.add_stages_inspection_hook = _Hook(before)
