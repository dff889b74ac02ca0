"""A kernel that hands one tile from producer warps to consumer warps, and nothing else.

compute-sanitizer --tool racecheck python tests/gpu/race_control.py [WARPS ..]

WARPS produce, four consume. What racecheck reports here it reports of any kernel in Gluon whose
warps are specialised like that: the compiler passes the arguments of `warp_specialize` through
shared memory before the workers start, and fills up their warps to four with idle ones.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SIZE = 256


@gluon.jit
def _produce(x_ptr, first, tile, ready, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile.store(gl.load(x_ptr + first + gl.arange(0, SIZE, layout)))
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _consume(out_ptr, tile, ready, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(ready, 0)
    gl.store(out_ptr + gl.arange(0, SIZE, layout), tile.load(layout))


@gluon.jit
def _hand_over_kernel(x_ptr, first_ptr, out_ptr, SIZE: gl.constexpr, WARPS: gl.constexpr):
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.allocate_shared_memory(gl.float32, [SIZE], shared)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    # A value that only the first warps know.
    first = gl.load(first_ptr)
    gl.warp_specialize(
        [(_consume, (out_ptr, tile, ready, SIZE)), (_produce, (x_ptr, first, tile, ready, SIZE))],
        [WARPS],
        [24],
    )


def main() -> None:
    x, first = torch.randn(2 * SIZE, device="cuda"), torch.tensor([SIZE], device="cuda")
    for warps in map(int, sys.argv[1:] or ("4", "1")):
        out = torch.empty_like(x[SIZE:])
        _hand_over_kernel[(4,)](x, first, out, SIZE=SIZE, WARPS=warps, num_warps=4)
        torch.cuda.synchronize()
        assert torch.equal(out, x[SIZE:])
        print(f"handed over by {warps}")


if __name__ == "__main__":
    main()
