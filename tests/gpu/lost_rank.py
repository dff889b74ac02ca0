"""Push on several GPUs, one of which makes no call; started by test_several_gpus.py."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from tools.collectives import (
    BenchRanks,
    Line,
    Send,
    failed,
    fused_sizes,
    make_push,
    mhc_calls,
    run_ranks,
)
from torch import Tensor

from finwhale.distributed.push import Push
from finwhale.distributed.push_sizes import SIZES
from finwhale.errors import EngineDeadError
from finwhale.ops import Ops, load_ops
from finwhale.ops.ranks import PartialSum
from finwhale.platform import Platform

LOST_SECONDS = 1.0
FUSED, COPIES = "fused mhc_post_pre", "start_all_gather_rows"
ROWS, WIDTH = 1024, 4096


def waits(ranks: BenchRanks, ops: Ops) -> dict[str, Callable[[Any], Tensor]]:
    """Calls of a Push that wait for the other ranks."""
    device = ranks.device
    small, large = (torch.ones(num_bytes // 4, device=device) for num_bytes in (2**14, 2**22))
    calls: dict[str, Callable[[Any], Tensor]] = {
        "small all_reduce": lambda made: made.all_reduce(small),
        "large all_reduce": lambda made: made.all_reduce(large),
        COPIES: lambda made: made.start_all_gather_rows(
            torch.ones(ROWS // ranks.rank.size, WIDTH, device=device), ROWS, "experts"
        )(),
    }
    if ops.mhc_of_terms is not None:
        post_pre = mhc_calls(ranks, ops, 1, 4096)["mhc_post_pre"]
        x = torch.ones((1, 4096), device=device)

        def fused(made: Any) -> Tensor:
            return post_pre(PartialSum(x, made.channel(1, 128)))[0]

        calls[FUSED] = fused
    return calls


def lose_a_rank(ranks: BenchRanks, args: argparse.Namespace, send: Send) -> None:
    """The last rank makes no call: the others must name it, after about LOST_SECONDS."""
    assert isinstance(ranks.collectives, Push), "this tests GPUs that write each other's memory"
    ops, lost = load_ops(Platform.detect()), ranks.rank.size - 1
    for name, call in waits(ranks, ops).items():
        fused = name == FUSED
        sizes = fused_sizes(ranks) if fused else SIZES[ranks.rank.size]
        made = make_push(ranks, sizes, fused=fused, seconds=LOST_SECONDS)
        if name == COPIES:  # which the ranks allocate together
            made._copies.reserve("experts", 4 * ROWS * WIDTH)
        ranks.barrier()
        start, named = time.perf_counter(), ranks.rank.index == lost
        if not named:
            total = call(made)
            ranks.synchronise()
            try:
                made.check()
            except EngineDeadError as error:
                named = f"rank {lost}" in str(error)
                named &= name == COPIES or bool(total.isnan().any())
        seconds = time.perf_counter() - start
        flags = ranks.gathered(torch.tensor([int(named)], device=ranks.device))
        line = {"what": "lost rank", "call": name, "seconds": round(seconds, 3)}
        send(line | {"right": bool(torch.cat(flags).all())})


def main() -> int:
    lines: list[Line] = []
    args = argparse.Namespace(device="cuda", timeout=240)
    run_ranks(2, args, lines.append, lose_a_rank)
    print(*lines, sep="\n")
    return int(any(map(failed, lines)) or sum(line["what"] == "lost rank" for line in lines) < 3)


if __name__ == "__main__":
    raise SystemExit(main())
