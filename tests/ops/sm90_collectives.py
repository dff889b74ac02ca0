"""Calls of the push kernels for the process that compiles for SM90 (sm90_worker.py)."""

from functools import partial

import torch
from torch import Tensor

from finwhale.distributed import push_triton
from finwhale.distributed.push import WORD_BYTES
from finwhale.distributed.push_sizes import SIZES
from finwhale.ops.ranks import Channel

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
    push_triton.gather_parts(x, x, 2**10, 0, bulk, True)
    width = 129280 // size
    push_triton.all_gather(meta(8 * width), meta(8 * size * width), width, small, True)


CALLS = {f"collectives-{size}": partial(call_collectives, size) for size in SIZES}
