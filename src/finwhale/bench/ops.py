"""Operators on a GPU: every kernel beside its reference, at the model's sizes.

A time is that of one call in a captured graph whose calls take turns over inputs that together
exceed L2. The floor is the bytes that any implementation must move, over the measured bandwidth.
`--check` compares instead of timing: with the references, with outliers, and bit for bit whatever
else is in the batch.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale.bench.record import RESULTS, append_record, stamp, summary
from finwhale.errors import FinwhaleError
from finwhale.ops import Ops, load_ops
from finwhale.ops.case import OpCase
from finwhale.ops.mhc import HcHeadWeight, MhcParams, MhcWeight
from finwhale.platform import Platform

BATCHES = (1, 8, 32, 128, 8192)
REPLAYS = 50
# More than an H200's L2 (60 MB), and as many turns at most: smaller inputs stay in L2, where in a
# model too the operator before has just left them.
ROTATED_BYTES = 128 * 2**20
MAX_TURNS = 64
CHECKED = (0, 1, 3, 17, 130, 256, 257, 1000)  # tokens of a check
READ_RATE = 4.39e12  # bytes a second, measured on an H200
FAMILIES = ("norm", "linear", "mhc", "attention", "compressor", "indexer", "moe", "sampling")
PLATFORMS = {"nvidia": Platform("nvidia", "sm90"), "amd": Platform("amd", "gfx942")}

Args = tuple[Any, ...]
Implementation = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the operators' shapes follow from, by the checkpoint's names."""

    hidden_size: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    index_n_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    vocab_size: int = 129280
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128


CONFIGS = {
    "flash": Sizes(4096, 64, 512, 1024, 64, 256, 6),
    "pro": Sizes(7168, 128, 512, 1536, 64, 384, 6),
    "demo": Sizes(256, 8, 128, 128, 16, 16, 4, vocab_size=4096),
}


# --- What is measured -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operator at the model's sizes.

    Attributes:
        args: makes its arguments for N tokens.
        token_bytes, once_bytes: what must be moved for each token, and once a call.
        by_token: positions of arguments with a row for each token.
        written: positions of arguments that it writes.
        flips: the share of results that may lie one E4M3 step off (a rounding's boundary).
    """

    operator: str
    name: str
    args: Callable[[int], Args]
    token_bytes: int
    once_bytes: int
    by_token: tuple[int, ...]
    written: tuple[int, ...] = ()
    flips: float = 0.0

    def bytes(self, num_tokens: int) -> int:
        return num_tokens * self.token_bytes + self.once_bytes


class Draw:
    """Random tensors on a device, the same ones each time; activations hold rare outliers."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device) * scale

    def activation(self, *shape: int) -> Tensor:
        x = self.normal(*shape).to(self.dtype)
        if x.numel():
            x[..., :: max(1, shape[-1] // 3)] *= 100
        return x

    def whole(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device=self.device)

    def rotation(self, num_tokens: int, width: int) -> Tensor:
        angle = self.normal(num_tokens, width // 2, scale=10.0)
        return torch.stack((angle.cos(), angle.sin()), -1)


def works(sizes: Sizes, draw: Draw) -> tuple[Work, ...]:
    """Every operator that a portable kernel may exist for."""
    return (*_mhc(sizes, draw), *_attention(sizes, draw), *_router(sizes, draw))


def _mhc(s: Sizes, draw: Draw) -> Iterator[Work]:
    D, size = s.hidden_size, draw.dtype.itemsize
    params = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-6)

    def weight() -> MhcWeight:
        fn = draw.normal(24, 4 * D, scale=(4 * D) ** -0.5)
        return MhcWeight(fn, draw.normal(24).abs(), draw.normal(24), draw.normal(D))

    def post(N: int) -> Args:
        res = draw.normal(N, 4, 4).softmax(-1)
        return draw.activation(N, D), draw.normal(N, 4).abs(), res, draw.activation(N, 4, D)

    def head(N: int) -> Args:
        fn = draw.normal(4, 4 * D, scale=(4 * D) ** -0.5)
        w = HcHeadWeight(fn, draw.normal(1).abs(), draw.normal(4), draw.normal(D))
        return draw.activation(N, 4, D), w, params

    fn_bytes = 24 * 4 * D * 4
    yield Work(
        operator="mhc_post_pre",
        name="",
        args=lambda N: (*post(N), weight(), params),
        token_bytes=10 * D * size + 160,
        once_bytes=fn_bytes + 4 * D,
        by_token=(0, 1, 2, 3),
    )
    yield Work(
        operator="mhc_pre",
        name="",
        args=lambda N: (draw.activation(N, 4, D), weight(), params),
        token_bytes=5 * D * size + 80,
        once_bytes=fn_bytes + 4 * D,
        by_token=(0,),
    )
    yield Work(
        operator="mhc_post",
        name="",
        args=post,
        token_bytes=9 * D * size + 80,
        once_bytes=0,
        by_token=(0, 1, 2, 3),
    )
    yield Work(
        operator="hc_head",
        name="",
        args=head,
        token_bytes=5 * D * size,
        once_bytes=fn_bytes // 6 + 4 * D,
        by_token=(0,),
    )


def _attention(s: Sizes, draw: Draw) -> Iterator[Work]:
    A, C, R = s.num_attention_heads, s.head_dim, s.qk_rope_head_dim
    I, J = s.index_n_heads, s.index_head_dim  # noqa: E741
    size = draw.dtype.itemsize
    for name, D in (("hidden", s.hidden_size), ("q_lora", s.q_lora_rank)):
        yield Work(
            operator="rms_norm",
            name=name,
            args=lambda N, D=D: (draw.activation(N, D), draw.normal(D), 1e-6),  # type: ignore[misc]
            token_bytes=2 * D * size,
            once_bytes=4 * D,
            by_token=(0,),
        )
    yield Work(
        operator="prepare_query",
        name="",
        args=lambda N: (draw.activation(N, A, C), draw.rotation(N, R), 1e-6),
        token_bytes=2 * A * C * size + 4 * R,
        once_bytes=0,
        by_token=(0, 1),
    )
    yield Work(
        operator="inverse_rope",
        name="",
        args=lambda N: (draw.activation(N, A, C), draw.rotation(N, R)),
        token_bytes=2 * A * R * size + 4 * R,
        once_bytes=0,
        by_token=(0, 1),
    )

    def store(N: int) -> Args:
        rows = torch.zeros(2 * N + 1, C, dtype=draw.dtype, device=draw.device)
        slots = torch.randperm(2 * N + 1, generator=draw.generator, device=draw.device)[:N]
        kv, norm, rotation = draw.activation(N, C), draw.normal(C), draw.rotation(N, R)
        return kv, norm, rotation, 1e-6, True, rows, slots

    yield Work(
        operator="store_window",
        name="rounded",
        args=store,
        token_bytes=2 * C * size + 4 * R + 8,
        once_bytes=4 * C,
        by_token=(0, 2, 6),
        written=(5,),
        flips=0.01,
    )
    yield Work(
        operator="prepare_index_query",
        name="rounded",
        args=lambda N: (draw.activation(N, I, J), draw.rotation(N, R), True),
        token_bytes=2 * I * J * size + 4 * R,
        once_bytes=0,
        by_token=(0, 1),
        flips=0.01,
    )


def _router(s: Sizes, draw: Draw) -> Iterator[Work]:
    D, E, K = s.hidden_size, s.n_routed_experts, s.num_experts_per_tok

    def score(N: int) -> Args:
        gate, bias = draw.normal(E, D, scale=D**-0.5), draw.normal(E, scale=0.1)
        return draw.normal(N, D).to(draw.dtype), gate, bias, K, 1.5

    def hashed(N: int) -> Args:
        x, gate, _, _, scaling = score(N)
        first = draw.whole(E, s.vocab_size, 1)
        table = (first + torch.arange(K, device=draw.device) * (E // K)) % E
        return x, gate, table, draw.whole(s.vocab_size, N), scaling

    token_bytes = D * draw.dtype.itemsize + 12 * K
    yield Work(
        operator="route_by_score",
        name="",
        args=score,
        token_bytes=token_bytes,
        once_bytes=4 * E * D,
        by_token=(0,),
    )
    yield Work(
        operator="route_by_hash",
        name="",
        args=hashed,
        token_bytes=token_bytes,
        once_bytes=4 * K * D,
        by_token=(0, 3),
    )


def kernels(table: str) -> dict[str, Implementation]:
    """The implementations of a platform's table that are not references, or every Triton kernel."""
    if table in PLATFORMS:
        ops = load_ops(PLATFORMS[table])
        chosen = {name: getattr(ops, name) for name, _ in ops.implementations()}
        return {k: fn for k, fn in chosen.items() if not fn.__module__.endswith(".ref")}
    found = {}
    for family in FAMILIES:
        name = f"finwhale.ops.{family}.triton"
        if importlib.util.find_spec(name) is not None:
            module = importlib.import_module(name)
            for field in dataclasses.fields(Ops):
                if hasattr(module, field.name):
                    found[field.name] = getattr(module, field.name)
    return found


# --- Timing ---------------------------------------------------------------------------------------


def time_calls(calls: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Microseconds of one call, over replays of a graph that makes all of them once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    events = [(_event(), _event()) for _ in range(REPLAYS + 5)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1e3 / len(calls) for start, end in events[5:]]
    return summary(times)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def results(fn: Implementation, args: Args, written: Sequence[int]) -> list[Tensor]:
    """What an operator returns, then what it writes; the arguments are left as they are."""
    args = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args)
    returned = fn(*args)
    if not isinstance(returned, tuple):
        returned = () if returned is None else (returned,)
    return [*returned, *(args[i] for i in written)]


def largest_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Over the float results: the largest difference, over the largest value."""
    errors = [0.0]
    for one, other in zip(found, wanted, strict=True):
        if other.dtype.is_floating_point and other.numel():
            difference = (one.float() - other.float()).abs().max() / other.float().abs().max()
            errors.append(difference.item())
    return max(errors)


def measure(work: Work, num_tokens: int, kernel: Implementation, reference: Implementation) -> Any:
    """One line of the table, as a dict."""
    size = work.bytes(num_tokens)
    turns = max(2, min(MAX_TURNS, -(-ROTATED_BYTES // size)))
    inputs = [work.args(num_tokens) for _ in range(turns)]
    error = largest_error(
        results(kernel, inputs[0], work.written), results(reference, inputs[0], work.written)
    )
    ours = time_calls([lambda args=args: kernel(*args) for args in inputs])  # type: ignore[misc]
    theirs = time_calls([lambda args=args: reference(*args) for args in inputs])  # type: ignore[misc]
    floor = size / READ_RATE * 1e6
    return {
        "operator": work.operator,
        "case": work.name,
        "tokens": num_tokens,
        "kernel": f"{kernel.__module__}.{kernel.__qualname__}",
        "kernel_us": ours,
        "reference_us": theirs,
        "bytes": size,
        "floor_us": round(floor, 3),
        "share_of_floor": round(floor / ours["median"], 4),
        "error": error,
    }


def run_timing(all_works: Sequence[Work], table: str, batches: Sequence[int]) -> list[Any]:
    reference = load_ops(Platform.detect(), reference=True)
    chosen = kernels(table)
    print(
        f"{'operator':29}{'tokens':>7}{'us':>9}{'p10':>9}{'p90':>9}{'reference':>11}"
        f"{'times':>7}{'MB':>9}{'floor':>8}{'share':>7}{'error':>9}"
    )
    lines = []
    for work in all_works:
        if work.operator not in chosen:
            continue
        for num_tokens in batches:
            line = measure(
                work, num_tokens, chosen[work.operator], getattr(reference, work.operator)
            )
            lines.append(line)
            us, base = line["kernel_us"], line["reference_us"]["median"]
            print(
                f"{work.operator + ' ' + work.name:29}{num_tokens:7}{us['median']:9.2f}"
                f"{us['p10']:9.2f}{us['p90']:9.2f}{base:11.2f}{base / us['median']:7.1f}"
                f"{line['bytes'] / 1e6:9.2f}{line['floor_us']:8.2f}{line['share_of_floor']:7.1%}"
                f"{line['error']:9.1e}",
                flush=True,
            )
            torch.cuda.empty_cache()
    return lines


# --- Checking -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    what: str
    fault: str | None


def compare(
    found: Sequence[Tensor], wanted: Sequence[Tensor], flips: float, tolerance: float = 2e-5
) -> str | None:
    """What is wrong, or None.

    Float results may differ by `tolerance` of the largest value (sums in another order: a few
    units of 2^-24 times the root of up to 2^15 terms), bfloat16 by one rounding more, 2^-7 of the
    value, and a share `flips` by one step of E4M3. Whole results (chosen experts) must agree but
    for one row in a thousand, where two candidates may lie closer than rounding; those rows are
    left out of what belongs to them.
    """
    same = None
    for one, other in zip(found, wanted, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape:
            return f"{one.dtype} {tuple(one.shape)}, wanted {other.dtype} {tuple(other.shape)}"
        if other.numel() == 0:
            continue
        if not other.dtype.is_floating_point:
            same = (one == other).flatten(1).all(1)
            wrong = len(same) - int(same.sum())
            if wrong > -(-len(same) // 1000) or wrong == len(same):
                return f"{wrong} of {len(same)} rows chose otherwise"
            continue
        a, b = one.float(), other.float()
        if same is not None and len(a) == len(same):
            a, b = a[same], b[same]
        if not a.isfinite().all():
            return "not finite"
        unit = b.abs().max()
        rounding = 2.0**-7 if other.dtype == torch.bfloat16 else 0.0
        excess = (a - b).abs() - tolerance * unit - rounding * b.abs()
        off = (excess > 0).float().mean().item()
        step = (excess - 2.0**-3 * b.abs() - 2.0**-9 * unit).max().item()
        if off > flips or (flips and step > 0):
            return f"{off:.2%} of values off, by up to {excess.max().item() / unit.item():.1e}"
    return None


def same_alone(work: Work, kernel: Implementation, num_tokens: int) -> str | None:
    """Bit for bit: tokens alone, in other batches and in the whole batch."""
    args = work.args(num_tokens)
    whole = results(kernel, args, work.written)
    for start, end in ((0, 1), (num_tokens - 1, num_tokens), (5, 22), (0, 200), (100, 230)):
        part = tuple(
            arg[start:end].contiguous() if i in work.by_token else arg for i, arg in enumerate(args)
        )
        found = results(kernel, part, work.written)
        for one, other in zip(found, whole, strict=True):
            if work.written:  # rows of a pool, by the slots that are the last argument
                slots = args[work.by_token[-1]][start:end]
                equal = torch.equal(one[slots], other[slots])
            else:
                equal = torch.equal(one, other[start:end])
            if not equal:
                return f"tokens {start} to {end} of {num_tokens} differ"
    return None


def shared_cases(operator: str) -> tuple[OpCase, ...]:
    """Those of `cases.py` for an operator."""
    cases: list[OpCase] = []
    for family in FAMILIES:
        name = f"finwhale.ops.{family}.cases"
        if family != "sampling" and importlib.util.find_spec(name) is not None:
            cases += importlib.import_module(name).CASES
    return tuple(case for case in cases if case.operator == operator)


def to_device(value: Any, device: str) -> Any:
    """A case's argument with its tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return type(value)(**{f.name: to_device(getattr(value, f.name), device) for f in fields})
    return value


def check_operator(
    operator: str,
    kernel: Implementation,
    reference: Implementation,
    sets: Sequence[Sequence[Work]],
    device: str = "cuda",
) -> Iterator[Verdict]:
    """Shared cases in float32, then real sizes in each of `sets`, one for each dtype."""
    for case in shared_cases(operator):
        args = tuple(to_device(arg, device) for arg in case.args())
        found, wanted = (results(fn, args, case.written) for fn in (kernel, reference))
        yield Verdict(f"case {case.name}", compare(found, wanted, case.flips))
    for all_works in sets:
        for work in all_works:
            if work.operator != operator:
                continue
            for num_tokens in CHECKED:
                args = work.args(num_tokens)
                found, wanted = (results(fn, args, work.written) for fn in (kernel, reference))
                dtype = str(args[0].dtype).removeprefix("torch.")
                what = f"{work.name} {dtype} {num_tokens} tokens"
                yield Verdict(what, compare(found, wanted, work.flips))
            yield Verdict(f"{work.name} {dtype} batches", same_alone(work, kernel, 300))


def check_large(work: Work, kernel: Implementation, values_a_token: int) -> Verdict:
    """Offsets past 2^31: the last tokens of a batch that long, bit for bit as alone."""
    num_tokens = 2**31 // values_a_token + 500
    rows = 5
    args = list(work.args(rows))
    for i in work.by_token:
        big = args[i].new_zeros((num_tokens, *args[i].shape[1:]))
        big[-rows:] = args[i]
        args[i] = big
    last = [arg[-rows:] if i in work.by_token else arg for i, arg in enumerate(args)]
    alone = results(kernel, tuple(last), ())
    returned = kernel(*args)
    whole = returned if isinstance(returned, tuple) else (returned,)
    equal = all(torch.equal(a, b[-rows:]) for a, b in zip(alone, whole, strict=True))
    return Verdict(f"{num_tokens} tokens, past 2^31 values", None if equal else "differs")


def run_check(sizes: Sizes, table: str) -> int:
    """Print a line a check; the number that failed."""
    reference = load_ops(Platform.detect(), reference=True)
    sets = [works(sizes, Draw("cuda", dtype)) for dtype in (torch.bfloat16, torch.float32)]
    D, A, C = sizes.hidden_size, sizes.num_attention_heads, sizes.head_dim
    large = {"mhc_post_pre": 4 * D, "mhc_post": 4 * D, "prepare_query": A * C}
    failed = 0
    for operator, kernel in kernels(table).items():
        if not any(work.operator == operator for work in sets[0]):
            continue
        verdicts = check_operator(operator, kernel, getattr(reference, operator), sets)
        for verdict in verdicts:
            failed += _show(operator, verdict)
        if operator in large and 4 * D > 4096:
            work = next(work for work in sets[0] if work.operator == operator)
            failed += _show(operator, check_large(work, kernel, large[operator]))
        torch.cuda.empty_cache()
    print(f"{failed} checks failed" if failed else "all checks passed")
    return failed


def _show(operator: str, verdict: Verdict) -> int:
    print(f"{'FAIL' if verdict.fault else 'pass'} {operator} {verdict.what} {verdict.fault or ''}")
    sys.stdout.flush()
    return verdict.fault is not None


def main(argv: Sequence[str]) -> int:
    """`finwhale bench ops`: 0, or 1 where a check failed."""
    parser = argparse.ArgumentParser(
        prog="finwhale bench ops",
        description=(__doc__ or "").split("\n\n", 1)[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--config", choices=CONFIGS, default="flash", help="whose sizes")
    parser.add_argument(
        "--table",
        choices=("triton", *PLATFORMS),
        default="triton",
        help="every portable Triton kernel, or what a platform's table uses",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="tokens")
    parser.add_argument("--check", action="store_true", help="compare instead of timing")
    parser.add_argument("--out", type=Path, help=f"JSONL to append to, as {RESULTS}/ops.jsonl")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise FinwhaleError("bench ops measures a GPU, and torch sees none")
    if min(args.batches) < 1:
        parser.error("--batches must be at least 1")
    sizes = CONFIGS[args.config]
    with torch.inference_mode():
        if args.check:
            return int(run_check(sizes, args.table) > 0)
        all_works = works(sizes, Draw("cuda", torch.bfloat16))
        lines = run_timing(all_works, args.table, args.batches)
    record = stamp(("torch", "triton")) | {
        "benchmark": "ops",
        "command": shlex.join(["finwhale", "bench", "ops", *argv]),
        "config": args.config,
        "table": args.table,
        "read_bytes_per_s": READ_RATE,
        "results": lines,
    }
    if args.out:
        append_record(args.out, record)
        print(f"recorded in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
