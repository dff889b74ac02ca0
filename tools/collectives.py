"""Measure the collectives between the GPUs of this host, beside NCCL's and torch's.

    python -m tools.collectives

Each GPU has one process. The benchmark compares each result with the reference before it times the
call. A time is the median time of one call in a captured graph of 20 calls, on the slowest rank.
The floor is the bytes that any all-reduce must send from a rank, divided by the rate of NVLink.
Every wait has a time limit.

The mHC operators run on a finished sum ("mhc alone"), after an all-reduce ("sum, mhc") and with the
sum in their first kernel ("fused"). The difference of "sum, mhc" and "mhc alone" is the cost of the
all-reduce in a layer without fusion.
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
import torch.multiprocessing
from tests.support.capture_warm_up import warm_up
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from finwhale.bench.arguments import new_parser
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.bench.timing import replay_ms, seconds_of
from finwhale.cli.bench import run_tool
from finwhale.distributed import connect as connecting
from finwhale.distributed import ref
from finwhale.distributed.collectives import Collectives
from finwhale.distributed.nccl import Nccl, new_group
from finwhale.distributed.push_sizes import SIZES, PushSizes
from finwhale.distributed.rank import Rank
from finwhale.errors import FinwhaleError
from finwhale.ops import Ops, load_ops
from finwhale.ops.mhc import MhcParams, MhcWeight
from finwhale.ops.ranks import PartialSum
from finwhale.platform import Platform

COMMAND = "python -m tools.collectives"
ROWS = (1, 2, 6, 16, 32, 64, 128, 256, 1024, 2048, 8192)
GATHERED_ROWS = (1, 8, 32)
MHC_ROWS = (1, 2, 4, 6, 8, 16, 24, 32, 48, 64)
VOCAB_SIZE = 129280
CALLS = 20
REPLAYS = 30
SEND_RATE = 450e9  # bytes per second from one H200 to the others of its host, in one direction
TICK_S = 0.25
WAIT_SECONDS = 30.0  # A kernel waits this long for another rank, which may still be compiling.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Line = dict[str, Any]
Send = Callable[[Line], None]
MhcCall = Callable[[Tensor | PartialSum], tuple[Tensor, ...]]
Run = Callable[["BenchRanks", argparse.Namespace, Send], None]


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to do a collective.

    Attributes:
        most: maximum size of a message in bytes.
        exact: the result must have the bits of the reference.
        own_input: copies a tensor into the kind of memory that the call needs.
    """

    name: str
    call: Callable[[Tensor], Tensor]
    most: int = 2**62
    exact: bool = True
    own_input: Callable[[Tensor], Tensor] = Tensor.clone


@dataclass(frozen=True, slots=True)
class BenchRanks:
    """This process's rank, and helpers that all ranks call together. `group` is the process group
    of the kernels that the benchmark makes itself; None on a CPU.
    """

    rank: Rank
    device: torch.device
    collectives: Collectives
    group: dist.ProcessGroup | None

    def gathered(self, x: Tensor) -> list[Tensor]:
        if self.device.type == "cpu":
            return list(self.collectives.all_gather(x[None], 0))
        parts = [torch.empty_like(x) for _ in range(self.rank.size)]
        dist.all_gather(parts, x)
        return parts

    def barrier(self) -> None:
        self.synchronise()
        self.gathered(torch.zeros(1, device=self.device))
        self.synchronise()

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def slowest(self, times: dict[str, float]) -> dict[str, float]:
        """The times of the rank with the largest median."""
        names = list(times)
        rows = torch.tensor([times[name] for name in names], device=self.device)
        slowest = max(self.gathered(rows), key=lambda row: float(row[names.index("median")]))
        return dict(zip(names, (round(value, 3) for value in slowest.tolist()), strict=True))


def world() -> dist.ProcessGroup:
    """All GPUs, over NCCL."""
    group = dist.group.WORLD
    assert group is not None
    return group


# --- Implementations ------------------------------------------------------------------------------


def all_reduces(ranks: BenchRanks) -> Iterator[Implementation]:
    yield Implementation("finwhale", ranks.collectives.all_reduce, exact=False)
    yield by_rows("finwhale", ranks.collectives)
    if ranks.device.type == "cpu":
        return

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    yield Implementation("nccl", nccl, exact=False)
    yield by_rows("nccl", Nccl(ranks.rank, world()))
    if not isinstance(ranks.collectives, Nccl):
        yield from _pushes(ranks)
        for name in ("one_shot_all_reduce", "two_shot_all_reduce_"):
            operator, group = getattr(torch.ops.symm_mem, name), world().group_name
            call = functools.partial(operator, reduce_op="sum", group_name=group)
            yield Implementation(f"torch {name}", call, 2**26, False, _symmetric_copy)


def by_rows(name: str, collectives: Collectives) -> Implementation:
    """The reduce-scatter and the all-gather that prefill uses in place of an all-reduce."""

    def call(x: Tensor) -> Tensor:
        return collectives.all_gather_rows(collectives.reduce_scatter_rows(x), len(x))

    return Implementation(f"{name} by rows", call, exact=False)


def _symmetric_copy(x: Tensor) -> Tensor:
    copy = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
    symmetric.rendezvous(copy, world())
    return copy.copy_(x)


def _pushes(ranks: BenchRanks) -> Iterator[Implementation]:
    """Each algorithm at all sizes that fit its buffers."""
    for name, sizes in (
        ("one shot", PushSizes(one_shot=2**21, two_shot=2**21, bulk=2**16)),
        ("two shots", PushSizes(one_shot=0, two_shot=2**22, gather=4, bulk=2**16)),
        ("bulk", PushSizes(one_shot=0, two_shot=0, gather=4, nccl=2**62)),
    ):
        call = make_push(ranks, sizes).all_reduce
        yield Implementation(f"push {name}", call, sizes.two_shot or 2**62)


def make_push(
    ranks: BenchRanks, sizes: PushSizes, *, fused: bool = False, seconds: float = WAIT_SECONDS
) -> Any:
    """Push, with ordered sums unless `fused`: only without order has it a channel for mHC."""
    assert ranks.group is not None
    nccl = Nccl(ranks.rank, ranks.group, ordered=True)
    given = ranks.rank, ranks.device, ranks.group, nccl
    options: Any = {"ordered": not fused, "sizes": sizes, "timeout_seconds": seconds}
    return connecting.make_push(*given, **options)


# --- Measuring ------------------------------------------------------------------------------------


def time_calls(ranks: BenchRanks, call: Callable[[], Tensor]) -> tuple[dict[str, float], Tensor]:
    """Microseconds of one call, and the result of the last call."""
    if ranks.device.type == "cpu":
        return ranks.slowest(summary([1e6 * seconds_of(call) for _ in range(3)])), call()
    warm_up([call] * 3)
    ranks.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            result = call()
    for _ in range(3):
        graph.replay()
    ranks.barrier()
    times = [ms * 1e3 / CALLS for ms in replay_ms(graph.replay, REPLAYS)]
    return ranks.slowest(summary(times)), result


def measure(
    ranks: BenchRanks,
    call: Callable[[], tuple[Tensor, ...]],
    agree: Callable[[Tensor, Tensor], bool],
    wanted: tuple[Tensor, ...],
    *,
    repeatable: bool = True,
) -> Line:
    """Time a call, after comparing its results. If it is `repeatable`, a later call has the same
    results, and the first of them is compared again.
    """
    first, *others = (x.clone() for x in call())
    ranks.synchronise()
    right = all(map(agree, (first, *others), wanted))
    times, result = time_calls(ranks, lambda: call()[0])
    if repeatable:
        first, right = result, right and agree(result, wanted[0])
    same = all(torch.equal(part, first) for part in ranks.gathered(first))
    return {"us": times, "right": right, "same_on_all_ranks": same}


def measure_collective(ranks: BenchRanks, how: Implementation, x: Tensor, wanted: Tensor) -> Line:
    """Time one implementation on one message."""
    given, tolerance = how.own_input(x), 2.0**-6 if x.dtype == torch.bfloat16 else 1e-5

    def near(found: Tensor, wanted: Tensor) -> bool:
        return torch.allclose(found.float(), wanted.float(), rtol=tolerance, atol=8 * tolerance)

    # A call that is not exact may overwrite its input.
    agree = torch.equal if how.exact else near
    return measure(ranks, lambda: (how.call(given),), agree, (wanted,), repeatable=how.exact)


def attempt(measuring: Callable[..., Line], ranks: BenchRanks, *given: Any) -> Line:
    """Measure a line; returns the error if that fails.

    If only one rank fails, the others wait for it until the benchmark's time-out.
    """
    try:
        return measuring(ranks, *given)
    except (RuntimeError, ValueError, AttributeError, FinwhaleError) as error:
        return {"error": f"rank {ranks.rank.index}: {type(error).__name__}: {error}"[:400]}


def random_rows(ranks: BenchRanks, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank.index + 1)
    return torch.randn((rows, width), generator=generator, device=ranks.device).to(dtype)


def line_of(what: str, implementation: str, x: Tensor) -> Line:
    """The fields of a line that say what is measured, on the message x."""
    rows, width = x.shape
    dtype = str(x.dtype).removeprefix("torch.")
    line: Line = {"what": what, "implementation": implementation, "dtype": dtype}
    return line | {"width": width, "rows": rows, "bytes": x.numel() * x.element_size()}


def measure_sums(ranks: BenchRanks, args: argparse.Namespace, send: Send) -> None:
    for how in all_reduces(ranks):
        for dtype, width, rows in itertools.product(args.dtypes, args.widths, args.rows):
            x = random_rows(ranks, rows, width, DTYPES[dtype])
            line = line_of("all_reduce", how.name, x)
            if line["bytes"] > how.most:
                continue
            sent = 2 * (1 - 1 / ranks.rank.size) * line["bytes"]
            line["floor_us"] = round(sent / SEND_RATE * 1e6, 3)
            wanted = ref.all_reduce(ranks.gathered(x))
            send(line | attempt(measure_collective, ranks, how, x, wanted))


def measure_gathers(ranks: BenchRanks, send: Send) -> None:
    """Logits of a vocabulary that is cut over the ranks."""
    ways = [Implementation("finwhale", lambda x: ranks.collectives.all_gather(x, 1))]
    if ranks.device.type == "cuda":
        nccl = Nccl(ranks.rank, world())
        ways.append(Implementation("nccl", lambda x: nccl.all_gather(x, 1)))
    for how in ways:
        for rows in GATHERED_ROWS:
            x = random_rows(ranks, rows, VOCAB_SIZE // ranks.rank.size, torch.float32)
            wanted = ref.all_gather(ranks.gathered(x), 1)
            line = line_of("all_gather", how.name, x)
            send(line | attempt(measure_collective, ranks, how, x, wanted))


def mhc_calls(ranks: BenchRanks, ops: Ops, rows: int, width: int) -> dict[str, MhcCall]:
    """The mHC operators on tensors that are the same on all ranks, except for x."""
    generator = torch.Generator(ranks.device).manual_seed(0)
    normal = functools.partial(torch.randn, generator=generator, device=ranks.device)
    mixes = normal(rows, 4).abs(), normal(rows, 4, 4).softmax(-1)
    residual = normal(rows, 4, width).bfloat16()
    fn = normal(24, 4 * width) * width**-0.5
    weight = MhcWeight(fn, normal(24), normal(24), normal(width))
    params = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-6)

    def operators(x: Tensor | PartialSum) -> Any:
        return ops if isinstance(x, Tensor) else ops.mhc_of_terms

    return {
        "mhc_post_pre": lambda x: operators(x).mhc_post_pre(x, *mixes, residual, weight, params),
        "mhc_post": lambda x: (operators(x).mhc_post(x, *mixes, residual),),
    }


def fused_sizes(ranks: BenchRanks) -> PushSizes:
    return replace(SIZES[ranks.rank.size], fused_tokens=128, fused_programs=2048)


def measure_mhc(ranks: BenchRanks, ops: Ops, args: argparse.Namespace, send: Send) -> None:
    """mHC at decode sizes: alone, after a sum, and with the sum in its first kernel."""
    assert ops.mhc_of_terms is not None
    made = make_push(ranks, fused_sizes(ranks), fused=True)
    for dtype, width, rows in itertools.product(args.dtypes, args.widths, MHC_ROWS):
        x = random_rows(ranks, rows, width, DTYPES[dtype])
        total = ref.all_reduce(ranks.gathered(x)).bfloat16()
        channel = made.channel(rows, ops.mhc_of_terms.num_programs(rows, width))
        if channel is None:
            continue
        for name, operator in mhc_calls(ranks, ops, rows, width).items():
            calls = {
                "mhc alone": functools.partial(operator, total),
                "sum, mhc": functools.partial(_sum_first, ranks, operator, x),
                "fused": functools.partial(operator, PartialSum(x, channel)),
            }
            for how, call in calls.items():
                wanted = operator(total)
                send(line_of(name, how, x) | attempt(measure, ranks, call, _agree, wanted))


def _sum_first(ranks: BenchRanks, operator: MhcCall, x: Tensor) -> tuple[Tensor, ...]:
    """Run an operator after an all-reduce, as the model does without fusion."""
    return operator(ranks.collectives.all_reduce(x).to(torch.bfloat16))


def _agree(result: Tensor, wanted: Tensor) -> bool:
    """Whether two results agree.

    Float32 values must agree to 2e-6. One bfloat16 value in 1,000 may differ, by its last bit.
    A kernel that sums may multiply and add in another order than one that reads sums, so their
    float32 values differ in the last bits. On an H200, 50 of 1,024 values of `res` differed by up
    to 2e-7, and 3 of 262,144 values of the residual streams by a last bit of bfloat16.
    """
    if result.dtype == torch.float32:
        return torch.allclose(result, wanted, rtol=2e-6, atol=2e-6)
    differing = int((result != wanted).sum())
    return differing <= result.numel() / 1000 and torch.allclose(
        result.float(), wanted.float(), rtol=2**-7, atol=2e-6
    )


def measure_all(ranks: BenchRanks, args: argparse.Namespace, send: Send) -> None:
    if not args.no_sum:
        measure_sums(ranks, args, send)
    if not args.no_gather:
        measure_gathers(ranks, send)
    if ranks.device.type == "cuda" and not isinstance(ranks.collectives, Nccl):
        ops = load_ops(Platform.detect())
        if ops.mhc_of_terms is not None:
            measure_mhc(ranks, ops, args, send)


# --- Processes ------------------------------------------------------------------------------------


def work(index: int, run: Run, size: int, port: int, args: argparse.Namespace, lines: Any) -> None:
    """Run one rank's process. Only rank 0 sends its lines."""
    rank = Rank(index, size)
    send: Send = lines.put if index == 0 else lambda line: None
    store: Store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    device = torch.device("cpu") if args.device == "cpu" else torch.device("cuda", index)
    start = time.perf_counter()
    collectives, group = connecting.connect(rank, device, store), None
    seconds = round(time.perf_counter() - start, 2)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl",
            store=PrefixStore("world", store),
            rank=index,
            world_size=size,
            timeout=connecting.TIMEOUT,
            device_id=device,
        )
        group = new_group(rank, PrefixStore("bench", store), "bench", connecting.TIMEOUT)
    ranks = BenchRanks(rank, device, collectives, group)
    name = type(collectives).__name__
    send({"what": "connect and self-check", "implementation": name, "seconds": seconds})
    with torch.inference_mode():
        run(ranks, args, send)
    ranks.barrier()


def run_ranks(size: int, args: argparse.Namespace, show: Send, run: Run = measure_all) -> None:
    """Call `run`, which is pickled, on every rank until all end, one fails or the time is over."""
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines = torch.multiprocessing.get_context("spawn").SimpleQueue()
    given = run, size, store.port, args, lines
    ranks: Any = spawn(work, given, size, join=False, daemon=True)
    deadline, ended = time.monotonic() + args.timeout, False
    try:
        while not ended and time.monotonic() < deadline:
            try:
                ended = ranks.join(TICK_S, grace_period=5)
            finally:
                while not lines.empty():
                    show(lines.get())
        if not ended:
            show({"what": "failure", "error": "the time was over before all ranks had ended"})
    except (ProcessExitedException, ProcessRaisedException) as error:
        show({"what": "failure", "error": str(error).strip()})
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def failed(line: Line) -> bool:
    return "error" in line or not line.get("right", True) or not line.get("same_on_all_ranks", True)


def main(argv: Sequence[str]) -> int:
    """Measure. Returns 1 if a result was wrong or a rank failed."""
    parser = _parser()
    args = parser.parse_args(argv)
    found = torch.cuda.device_count() if args.device == "cuda" else 2
    size = args.ranks or found
    if found < max(2, size) and args.device == "cuda":
        raise FinwhaleError(f"this benchmark needs {max(2, size)} GPUs, and torch sees {found}")
    if size not in (2, 4, 8):
        parser.error("--ranks must be 2, 4 or 8")
    lines: list[Line] = []

    def show(line: Line) -> None:
        lines.append(line)
        if "us" not in line or failed(line):
            print(line)

    run_ranks(size, args, show)
    record = stamp("collectives", argv, ("torch", "triton"), COMMAND) | {
        "ranks": size,
        "send_bytes_per_s": SEND_RATE,
        "results": lines,
    }
    keep_record(args.record, record)
    return int(any(map(failed, lines)))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("collectives", __doc__, "collectives.jsonl", COMMAND)
    add = parser.add_argument
    add("--ranks", type=int, help="number of ranks (default: all GPUs)")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="kind of device")
    add("--rows", type=int, nargs="+", default=list(ROWS), help="rows of messages")
    add("--widths", type=int, nargs="+", default=[4096], help="values of a row")
    add("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES), help="dtypes of messages")
    add("--no-sum", action="store_true", help="leave out the all-reduces")
    add("--no-gather", action="store_true", help="leave out the all-gathers")
    add("--timeout", type=float, default=480, metavar="SECONDS", help="end all ranks after this")
    return parser


if __name__ == "__main__":
    run_tool(main)
