"""The checks of operators: their verdicts of a packed table made from the references.

The table turns its packed arguments into plain ones, calls the reference and packs what it wrote,
so every check must pass; with one operator changed, that operator's must fail.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import operator_checks
from tests.support.checked_case import CheckedCase, checked
from tests.support.op_arguments import take_tokens
from tests.support.op_case import CONFIGS, Args, ModelDraw
from tests.support.packed_pools import pack_keys, pack_rows
from tests.support.packing import ACTIVATIONS, WINDOW_WRITERS, plain_args
from tools.operators import model_cases
from torch import Tensor

from finwhale.ops import Ops, load_ops
from finwhale.ops.moe import Dispatched
from finwhale.ops.paging import Tokens
from finwhale.platform import Platform

REFERENCE = load_ops(Platform.cpu(), reference=True)
SIZES = replace(CONFIGS["demo"], vocab_size=300)
DRAW = ModelDraw("cpu")
CASES = tuple(checked(case, DRAW.dtype) for case in model_cases(SIZES, DRAW, ()))
OPERATORS = sorted({case.operator for case in CASES})


def packed_operator(name: str) -> Callable[..., Any]:
    """A reference that takes and gives what a packed table does; padding is cut off, put back."""
    definition = getattr(REFERENCE, name)

    def run(*args: Any) -> Any:
        tokens = next((arg for arg in args if isinstance(arg, Tokens)), None)
        count = len(tokens.positions) if tokens else 0
        real = int((tokens.positions >= 0).sum()) if tokens else 0
        used = take_tokens(args, operator_checks.PAGED[name], 0, real) if real < count else args
        plain = plain_args(name, used)
        out = definition(*plain)
        pack(name, used, plain)
        if isinstance(out, Tensor) and out.dtype == torch.float32 and name != "rms_norm":
            out = out.to(result_dtype(args))
        if name == "sparse_attention":
            for written in args[8:]:
                written[real:] = 0
        elif isinstance(out, Tensor) and tokens:
            out = F.pad(out, (0, 0, 0, count - real))
        return out

    run.__module__, run.__qualname__ = "packed", name
    return run


def result_dtype(args: Args) -> torch.dtype:
    wanted = getattr(args[1], "out_dtype", None)
    return wanted or torch.bfloat16


def pack(name: str, args: Args, plain: Args) -> None:
    """Write to the packed arguments what was written to the plain ones."""
    if name == "sparse_attention":
        args[8].copy_(plain[8])
    elif name in WINDOW_WRITERS:
        rows, rope = args[-1].table.rows_per_page, 2 * args[-3].rotary.shape[1]
        args[-1].pool.copy_(pack_rows(plain[-1].pool, rows, rope))
    elif name == "compress":
        for part, written in zip(args[0], plain[0], strict=True):
            rows = part.entries.table.rows_per_page
            if part.rounding == "key":
                packed = pack_keys(written.entries.pool, rows)
            else:
                packed = pack_rows(written.entries.pool, rows, 2 * args[2].shape[1])
            part.entries.pool.copy_(packed)


def token_by_token(case: CheckedCase) -> Callable[..., Any]:
    """A reference called for one token at a time: its bits then do not depend on the batch."""
    definition = getattr(REFERENCE, case.operator)

    def run(*args: Any) -> Any:
        count = len(args[case.by_token[0]])
        if not count:
            return definition(*args)
        found = [definition(*take_tokens(args, case.by_token, i, i + 1)) for i in range(count)]
        if isinstance(found[0], tuple):
            return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
        return torch.cat(found)

    return run


def packed_compute(x: Tensor, weights: Tensor, pairs: Dispatched, w: Any, limit: float) -> Tensor:
    """Float32, which `packed_combine` rounds."""
    x, _, weights, w, limit = plain_args("experts", (x, pairs.ids, weights, w, limit))
    return REFERENCE.experts_compute(x, weights, pairs, w, limit)


def packed_combine(each: Tensor, ids: Tensor, shared: Tensor | None = None) -> Tensor:
    shared = None if shared is None else shared.float()
    return REFERENCE.experts_combine(each, ids, shared).to(torch.bfloat16)


packed_compute.__module__ = "packed"

PACKED: Ops = replace(
    REFERENCE,
    capabilities=replace(REFERENCE.capabilities, quantised_weights=True, packed_cache=True),
    experts_compute=packed_compute,
    experts_combine=packed_combine,
    **{c.operator: token_by_token(c) for c in CASES if c.batch_invariant and c.by_token}
    | {name: packed_operator(name) for name in ACTIVATIONS if name != "experts"},
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_checks, "CHECKED", (0, 1, 3, 17))
    monkeypatch.setattr(operator_checks, "FAR_BYTES", 2**20)


def verdicts(operator: str, ops: Ops) -> list[operator_checks.Verdict]:
    return list(operator_checks.check_operator(operator, SIZES, (DRAW,), ops, REFERENCE, "cpu"))


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_table_that_computes_the_same_passes(operator: str) -> None:
    found = verdicts(operator, PACKED)
    assert [(v.what, v.fault) for v in found if v.fault] == []
    whats = " ".join(v.what for v in found)
    assert "17 tokens" in whats
    if operator != "sample":
        assert "case " in whats
    if operator in operator_checks.PAGED:
        assert "padding" in whats and "far pages" in whats


def scaled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An operator whose results are a tenth too large."""

    def run(*args: Any) -> Any:
        out = fn(*args)
        if isinstance(out, Tensor) and out.dtype.is_floating_point:
            return out * 1.1
        if out is None:
            args[-1].mul_(1.1)
        return out

    return run


@pytest.mark.parametrize("operator", ["linear", "grouped_linear", "experts", "sparse_attention"])
def test_a_wrong_result_is_found(operator: str) -> None:
    field = "experts_combine" if operator == "experts" else operator
    wrong = replace(PACKED, **{field: scaled(getattr(PACKED, field))})
    real = [v for v in verdicts(operator, wrong) if v.what.endswith((" 3 tokens", " 17 tokens"))]
    assert real and all(v.fault for v in real)


@pytest.mark.parametrize("operator", [*WINDOW_WRITERS, "compress"])
def test_a_row_in_the_wrong_place_is_found(operator: str) -> None:
    kernel = getattr(PACKED, operator)

    def shifted(*args: Any) -> Any:
        out = kernel(*args)
        written = [args[-1]] if operator in WINDOW_WRITERS else [p.entries for p in args[0]]
        for pool in (rows.pool for rows in written):
            pool.copy_(pool.roll(1, 0))
        return out

    found = verdicts(operator, replace(PACKED, **{operator: shifted}))
    assert sum(v.fault is not None for v in found) > len(found) // 3


def test_wrong_entries_are_found() -> None:
    def reversed_scores(q: Tensor, weights: Tensor, *args: Any) -> Tensor:
        chosen: Tensor = PACKED.select_entries(q, -weights, *args)
        return chosen

    found = verdicts("select_entries", replace(PACKED, select_entries=reversed_scores))
    assert any(v.fault for v in found)
