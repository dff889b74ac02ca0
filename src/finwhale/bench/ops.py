"""Measure every kernel of a table on a GPU, and its reference, at the model's sizes.

A kernel's time is that of one call in a captured graph. The calls of the graph take turns over
inputs that together exceed the L2 cache. A reference's time is that of a single call. The floor is
the larger of two times: the bytes that any implementation must move divided by the measured
bandwidth, and the operations divided by the measured rate.

`--check` checks results instead of timing: against the references, with outliers, padding and far
pages, and bit for bit in other batches.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from finwhale.bench.arguments import new_parser
from finwhale.bench.packing import (
    ACTIVATIONS,
    far_pages,
    packed_args,
    padded,
    plain_args,
    plain_results,
    plain_weight,
    ready,
)
from finwhale.bench.preflight import check_gpu_memory
from finwhale.bench.record import keep_record, stamp, summary
from finwhale.bench.timing import warm_up
from finwhale.errors import FinwhaleError
from finwhale.ops import Ops, load_ops
from finwhale.ops.case import (
    CONFIGS,
    E4M3_FLIP,
    MODEL_TOLERANCE,
    READ_RATE,
    Args,
    Chunks,
    ModelDraw,
    OpCase,
    Sizes,
    num_tokens,
    results,
    take_tokens,
    to_device,
    written_tensors,
)
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe.cases import HIDDEN_TOLERANCE
from finwhale.ops.slots import write_slots
from finwhale.platform import Platform

RANKS = (1, 2, 4, 8)
BATCHES = (1, 8, 32, 128, 8192)
MAX_DECODE = 1024  # Batches up to this are decodes of one token each; larger ones are one prompt.
REPLAYS = 50
# Each call of a timed graph has its own inputs. Together they exceed an H200's L2 cache (60 MB),
# unless that takes more than MAX_TURNS calls. Such small inputs stay in L2; in a model the previous
# operator leaves them there too.
ROTATED_BYTES = 128 * 2**20
MAX_TURNS = 64
PLAIN_BYTES = 40 * 10**9  # Weights that take more in float32 are not compared.
# Numbers of tokens of a check. With Flash or Pro, an expert then gets up to 131 pairs.
CHECKED = (0, 1, 3, 17, 130, 256, 257, 500, 1000, 1400)
CHECKED_EXPERTS = 64
# Ranges of tokens that must get the same bits as in the whole batch. A table may split the work of
# more tokens differently, so PARTS stay below that; ANY_PARTS are for batch-invariant tables.
PARTS = ((0, 1), (5, 22), (0, 100), (27, 128))
ANY_PARTS = ((0, 1), (0, 2), (5, 22), (3, 130), (900, 901), (1400, 1403), (100, 611), (3, 1499))
FAR_BYTES = 2**31
LAST_ROWS = 300  # Compared rows of a batch past 2^31 values; more than any table's "few tokens".
FAMILIES = ("norm", "mhc", "linear", "attention", "compressor", "indexer", "moe")
# The operators that read pages, and the positions of their arguments that grow with the step.
PAGED = {
    "prepare_qkv": (0, 2, 7, 9),
    "compress": (0, 1, 4, 5),
    "select_entries": (0, 1, 4, 5),
    "sparse_attention": (0, 3, 4, 5, 8, 9),
}
NO_KERNEL = ("prepare_linear", "prepare_experts", "grouped_form")
# These are measured and checked as parts of select_entries and experts: their results differ
# between tables.
PREPARES = ("prepare_index_queries", "finish_experts")
# tests/gpu/test_sampling.py compares their results, which are sort keys, exactly.
CANDIDATES = ("best_candidates", "merge_candidates")
# Only steps that verify or make drafts call them. tests/ops/test_triton_drafts.py compares their
# results.
DRAFTS = (
    "continue_tokens",
    "accept_drafts",
    "make_blocks",
    "markov_logits",
    "score_streams",
    "draft_confidences",
)
# These are timed and checked as one operator: their intermediate results differ between tables.
EXPERTS = dict.fromkeys(("experts_dispatch", "experts_compute", "experts_combine"), "experts")
PLATFORMS = {"nvidia": Platform("nvidia", "sm90"), "amd": Platform("amd", "gfx942")}

Implementation = Callable[..., Any]
AtStep = Callable[[Chunks], OpCase]  # makes a case for a step


def model_cases(sizes: Sizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    """The cases of one step: every operator of a layer, the LM head and sampling."""
    for family in (*FAMILIES, "sampling"):
        yield from _cases(family).model_cases(sizes, draw, chunks)


def model_case(sizes: Sizes, draw: ModelDraw, operator: str, name: str, chunks: Chunks) -> OpCase:
    cases = model_cases(sizes, draw, chunks)
    return next(case for case in cases if (case.operator, case.name) == (operator, name))


def at_steps(sizes: Sizes, draw: ModelDraw, operator: str) -> list[AtStep]:
    """The model's cases of an operator, each as a function of the step."""
    names = [case.name for case in model_cases(sizes, draw, ()) if case.operator == operator]
    return [partial(model_case, sizes, draw, operator, name) for name in names]


def shared_cases(operator: str) -> tuple[OpCase, ...]:
    """The small cases of an operator, which tests run too."""
    cases = chain.from_iterable(_cases(family).CASES for family in FAMILIES)
    return tuple(case for case in cases if case.operator == operator)


def _cases(family: str) -> Any:
    return importlib.import_module(f"finwhale.ops.{family}.cases")


def kernels(ops: Ops) -> dict[str, Implementation]:
    """The implementations of a table that are not references."""
    names = [EXPERTS.get(name, name) for name, _ in ops.implementations()]
    chosen = {name: implementation(ops, name) for name in dict.fromkeys(names)}
    return {
        name: fn
        for name, fn in chosen.items()
        if not fn.__module__.endswith(".ref")
        and name not in (*NO_KERNEL, *PREPARES, *CANDIDATES, *DRAFTS)
    }


def implementation(ops: Ops, name: str) -> Implementation:
    """An operator of a table. "experts" calls three operators; "sample" returns a tuple."""
    fn: Implementation = getattr(ops, "experts_compute" if name == "experts" else name)
    if name not in ("experts", "sample"):
        return fn

    def sample(*args: Any) -> tuple[Tensor, Tensor]:
        tokens = fn(*args)
        return tokens.ids_S, tokens.valid_S

    def experts(*args: Any) -> Tensor:
        return ops.experts(*args)

    call: Implementation = sample if name == "sample" else experts
    call.__module__, call.__qualname__ = fn.__module__, fn.__qualname__
    return call


# --- Timing ---------------------------------------------------------------------------------------


def time_calls(calls: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Microseconds of one call, measured by replaying a graph that makes all calls once."""
    warm_up(calls[:2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return _timed(graph.replay, REPLAYS, len(calls), 5)


def _timed(
    run: Callable[[], object], repeats: int, calls: int = 1, untimed: int = 0
) -> dict[str, float]:
    """Microseconds of one call of `run`'s calls. The host never waits between the repetitions."""
    events = [(_event(), _event()) for _ in range(untimed + repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return summary([start.elapsed_time(end) * 1e3 / calls for start, end in events[untimed:]])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def largest_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference of a float result, in units of that result's largest value."""
    errors = [0.0]
    for one, other in zip(found, wanted, strict=True):
        if other.dtype.is_floating_point and other.numel():
            difference = (one.float() - other.float()).abs().max() / other.float().abs().max()
            errors.append(difference.item())
    return max(errors)


def step(batch: int, context: int) -> Chunks:
    """The chunks of a timed batch: decodes at `context`, or one prompt."""
    return ((context - 1, context),) * batch if batch <= MAX_DECODE else ((0, batch),)


@dataclass(frozen=True, slots=True)
class Weights:
    """A case's weight.

    Attributes:
        ready: as the table's operators read it.
        plain: in float32; None: too large, or there is no weight.
    """

    ready: Any
    plain: Any


def make_weight(case: OpCase, ops: Ops) -> Weights:
    stored = case.weight() if case.weight else None
    plain = None if _is_large(stored) else plain_weight(stored)
    return Weights(ready(ops, stored), plain)


def make_args(case: OpCase, weight: Weights) -> Args:
    return case.args(weight.ready) if case.weight else case.args()


def _is_large(stored: Any) -> bool:
    """Whether the float32 weight exceeds PLAIN_BYTES. w13 has two thirds of the experts' values,
    two of them in each byte.
    """
    return isinstance(stored, ExpertWeight) and 12 * stored.w13.numel() > PLAIN_BYTES


def reference_args(case: OpCase, args: Args, weight: Weights) -> Args:
    """Convert packed arguments to the reference's."""
    if weight.ready is not None:
        args = tuple(weight.plain if arg is weight.ready else arg for arg in args)
    return plain_args(case.operator, args)


def kernel_results(case: OpCase, kernel: Implementation, args: Args) -> list[Tensor]:
    """Call a kernel of a packed table; returns its results in the reference's form."""
    return plain_results(case.operator, args, results(kernel, args, case.written))


def measure(case: OpCase, chunks: Chunks, ops: Ops, reference: Ops) -> dict[str, Any]:
    """Measure one case. Weights that are too large are not compared with the reference."""
    kernel, definition = (implementation(table, case.operator) for table in (ops, reference))
    turns = max(2, min(MAX_TURNS, -(-ROTATED_BYTES // max(1, int(case.bytes)))))
    weights = [make_weight(case, ops)]
    # Each turn of "experts" chooses other experts, so one set of weights is enough.
    if case.weight is not None and case.operator != "experts":
        weights += [Weights(ready(ops, case.weight()), None) for _ in range(turns - 1)]
    inputs = [make_args(case, weights[i % len(weights)]) for i in range(turns)]
    error = base = None
    if weights[0].ready is None or weights[0].plain is not None:
        plain = reference_args(case, inputs[0], weights[0])
        found = kernel_results(case, kernel, inputs[0])
        wanted = _as_wide(case.operator, inputs[0], results(definition, plain, case.written))
        error = largest_error(found, wanted)
        # Time the reference once: it is slow.
        base = _timed(lambda: definition(*plain), 1)
    ours = time_calls([lambda args=args: kernel(*args) for args in inputs])  # type: ignore[misc]
    return {
        "operator": case.operator,
        "case": case.name,
        "tokens": num_tokens(chunks),
        "last_position": max((end for _, end in chunks), default=0) - 1,
        "kernel": f"{kernel.__module__}.{kernel.__qualname__}",
        "kernel_us": ours,
        "reference_us": base,
        "bytes": round(case.bytes),
        "operations": round(case.operations),
        "floor_us": round(case.floor_us, 3),
        "share_of_floor": round(case.floor_us / ours["median"], 4),
        "error": error,
    }


def run_timing(
    sizes: Sizes, ops: Ops, operators: Sequence[str], batches: Sequence[int], context: int
) -> list[Any]:
    """Measure each kernel at each batch, and print a line for it; returns the lines as dicts."""
    reference, draw = load_ops(Platform.detect(), reference=True), ModelDraw("cuda")
    chosen = [name for name in kernels(ops) if not operators or name in operators]
    print(
        f"{'operator':29}{'tokens':>7}{'us':>9}{'p10':>9}{'p90':>9}{'reference':>11}"
        f"{'MB':>9}{'floor':>8}{'share':>7}{'error':>9}"
    )
    lines = []
    steps = [step(batch, context) for batch in batches]
    for cases in zip(*(model_cases(sizes, draw, chunks) for chunks in steps), strict=True):
        if cases[0].operator not in chosen:
            continue
        for case, batch, chunks in zip(cases, batches, steps, strict=True):
            line = measure(case, chunks, ops, reference)
            lines.append(line)
            us, base, error = line["kernel_us"], line["reference_us"], line["error"]
            print(
                f"{case.operator + ' ' + case.name:29}{batch:7}{us['median']:9.2f}"
                f"{us['p10']:9.2f}{us['p90']:9.2f}"
                + (f"{base['median']:11.2f}" if base else f"{'-':>11}")
                + f"{line['bytes'] / 1e6:9.2f}{line['floor_us']:8.2f}{line['share_of_floor']:7.1%}"
                + (f"{error:9.1e}" if error is not None else f"{'-':>9}"),
                flush=True,
            )
            torch.cuda.empty_cache()
    return lines


# --- Checking -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check; `fault` is None if the check passed."""

    what: str
    fault: str | None


def compare(
    found: Sequence[Tensor],
    wanted: Sequence[Tensor],
    flips: float,
    tolerance: float = MODEL_TOLERANCE,
    flip: float = E4M3_FLIP,
) -> str | None:
    """Compare results; returns what is wrong, or None.

    Float results may differ by `tolerance` times the largest value: sums in another order differ
    by a few units of 2^-24 times the root of up to 2^15 terms. A bfloat16 result may differ by one
    rounding more, 2^-7 of the value. A share `flips` of the values may differ by one step of E4M3,
    or, for a coarser rounding, by `flip` times the largest value. Integer results (chosen experts)
    must agree, except in one row in a thousand, where two candidates can be closer than rounding.
    The float results of such rows are not compared.
    """
    same = None
    for one, other in zip(found, wanted, strict=True):
        floats = other.dtype.is_floating_point
        if one.dtype.is_floating_point != floats or one.shape != other.shape:
            return f"{one.dtype} {tuple(one.shape)}, wanted {other.dtype} {tuple(other.shape)}"
        if other.numel() == 0:
            continue
        if not floats:
            same = (one == other).reshape(len(one), -1).all(1)
            wrong = len(same) - int(same.sum())
            if wrong > -(-len(same) // 1000) or wrong == len(same):
                return f"{wrong} of {len(same)} rows have other choices"
            continue
        a, b = one.float(), other.float()
        if same is not None and len(a) == len(same):
            a, b = a[same], b[same]
        if not a.isfinite().all():
            return "not finite"
        unit = b.abs().max()
        rounding = 2.0**-7 if torch.bfloat16 in (one.dtype, other.dtype) else 0.0
        excess = (a - b).abs() - tolerance * unit - rounding * b.abs()
        off = (excess > 0).float().mean().item()
        step = E4M3_FLIP * b.abs() + 2.0**-9 * unit if flip == E4M3_FLIP else flip * unit
        jump = (excess - step).max().item()
        if off > flips or (flips and jump > 0):
            return f"{off:.2%} of values off, by up to {excess.max().item() / unit.item():.1e}"
    return None


def same_alone(
    case: OpCase, kernel: Implementation, args: Args, parts: Sequence[tuple[int, int]]
) -> str | None:
    """Check that tokens have the same bits alone, in other batches and in the whole batch."""
    count = max(end for _, end in parts)
    whole = kernel_results(case, kernel, args)
    for start, end in parts:
        part = take_tokens(args, case.by_token, start, end)
        found = kernel_results(case, kernel, part)
        for position, (one, other) in enumerate(zip(found, whole, strict=True)):
            if case.operator == "prepare_qkv" and position == 1:
                slots = write_slots(part[7], part[9])
                equal = torch.equal(one[slots], other[slots])
            else:
                equal = torch.equal(one, other[start:end])
            if not equal:
                return f"tokens {start} to {end} of {count} differ"
    return None


def mixed_step(count: int) -> Chunks:
    """A step of decodes at many positions; from 5 tokens on, half of it is a prefill chunk."""
    chunk = count // 2 if count >= 5 else 0
    decodes = tuple((2943 * i % 6000, 2943 * i % 6000 + 1) for i in range(count - chunk))
    return (*decodes, (61, 61 + chunk)) if chunk else decodes


def check_case(case: OpCase, ops: Ops, reference: Ops, device: str) -> Verdict | None:
    """Check a shared case; None: packing or the table does not support its arguments."""
    given = to_device(case.args(), device)
    packed = ops.capabilities.packed_cache
    args = packed_args(case.operator, given) if packed else given
    if args is None:
        return None
    plain = plain_args(case.operator, args) if packed else args
    kernel, definition = (implementation(table, case.operator) for table in (ops, reference))
    wanted = results(definition, plain, case.written)
    try:
        args = tuple(ready(ops, arg) for arg in args)
        found = results(kernel, args, case.written)
    except ValueError as error:
        if packed and case.operator in ACTIVATIONS:
            return None
        return Verdict(f"case {case.name}", f"refused: {error}")
    if packed:
        found = plain_results(case.operator, args, found)
        wanted = _as_wide(case.operator, args, wanted)
    tolerance = case.tolerance
    if packed and case.operator in ACTIVATIONS:
        # The result of DeepGEMM's GEMMs is bfloat16.
        tolerance = HIDDEN_TOLERANCE if case.operator == "swiglu_mlp" else 2.0**-7
    return Verdict(f"case {case.name}", compare(found, wanted, case.flips, tolerance, case.flip))


def _as_wide(operator: str, args: Args, wanted: list[Tensor]) -> list[Tensor]:
    return plain_results(operator, args, wanted) if operator == "select_entries" else wanted


def check_model_case(
    at_step: AtStep, ops: Ops, reference: Ops, *, invariant: bool = False
) -> Iterator[Verdict]:
    """Check an operator at a model's sizes: against the reference, in other batches, with padding
    and with pages at high addresses.

    Args:
        invariant: the table is batch-invariant: every case must have the same bits in any batch.
    """
    case = at_step(())
    kernel, definition = (implementation(table, case.operator) for table in (ops, reference))
    weight = make_weight(case, ops)
    dtype = ""
    for count in CHECKED:
        args = make_args(at_step(mixed_step(count)), weight)
        plain = reference_args(case, args, weight)
        wanted = _as_wide(case.operator, args, results(definition, plain, case.written))
        found = kernel_results(case, kernel, args)
        if isinstance(args[0], Tensor):
            dtype = str(args[0].dtype).removeprefix("torch.")
        what = f"{case.name} {dtype} {count} tokens"
        yield Verdict(what, compare(found, wanted, case.flips, case.tolerance, case.flip))
    if case.by_token and (case.batch_invariant or invariant):
        parts = ANY_PARTS if invariant else PARTS
        args = make_args(at_step(mixed_step(max(end for _, end in parts))), weight)
        yield Verdict(f"{case.name} {dtype} batches", same_alone(case, kernel, args, parts))
    if case.operator in PAGED:
        yield Verdict(f"{case.name} padding", check_padding(at_step(mixed_step(4)), kernel))
        yield Verdict(f"{case.name} far pages", check_far_pages(at_step(mixed_step(9)), kernel))


def check_padding(case: OpCase, kernel: Implementation) -> str | None:
    """Check that padding tokens after a decode give finite values and change no other result."""
    args = case.args()
    alone = kernel_results(case, kernel, args)
    more = padded(args, PAGED[case.operator], 3)
    found = kernel_results(case, kernel, more)
    for position, one in enumerate(found):
        if one.dtype.is_floating_point and not one.isfinite().all():
            return "not finite"
        if len(one) == len(alone[position]) + 3:
            found[position] = one[:-3]
    return compare(found, alone, case.flips, case.tolerance, case.flip)


def check_far_pages(case: OpCase, kernel: Implementation) -> str | None:
    """Check that pages past 2^31 bytes give the same bits."""
    args = case.args()
    near = kernel_results(case, kernel, args)
    far = far_pages(args, FAR_BYTES)
    found = plain_results(case.operator, far, _last_rows(kernel, far, case.written))
    if case.operator == "select_entries":
        offset = (far[5].pages - args[5].pages).max() * far[5].rows_per_page
        found = [slots.sub(offset).where(slots >= 0, -1) for slots in found]
    for one, other in zip(found, near, strict=True):
        if not torch.equal(one[len(one) - len(other) :], other):
            return "differs"
    return None


def _last_rows(kernel: Implementation, args: Args, written: Sequence[int]) -> list[Tensor]:
    """Like `results`, but without a copy of the pools, which are large."""
    returned = kernel(*args)
    found = () if returned is None else (returned,)
    return [*found, *written_tensors(args, written)]


def check_large(at_step: AtStep, kernel: Implementation, values_a_token: int) -> str | None:
    """Check that the last tokens of a batch with more than 2^31 values have the bits as alone."""
    count, rows = 2**31 // values_a_token + 500, LAST_ROWS
    case = at_step(mixed_step(rows))
    args = list(case.args())
    for i in case.by_token:
        big = args[i].new_zeros((count, *args[i].shape[1:]))
        big[-rows:] = args[i]
        args[i] = big
    last = [arg[-rows:] if i in case.by_token else arg for i, arg in enumerate(args)]
    alone = results(kernel, tuple(last), ())
    returned = kernel(*args)
    whole = returned if isinstance(returned, tuple) else (returned,)
    equal = all(torch.equal(a, b[-rows:]) for a, b in zip(alone, whole, strict=True))
    return None if equal else "differs"


def check_operator(
    operator: str,
    sizes: Sizes,
    draws: Sequence[ModelDraw],
    ops: Ops,
    reference: Ops,
    device: str = "cuda",
    *,
    invariant: bool = False,
) -> Iterator[Verdict]:
    """Check an operator on its shared cases, then at real sizes with each of `draws` (dtypes)."""
    for case in shared_cases(operator):
        verdict = check_case(case, ops, reference, device)
        if verdict is not None:
            yield verdict
    for draw in draws:
        for at_step in at_steps(sizes, draw, operator):
            yield from check_model_case(at_step, ops, reference, invariant=invariant)


def run_check(sizes: Sizes, ops: Ops, operators: Sequence[str], *, invariant: bool) -> int:
    """Run all checks and print a line for each; returns the number of failed checks."""
    reference = load_ops(Platform.detect(), reference=True)
    sizes = replace(sizes, n_routed_experts=min(sizes.n_routed_experts, CHECKED_EXPERTS))
    real, single = ModelDraw("cuda"), ModelDraw("cuda", torch.float32)
    large = {"mhc_post_pre": 4 * sizes.hidden_size, "mhc_post": 4 * sizes.hidden_size}
    failed = 0
    for operator, kernel in kernels(ops).items():
        if operators and operator not in operators:
            continue
        draws = (real,) if operator in (*ACTIVATIONS, "sample") else (real, single)
        for verdict in check_operator(operator, sizes, draws, ops, reference, invariant=invariant):
            failed += _show(operator, verdict)
        if operator in large and large[operator] > 4096:
            (at_step,) = at_steps(sizes, real, operator)
            fault = check_large(at_step, kernel, large[operator])
            failed += _show(operator, Verdict("past 2^31 values", fault))
        torch.cuda.empty_cache()
    print(f"{failed} checks failed" if failed else "all checks passed")
    return failed


def _show(operator: str, verdict: Verdict) -> int:
    print(f"{'FAIL' if verdict.fault else 'pass'} {operator} {verdict.what} {verdict.fault or ''}")
    sys.stdout.flush()
    return verdict.fault is not None


def least_bytes(sizes: Sizes, draw: ModelDraw, args: argparse.Namespace) -> float:
    """Bytes that the measured cases, or the checks, need at least; makes no tensor."""
    if args.check:
        return 4.0 * 2**31  # `check_large`: bfloat16 inputs and outputs
    steps = [step(batch, args.context) for batch in args.batches]
    cases = (case for chunks in steps for case in model_cases(sizes, draw, chunks))
    chosen = [one.bytes for one in cases if not args.operators or one.operator in args.operators]
    return max(chosen, default=0.0)


def main(argv: Sequence[str]) -> int:
    """Run `finwhale bench ops`. Returns 1 if a check failed, otherwise 0."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise FinwhaleError("bench ops measures a GPU, and torch sees none")
    if min(args.batches) < 1 or args.context < 1:
        parser.error("--batches and --context must be at least 1")
    sizes = CONFIGS[args.config].of_rank(args.tensor_parallel_size)
    needed = least_bytes(sizes, ModelDraw("cuda"), args)
    check_gpu_memory(needed, "the largest case", "choose other --operators or smaller --batches")
    ops = load_ops(PLATFORMS[args.table], batch_invariant=args.batch_invariant)
    with torch.inference_mode():
        if args.check:
            failed = run_check(sizes, ops, args.operators, invariant=args.batch_invariant)
            return int(failed > 0)
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
    parser = new_parser("ops", __doc__, "ops.jsonl")
    add = parser.add_argument
    add("--config", choices=CONFIGS, default="flash", help="sizes of this model")
    add("--table", choices=PLATFORMS, default="nvidia", help="measure this platform's kernels")
    about = f"numbers of tokens: up to {MAX_DECODE}, that many decodes; beyond it, one prompt"
    add("--batches", type=int, nargs="+", default=list(BATCHES), help=about)
    add("--context", type=int, default=8192, help="number of tokens before a decode")
    add("--operators", nargs="+", default=[], help="measure these only")
    add("--check", action="store_true", help="compare with the references instead of timing")
    add("--batch-invariant", action="store_true", help="use the batch-invariant operators")
    about = "use the sizes of one rank of this many"
    add("--tensor-parallel-size", type=int, choices=RANKS, default=1, help=about)
    return parser
