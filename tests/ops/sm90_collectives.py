"""Calls of the kernels that read peers' memory, for the process that compiles for SM90."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from finwhale.distributed import push_triton
from finwhale.distributed.push import WORD_BYTES
from finwhale.distributed.push_sizes import SIZES
from finwhale.ops.mhc import MhcParams, MhcWeight, mhc_triton
from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.ranks import Channel, PartialSum

FAULTS = 2**40  # the address that a launch passes
ROW_BYTES = 2 * 4096


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def channel(size: int, bulk: bool) -> Channel:
    sizes = SIZES[size]
    block, warps = (sizes.bulk_block, sizes.bulk_warps) if bulk else (sizes.block, sizes.warps)
    capacity = (sizes.bulk // size if bulk else sizes.gather) // WORD_BYTES
    programs = capacity // block
    return Channel(
        1,
        size,
        meta(2, size, capacity, dtype=torch.int32 if bulk else torch.int64),
        meta(programs, size) if bulk else None,
        meta(2, size, dtype=torch.int64),
        meta(programs),
        meta(1),
        FAULTS,
        block,
        capacity,
        warps,
    )


def call_collectives(size: int) -> None:
    """Every kernel, as it is launched for rows of Flash."""
    sizes = SIZES[size]
    small, bulk = channel(size, bulk=False), channel(size, bulk=True)
    for bfloat16 in (False, True):
        for launch, over, num_bytes in (
            (push_triton.one_shot, small, ROW_BYTES),
            (push_triton.two_shot, small, sizes.two_shot),
            (push_triton.two_shot, bulk, sizes.bulk),
        ):
            x = meta(num_bytes // WORD_BYTES)
            launch(x, x, over, bfloat16, True)
        x = meta(2**14)
        push_triton.reduce_scatter(x, x, 2**10, 0, bulk, bfloat16, True)
        values = x.view(torch.bfloat16 if bfloat16 else torch.float32)
        push_triton.sum_landed(values, values, x, 2**13, 1, size, True)
    push_triton.await_copies(meta(size), meta(1), FAULTS, 1)
    push_triton.gather_parts(x, x, 2**10, 0, bulk, True)
    width = 129280 // size
    push_triton.all_gather(meta(8 * width), meta(8 * size * width), width, small, True)
    xs = [meta(8 * count) for count in (2048, 6, 6)]
    push_triton.gather_each(xs, [meta(size * len(x)) for x in xs], small, True)


def call_partial_sums(size: int) -> None:
    """mHC of 8 rows of Flash, which adds the ranks' partial sums."""
    rows, width = 8, 4096
    of_ranks = replace(channel(size, bulk=False), block=512, capacity=2**18)
    post, res = (meta(*shape, dtype=torch.float32) for shape in ((rows, 4), (rows, 4, 4)))
    streams = meta(rows, 4, width, dtype=torch.bfloat16)
    sizes = ((24, 4 * width), (24,), (24,), (width,))
    w = MhcWeight(*(meta(*shape, dtype=torch.float32) for shape in sizes))
    params = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-6)
    how = mhc_triton.MhcOptions(inline_asm=True, early_launch=True)
    each = meta(rows, 6, width, dtype=torch.bfloat16)
    shared = meta(rows, width, dtype=torch.bfloat16)
    ids = meta(rows, 6, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16):
        x = PartialSum(meta(rows, width, dtype=dtype), of_ranks)
        mhc_triton.mhc_post(x, post, res, streams, options=how)
        mhc_triton.mhc_post_pre(x, post, res, streams, w, params, options=how)
        x = PartialSum(UnreducedExperts(each, ids, shared, dtype), of_ranks)
        mhc_triton.mhc_post(x, post, res, streams, options=how)
        mhc_triton.mhc_post_pre(x, post, res, streams, w, params, options=how)


PUSH = {f"collectives-{size}": partial(call_collectives, size) for size in SIZES}
PARTIAL_SUMS = {f"partial-sums-{size}": partial(call_partial_sums, size) for size in SIZES}
CALLS = PUSH | PARTIAL_SUMS
