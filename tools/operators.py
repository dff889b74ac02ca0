"""Measure every kernel of a table on a GPU at the model's sizes, beside its floor.

    python -m tools.operators

A kernel's time is that of one call in a captured graph. The calls of the graph take turns over
inputs that together exceed the L2 cache. The floor is the larger of two times: the bytes that any
implementation must move divided by the measured bandwidth, and the operations divided by the
measured rate.
"""

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tests.support.capture_warm_up import warm_up
from tests.support.op_case import CONFIGS, Chunks, ModelDraw, OpCase, OpSizes, num_tokens
from torch import Tensor

from finwhale.bench.arguments import new_parser
from finwhale.bench.floors import READ_RATE
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.bench.timing import replay_ms
from finwhale.cli.bench import run_tool
from finwhale.engine.ranks.memory_checks import check_room
from finwhale.errors import FinwhaleError
from finwhale.ops import Ops, load_ops
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.platform import Platform

RANKS = (1, 2, 4, 8)
BATCHES = (1, 8, 32, 128, 8192)
MAX_DECODE = 1024  # Batches up to this are decodes of one token each; larger ones are one prompt.
UNTIMED, REPLAYS = 5, 50
# Each call of a timed graph has its own inputs. Together they exceed an H200's L2 cache (60 MB),
# unless that takes more than MAX_TURNS calls. Such small inputs stay in L2; in a model the previous
# operator leaves them there too.
ROTATED_BYTES = 128 * 2**20
MAX_TURNS = 64
FAMILIES = ("norm", "mhc", "linear", "attention", "compressor", "indexer", "moe")
PLATFORMS = {"nvidia": Platform("nvidia", "sm90"), "amd": Platform("amd", "gfx942")}

Kernel = Callable[..., Any]


def model_cases(sizes: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    """The cases of one step: every operator of a layer, the LM head and sampling."""
    for family in (*FAMILIES, "sampling"):
        cases = importlib.import_module(f"tests.support.model_cases.{family}")
        yield from cases.model_cases(sizes, draw, chunks)


def kernels(ops: Ops) -> dict[str, Kernel]:
    """The implementations of a table that are not references, of the operators that have cases."""
    cases = model_cases(CONFIGS["flash"], ModelDraw("cpu"), ())
    names = dict.fromkeys(case.operator for case in cases)
    chosen = {name: implementation(ops, name) for name in names}
    return {name: fn for name, fn in chosen.items() if not fn.__module__.endswith(".ref")}


def implementation(ops: Ops, name: str) -> Kernel:
    """An operator of a table. "experts" calls three operators; "sample" returns a tuple."""
    fn: Kernel = getattr(ops, "experts_compute" if name == "experts" else name)
    if name not in ("experts", "sample"):
        return fn

    def sample(*args: Any) -> tuple[Tensor, Tensor]:
        tokens = fn(*args)
        return tokens.ids_S, tokens.valid_S

    def experts(*args: Any) -> Tensor:
        return ops.experts(*args)

    call: Kernel = sample if name == "sample" else experts
    call.__module__, call.__qualname__ = fn.__module__, fn.__qualname__
    return call


def ready(ops: Ops, arg: Any) -> Any:
    """Prepare a weight as loading does, for the table's operators. This may overwrite `arg`."""
    if isinstance(arg, LinearWeight):
        w = ops.prepare_linear(arg)
        if w.weight is not arg.weight:
            w.weight.copy_(arg.weight)
        return w
    if isinstance(arg, ExpertWeight):
        e = ops.prepare_experts(arg)
        if e.w13 is not arg.w13:
            e.w13.copy_(arg.w13)
            e.w2.copy_(arg.w2)
        return ops.finish_experts(e) if e.w13.dim() == 3 else e
    return arg


def time_calls(calls: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Microseconds of one call, measured by replaying a graph that makes all calls once.

    The host never waits between the replays.
    """
    warm_up(calls[:2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = replay_ms(graph.replay, UNTIMED + REPLAYS, wait=False)[UNTIMED:]
    return summary([ms * 1e3 / len(calls) for ms in times])


def step(batch: int, context: int) -> Chunks:
    """The chunks of a timed batch: decodes at `context`, or one prompt."""
    return ((context - 1, context),) * batch if batch <= MAX_DECODE else ((0, batch),)


def measure(case: OpCase, chunks: Chunks, ops: Ops) -> dict[str, Any]:
    """Measure one case."""
    kernel = implementation(ops, case.operator)
    turns = max(2, min(MAX_TURNS, -(-ROTATED_BYTES // max(1, int(case.bytes)))))
    if case.weight is None:
        inputs = [case.args() for _ in range(turns)]
    else:
        # Each turn of "experts" chooses other experts, so one set of weights is enough.
        count = 1 if case.operator == "experts" else turns
        weights = [ready(ops, case.weight()) for _ in range(count)]
        inputs = [case.args(weights[i % count]) for i in range(turns)]
    times = time_calls([lambda args=args: kernel(*args) for args in inputs])  # type: ignore[misc]
    return {
        "operator": case.operator,
        "case": case.name,
        "tokens": num_tokens(chunks),
        "last_position": max((end for _, end in chunks), default=0) - 1,
        "kernel": f"{kernel.__module__}.{kernel.__qualname__}",
        "kernel_us": times,
        "bytes": round(case.bytes),
        "operations": round(case.operations),
        "floor_us": round(case.floor_us, 3),
    }


def run_timing(
    sizes: OpSizes, ops: Ops, operators: Sequence[str], batches: Sequence[int], context: int
) -> list[Any]:
    """Measure each kernel at each batch."""
    draw = ModelDraw("cuda")
    chosen = [name for name in kernels(ops) if not operators or name in operators]
    lines = []
    steps = [step(batch, context) for batch in batches]
    for cases in zip(*(model_cases(sizes, draw, chunks) for chunks in steps), strict=True):
        if cases[0].operator not in chosen:
            continue
        for case, chunks in zip(cases, steps, strict=True):
            lines.append(measure(case, chunks, ops))
            torch.cuda.empty_cache()
    return lines


def least_bytes(sizes: OpSizes, draw: ModelDraw, args: argparse.Namespace) -> float:
    """Bytes that the measured cases need at least; makes no tensor."""
    steps = [step(batch, args.context) for batch in args.batches]
    cases = (case for chunks in steps for case in model_cases(sizes, draw, chunks))
    chosen = [one.bytes for one in cases if not args.operators or one.operator in args.operators]
    return max(chosen, default=0.0)


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise FinwhaleError("this measures a GPU, and torch sees none")
    if min(args.batches) < 1 or args.context < 1:
        parser.error("--batches and --context must be at least 1")
    sizes = CONFIGS[args.config].of_rank(args.tensor_parallel_size)
    needed = least_bytes(sizes, ModelDraw("cuda"), args)
    free, _ = torch.cuda.mem_get_info()
    remedy = "choose other --operators or smaller --batches"
    check_room(needed, free, "the tensors of the largest case", "the GPU are free", remedy)
    ops = load_ops(PLATFORMS[args.table], batch_invariant=args.batch_invariant)
    with torch.inference_mode():
        lines = run_timing(sizes, ops, args.operators, args.batches, args.context)
    record = stamp("ops", argv, ("torch", "triton")) | {
        "config": args.config,
        "table": args.table,
        "tensor_parallel_size": args.tensor_parallel_size,
        "read_bytes_per_s": READ_RATE,
        "results": lines,
    }
    keep_record(args.record, record)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("ops", __doc__, "ops.jsonl", "python -m tools.operators")
    add = parser.add_argument
    add("--config", choices=CONFIGS, default="flash", help="sizes of this model")
    add("--table", choices=PLATFORMS, default="nvidia", help="measure this platform's kernels")
    about = f"numbers of tokens: up to {MAX_DECODE}, that many decodes; beyond it, one prompt"
    add("--batches", type=int, nargs="+", default=list(BATCHES), help=about)
    add("--context", type=int, default=8192, help="number of tokens before a decode")
    add("--operators", nargs="+", default=[], help="measure these only")
    add("--batch-invariant", action="store_true", help="use the batch-invariant operators")
    about = "use the sizes of one rank of this many"
    add("--tensor-parallel-size", type=int, choices=RANKS, default=1, help=about)
    return parser


if __name__ == "__main__":
    run_tool(main)
