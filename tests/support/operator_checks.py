"""Checks of operators on a GPU against their references, for tests and check_operators.py.

Each result is compared with outliers, padding and far pages, and bit for bit in other batches.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from tests.support.checked_case import (
    E4M3_FLIP,
    HIDDEN_TOLERANCE,
    MODEL_TOLERANCE,
    CheckedCase,
    checked,
)
from tests.support.op_arguments import results, take_tokens, written_tensors
from tests.support.op_case import Args, Chunks, ModelDraw, OpSizes, num_tokens, to_device
from tests.support.packing import (
    ACTIVATIONS,
    WINDOW_WRITERS,
    far_pages,
    packed_args,
    padded,
    plain_args,
    plain_results,
    plain_weight,
)
from tools.operators import (
    FAMILIES,
    Kernel,
    implementation,
    model_cases,
    ready,
)
from torch import Tensor

from finwhale.ops import Ops
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.slots import write_slots

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
# The operators that read pages, and the positions of their arguments that grow with the step.
PAGED = {
    "prepare_qkv": (0, 2, 4, 5),
    "store_window_rows": (0, 2, 3),
    "compress": (0, 1),
    "select_entries": (0, 1, 2, 4),
    "sparse_attention": (0, 3, 4, 5, 8, 9),
}

AtStep = Callable[[Chunks], CheckedCase]  # makes a case for a step


def model_case(
    sizes: OpSizes, draw: ModelDraw, operator: str, name: str, chunks: Chunks
) -> CheckedCase:
    cases = model_cases(sizes, draw, chunks)
    found = next(case for case in cases if (case.operator, case.name) == (operator, name))
    return checked(found, draw.dtype)


def at_steps(sizes: OpSizes, draw: ModelDraw, operator: str) -> list[AtStep]:
    """The model's cases of an operator, each as a function of the step."""
    names = [case.name for case in model_cases(sizes, draw, ()) if case.operator == operator]
    return [partial(model_case, sizes, draw, operator, name) for name in names]


def shared_cases(operator: str) -> tuple[CheckedCase, ...]:
    """The small cases of an operator, which tests run too."""
    modules = (importlib.import_module(f"tests.support.cases.{family}") for family in FAMILIES)
    cases = chain.from_iterable(module.CASES for module in modules)
    return tuple(case for case in cases if case.operator == operator)


@dataclass(frozen=True, slots=True)
class Weights:
    """A case's weight.

    Attributes:
        ready: as the table's operators read it.
        plain: in float32; None: too large, or there is no weight.
    """

    ready: Any
    plain: Any


def make_weight(case: CheckedCase, ops: Ops) -> Weights:
    stored = case.weight() if case.weight else None
    plain = None if _is_large(stored) else plain_weight(stored)
    return Weights(ready(ops, stored), plain)


def make_args(case: CheckedCase, weight: Weights) -> Args:
    return case.args(weight.ready) if case.weight else case.args()


def _is_large(stored: Any) -> bool:
    """Whether the float32 weight exceeds PLAIN_BYTES. w13 has two thirds of the experts' values,
    two of them in each byte.
    """
    return isinstance(stored, ExpertWeight) and 12 * stored.w13.numel() > PLAIN_BYTES


def reference_args(case: CheckedCase, args: Args, weight: Weights) -> Args:
    """Convert packed arguments to the reference's."""
    if weight.ready is not None:
        args = tuple(weight.plain if arg is weight.ready else arg for arg in args)
    return plain_args(case.operator, args)


def kernel_results(case: CheckedCase, kernel: Kernel, args: Args) -> list[Tensor]:
    """Call a kernel of a packed table; returns its results in the reference's form."""
    return plain_results(case.operator, args, results(kernel, args, case.written))


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
    case: CheckedCase, kernel: Kernel, args: Args, parts: Sequence[tuple[int, int]]
) -> str | None:
    """Check that tokens have the same bits alone, in other batches and in the whole batch."""
    count = max(end for _, end in parts)
    whole = kernel_results(case, kernel, args)
    for start, end in parts:
        part = take_tokens(args, case.by_token, start, end)
        found = kernel_results(case, kernel, part)
        for position, (one, other) in enumerate(zip(found, whole, strict=True)):
            if case.operator in WINDOW_WRITERS and position == len(found) - 1:
                slots = write_slots(part[-2], part[-1].table)
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


def check_case(case: CheckedCase, ops: Ops, reference: Ops, device: str) -> Verdict | None:
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
    kernel = implementation(ops, case.operator)
    weight = make_weight(case, ops)
    for count in CHECKED:
        yield check_step(at_step, mixed_step(count), weight, ops, reference)
    if case.by_token and (case.batch_invariant or invariant):
        parts = ANY_PARTS if invariant else PARTS
        args = make_args(at_step(mixed_step(max(end for _, end in parts))), weight)
        yield Verdict(f"{case.name} batches", same_alone(case, kernel, args, parts))
    if case.operator in PAGED:
        yield Verdict(f"{case.name} padding", check_padding(at_step(mixed_step(4)), kernel))
        yield Verdict(f"{case.name} far pages", check_far_pages(at_step(mixed_step(9)), kernel))


def check_step(
    at_step: AtStep, chunks: Chunks, weight: Weights, ops: Ops, reference: Ops
) -> Verdict:
    """Check an operator in one step against the reference."""
    case = at_step(())
    kernel, definition = (implementation(table, case.operator) for table in (ops, reference))
    args = make_args(at_step(chunks), weight)
    plain = reference_args(case, args, weight)
    wanted = _as_wide(case.operator, args, results(definition, plain, case.written))
    found = kernel_results(case, kernel, args)
    dtype = str(args[0].dtype).removeprefix("torch.") if isinstance(args[0], Tensor) else ""
    what = f"{case.name} {dtype} {num_tokens(chunks)} tokens"
    return Verdict(what, compare(found, wanted, case.flips, case.tolerance, case.flip))


def check_padding(case: CheckedCase, kernel: Kernel) -> str | None:
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


def check_far_pages(case: CheckedCase, kernel: Kernel) -> str | None:
    """Check that pages past 2^31 bytes give the same bits."""
    args = case.args()
    near = kernel_results(case, kernel, args)
    far = far_pages(args, FAR_BYTES)
    found = plain_results(case.operator, far, _last_rows(kernel, far, case.written))
    if case.operator == "select_entries":
        table = far[2].table
        offset = (table.pages - args[2].table.pages).max() * table.rows_per_page
        found = [slots.sub(offset).where(slots >= 0, -1) for slots in found]
    for one, other in zip(found, near, strict=True):
        if not torch.equal(one[len(one) - len(other) :], other):
            return "differs"
    return None


def _last_rows(kernel: Kernel, args: Args, written: Sequence[int]) -> list[Tensor]:
    """Like `results`, but without a copy of the pools, which are large."""
    returned = kernel(*args)
    found = () if returned is None else (returned,)
    return [*found, *written_tensors(args, written)]


def check_large(at_step: AtStep, kernel: Kernel, values_a_token: int) -> str | None:
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
    sizes: OpSizes,
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
