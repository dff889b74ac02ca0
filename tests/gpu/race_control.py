"""A kernel that hands one tile from producer warps to consumer warps, and nothing else.

compute-sanitizer --tool racecheck python tests/gpu/race_control.py

What racecheck reports here it reports of any kernel in Gluon whose warps are specialised: the
compiler passes the arguments of `warp_specialize` through shared memory before the workers start.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

SIZE = 256


@gluon.jit
def _produce(x_ptr, tile, ready, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tile.store(gl.load(x_ptr + gl.arange(0, SIZE, layout)))
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _consume(out_ptr, tile, ready, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(ready, 0)
    gl.store(out_ptr + gl.arange(0, SIZE, layout), tile.load(layout))


@gluon.jit
def _hand_over_kernel(x_ptr, out_ptr, SIZE: gl.constexpr):
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tile = gl.allocate_shared_memory(gl.float32, [SIZE], shared)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize(
        [(_consume, (out_ptr, tile, ready, SIZE)), (_produce, (x_ptr, tile, ready, SIZE))],
        [4],
        [104],
    )


def main() -> None:
    x = torch.randn(SIZE, device="cuda")
    out = torch.empty_like(x)
    _hand_over_kernel[(4,)](x, out, SIZE=SIZE, num_warps=8)
    torch.cuda.synchronize()
    assert torch.equal(out, x)
    print("handed over")


if __name__ == "__main__":
    main()
