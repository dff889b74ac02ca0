"""Linear layers of few tokens on Hopper GPUs, in Gluon: E4M3 weights, and small bfloat16 weights.

`tile_kernel` (gemm_triton.py) loads its first weights after the previous kernel has ended. Here a
program has room for all of its weights, and requests most of them while it waits. After the wait it
rounds the tokens, multiplies, and stores the result or its part of the sums. The parts of K, the
order of all sums, and therefore the bits are those of `tile_kernel`.

Two programs share a multiprocessor, with 64 KiB of weights each. So the GPU has room for 17 MB at
once, which is what a rank of two holds of wq_b, of wo_a or of wo_b.

Legend: N tokens, K input width, M output width, G groups; a step is 128 values of K.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from finwhale.number_formats import E4M3_MAX
from finwhale.ops.launch.early_launch import launch_options
from finwhale.ops.launch.gluon_functions import async_load, start_next, wait_for_last
from finwhale.ops.launch.streamed_loads import stream_tma_loads
from finwhale.ops.linear.linear_triton import FEW_ROWS
from finwhale.ops.rounding import MIN_AMAX

# One mbarrier announces the weights of this many steps.
STEPS_AT_ONCE = 4
E4M3_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
BFLOAT16_TILE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.constexpr_function
def _product(columns):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32])


@gluon.jit(do_not_specialize=["N"])
def few_tokens_kernel(
    x_ptr,
    w_desc,
    scale_ptr,
    out_ptr,
    N,
    M,
    K,
    stride_xn,
    stride_xg,
    STEPS: gl.constexpr,
    PADDED_STEPS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    COLUMNS: gl.constexpr,
    PARTS: gl.constexpr,
    EARLY: gl.constexpr,
    TOP: gl.constexpr,
    LEAST: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute 64 rows of the weight times up to COLUMNS tokens, over STEPS steps of K.

    PARTS: write float32 parts [split, G, M, COLUMNS]; otherwise out [N, G, M]. EARLY: number of
    steps whose weights are requested before the wait.
    """
    stream_tma_loads()
    start_next(PDL)
    tile = gl.program_id(0)
    part = gl.program_id(1)
    g = gl.program_id(2)
    tiled: gl.constexpr = w_desc.layout
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LOADS: gl.constexpr = (STEPS + AT_ONCE - 1) // AT_ONCE
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STEPS, 64, 128], tiled)
    x = gl.allocate_shared_memory(gl.float8e4nv, [PADDED_STEPS * COLUMNS, 128], tiled)
    scales = gl.allocate_shared_memory(gl.float32, [PADDED_STEPS * COLUMNS], plain)
    ready = gl.allocate_shared_memory(gl.int64, [LOADS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LOADS):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    row = g * M + tile * 64
    for i in gl.static_range(LOADS):
        mbarrier.expect(ready.index(i), min(AT_ONCE, STEPS - i * AT_ONCE) * 64 * 128)
    for i in gl.static_range(min(EARLY, STEPS)):
        k = (part * STEPS + i) * 128  # past the end of K, the weights are 0
        async_load(w_desc, [row, k], ready.index(i // AT_ONCE), weights.index(i))
    all_steps = K // 128
    scale_ptr += (g * ((M + 127) // 128) + tile // 2) * all_steps
    factors = ()
    for i in gl.static_range(STEPS):
        step = part * STEPS + i
        factor = gl.load(scale_ptr + step, mask=step < all_steps, other=0.0)
        factors += (factor,)  # type: ignore[assignment]
    wait_for_last(PDL)
    for i in gl.static_range(min(EARLY, STEPS), STEPS):
        k = (part * STEPS + i) * 128
        async_load(w_desc, [row, k], ready.index(i // AT_ONCE), weights.index(i))

    # A line is a step's values of a token. Lines past the last token or step repeat another line:
    # nothing reads their products, or the weights are 0.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    line = gl.arange(0, PADDED_STEPS * COLUMNS, gl.SliceLayout(1, layout))
    token = gl.minimum(line % COLUMNS, N - 1)
    step = gl.minimum(part * STEPS + gl.minimum(line // COLUMNS, STEPS - 1), all_steps - 1)
    source = x_ptr + g * stride_xg + gl.expand_dims(token.to(gl.int64) * stride_xn + step * 128, 1)
    source += gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(0, layout)), 0)
    value = gl.load(source).to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(value), axis=1), LEAST)
    bits = (amax * (1.0 / TOP)).to(gl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000
    inverse = gl.expand_dims((0x7F000000 - bits).to(gl.float32, bitcast=True), 1)
    x.store((value * inverse).to(gl.float8e4nv))
    scales.store(bits.to(gl.float32, bitcast=True))
    fence_async_shared()

    product: gl.constexpr = _product(COLUMNS)
    zero = gl.full([64, COLUMNS], 0.0, gl.float32, product)
    products = ()
    for i in gl.static_range(STEPS):
        if i % AT_ONCE == 0:
            mbarrier.wait(ready.index(i // AT_ONCE), 0)
        tokens = x.slice(i * COLUMNS, COLUMNS, 0).permute((1, 0))
        one = warpgroup_mma(weights.index(i), tokens, zero, use_acc=False, is_async=True)
        products += (one,)  # type: ignore[assignment]
    waited = warpgroup_mma_wait(0, deps=products)
    # A single result comes without a tuple.
    products = waited if STEPS > 1 else (waited,)  # type: ignore[assignment]
    total = zero
    for i in gl.static_range(STEPS):
        scale = scales.slice(i * COLUMNS, COLUMNS, 0).load(gl.SliceLayout(0, product))
        total += products[i] * gl.expand_dims(scale * factors[i], 0)

    if PARTS:
        at = gl.expand_dims(tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, product)), 1)
        token = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, product)), 0)
        first = (part * gl.num_programs(2) + g).to(gl.int64) * M
        gl.store(out_ptr + (first + at) * COLUMNS + token, total)
    else:
        # Adjacent threads store adjacent rows.
        across: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
        value = gl.convert_layout(total.to(out_ptr.dtype.element_ty), across)
        at = gl.expand_dims(tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, across)), 1)
        token = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, across)), 0)
        first = (token.to(gl.int64) * gl.num_programs(2) + g) * M
        gl.store(out_ptr + first + at, value, mask=token < N)


@gluon.jit(do_not_specialize=["N"])
def few_tokens_plain_kernel(
    x_ptr,
    w_desc,
    out_ptr,
    N,
    M,
    stride_xn,
    stride_xg,
    CHUNKS: gl.constexpr,
    AT_ONCE: gl.constexpr,
    COLUMNS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Like `few_tokens_kernel`, with a bfloat16 weight and tokens that are not rounded.

    A chunk is 64 values of K. K is a multiple of the CHUNKS chunks of a part.
    """
    stream_tma_loads()
    start_next(PDL)
    tile = gl.program_id(0)
    part = gl.program_id(1)
    g = gl.program_id(2)
    tiled: gl.constexpr = w_desc.layout
    LOADS: gl.constexpr = (CHUNKS + AT_ONCE - 1) // AT_ONCE
    weights = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS, 64, 64], tiled)
    x = gl.allocate_shared_memory(gl.bfloat16, [CHUNKS * COLUMNS, 64], tiled)
    ready = gl.allocate_shared_memory(gl.int64, [LOADS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(LOADS):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    row = g * M + tile * 64
    for i in gl.static_range(CHUNKS):
        if i % AT_ONCE == 0:
            mbarrier.expect(ready.index(i // AT_ONCE), min(AT_ONCE, CHUNKS - i) * 64 * 64 * 2)
        k = (part * CHUNKS + i) * 64
        async_load(w_desc, [row, k], ready.index(i // AT_ONCE), weights.index(i))
    wait_for_last(PDL)

    # A line is a chunk of a token. Lines past the last token repeat it: nothing reads their result.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, CHUNKS * COLUMNS, gl.SliceLayout(1, layout))
    token = gl.minimum(line % COLUMNS, N - 1)
    first = token.to(gl.int64) * stride_xn + (part * CHUNKS + line // COLUMNS) * 64
    source = x_ptr + g * stride_xg + gl.expand_dims(first, 1)
    source += gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    x.store(gl.load(source))
    fence_async_shared()

    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    total = gl.full([64, COLUMNS], 0.0, gl.float32, product)
    for i in gl.static_range(CHUNKS):
        if i % AT_ONCE == 0:
            mbarrier.wait(ready.index(i // AT_ONCE), 0)
        tokens = x.slice(i * COLUMNS, COLUMNS, 0).permute((1, 0))
        total = warpgroup_mma(weights.index(i), tokens, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])
    at = gl.expand_dims(tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, product)), 1)
    token = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, product)), 0)
    first = (part * gl.num_programs(2) + g).to(gl.int64) * M
    gl.store(out_ptr + (first + at) * COLUMNS + token, total)


def launch(
    x_NGK: Tensor,
    weight_GMK: Tensor,
    scale: Tensor | None,
    out: Tensor,
    steps: int,
    columns: int,
    early_steps: int,
    early_launch: bool,
) -> None:
    """Launch a kernel that has room for all weights of its programs.

    Args:
        x_NGK: bfloat16, with strided tokens and groups.
        weight_GMK, scale: E4M3, and a float32 for each block of 128x128; or bfloat16 and None: then
            `out` is in parts, and they divide K evenly.
        out: float32 parts [split, G, M, columns], or [N, G, M].
        steps: 128 values of K each, of a part of K; all steps if `out` is not in parts.
        columns: number of tokens that the kernel computes: a multiple of 8, at least N. Those past
            N have no meaning.
        early_steps: see `LinearOptions`.
        early_launch: see `launch_options`.
    """
    (num_tokens, groups, width), rows = x_NGK.shape, weight_GMK.shape[1]
    in_parts = out.dim() == 4
    weight = weight_GMK.view(-1, width)
    if scale is None:
        assert in_parts and out.stride(3) == 1
        few_tokens_plain_kernel[(rows // FEW_ROWS, out.shape[0], groups)](
            x_NGK,
            TensorDescriptor.from_tensor(weight, [FEW_ROWS, 64], BFLOAT16_TILE),
            out,
            *(num_tokens, rows, x_NGK.stride(0), x_NGK.stride(1)),
            CHUNKS=2 * steps,
            AT_ONCE=STEPS_AT_ONCE,
            COLUMNS=columns,
            num_warps=4,
            **launch_options(early_launch),
        )
        return
    few_tokens_kernel[(rows // FEW_ROWS, out.shape[0] if in_parts else 1, groups)](
        x_NGK,
        TensorDescriptor.from_tensor(weight, [FEW_ROWS, 128], E4M3_TILE),
        *(scale, out, num_tokens, rows, width, x_NGK.stride(0), x_NGK.stride(1)),
        STEPS=steps,
        PADDED_STEPS=1 << (steps - 1).bit_length(),
        AT_ONCE=STEPS_AT_ONCE,
        COLUMNS=columns,
        PARTS=in_parts,
        EARLY=early_steps,
        TOP=E4M3_MAX,
        LEAST=MIN_AMAX,
        num_warps=4,
        **launch_options(early_launch),
    )
