"""The CPU table against the references, and its promise: a row's bits are its own."""

import itertools
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.cases import attention as attention_cases
from tests.support.cases import compressor as compressor_cases
from tests.support.cases import indexer as indexer_cases
from tests.support.cases import linear as linear_cases
from tests.support.cases import mhc as mhc_cases
from tests.support.cases import moe as moe_cases
from tests.support.cases import norm as norm_cases
from tests.support.checked_case import CheckedCase
from tests.support.model_cases.compressor import compress_args, first_kept
from tests.support.op_arguments import outliers, results, take_tokens
from tests.support.op_case import Args, Draw, entry_rows, step_tokens
from tests.support.packing import WINDOW_WRITERS
from torch import Tensor

from finwhale.ops import Ops, compressor, cpu_gemm, cpu_math, load_ops
from finwhale.ops.host_forms import _FORMS, forget_forms
from finwhale.ops.indexer import cpu as indexer
from finwhale.ops.linear import LinearWeight
from finwhale.ops.mhc import cpu as mhc
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe.cpu import HostPairs
from finwhale.ops.paging import CacheRows, PageTable
from finwhale.ops.rounding import round_e4m3
from finwhale.ops.slots import write_slots
from finwhale.platform import Platform

CPU, REFERENCE = load_ops(Platform.cpu()), load_ops(Platform.cpu(), reference=True)
FAMILIES = (
    attention_cases,
    compressor_cases,
    indexer_cases,
    linear_cases,
    mhc_cases,
    moe_cases,
    norm_cases,
)


def _as_stored(case: CheckedCase) -> CheckedCase:
    """The same with weights as checkpoints store them."""

    def args() -> Args:
        return tuple(_bfloat16(arg) for arg in case.args())

    return replace(case, name=f"{case.name} of bfloat16", args=args)


def _bfloat16(arg: Any) -> Any:
    if isinstance(arg, LinearWeight):
        return replace(arg, weight=arg.weight.bfloat16().float())
    if isinstance(arg, ExpertWeight):
        return replace(arg, w13=arg.w13.bfloat16().float(), w2=arg.w2.bfloat16().float())
    return arg


CASES = [
    *(case for family in FAMILIES for case in family.CASES),
    *(_as_stored(case) for family in (linear_cases, moe_cases) for case in family.CASES),
]


def lay_out(ops: Ops, args: Args) -> Args:
    """The arguments with the weights as the table wants them in memory."""
    return tuple(_prepared(ops, arg) for arg in args)


def _prepared(ops: Ops, arg: Any) -> Any:
    if isinstance(arg, LinearWeight):
        w = ops.prepare_linear(LinearWeight(torch.empty_like(arg.weight), arg.input_group))
        w.weight.copy_(arg.weight)
        return w
    if isinstance(arg, ExpertWeight):
        w13, w2 = torch.empty_like(arg.w13), torch.empty_like(arg.w2)
        e = ops.prepare_experts(ExpertWeight(w13, w2, arg.input_group))
        e.w13.copy_(arg.w13)
        e.w2.copy_(arg.w2)
        return ops.finish_experts(e) if e.w13.dim() == 3 else e
    return arg


def run(ops: Ops, case: CheckedCase, args: Args) -> list[Tensor]:
    with torch.inference_mode():
        found = results(getattr(ops, case.operator), args, case.written)
    if case.operator == "select_entries":  # narrower where no token has that many entries
        found = [F.pad(slots, (0, args[5] - slots.shape[1]), value=-1) for slots in found]
    return found


def assert_close(found: Tensor, wanted: Tensor, case: CheckedCase) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    if not found.dtype.is_floating_point:
        assert torch.equal(found, wanted)
        return
    if found.numel() == 0:
        return
    assert found.isfinite().all()
    unit = wanted.abs().max()
    error = (found - wanted).abs()
    assert (error > case.tolerance * unit).float().mean() <= case.flips, (error.max() / unit).item()
    assert error.max() <= max(case.tolerance, case.flip * (case.flips > 0)) * unit


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(case: CheckedCase) -> None:
    args = case.args()
    found = run(CPU, case, lay_out(CPU, args))
    wanted = run(REFERENCE, case, args)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, case)


@pytest.mark.parametrize("case", [c for c in CASES if c.operator == "experts"], ids=str)
def test_pairs_are_dispatched_by_expert(case: CheckedCase) -> None:
    """Every pair that is not skipped once, those of an expert together, by k and then by token."""
    x, ids, weights, w, limit, *_ = lay_out(CPU, case.args())
    pairs = CPU.experts_dispatch(ids, len(w.w2))
    assert isinstance(pairs, HostPairs)
    flat = ids.T.reshape(-1)
    used = [pair for pair in flat.argsort(stable=True).tolist() if flat[pair] >= 0]
    assert pairs.order.tolist() == used
    assert [e for e, n in zip(pairs.experts, pairs.counts, strict=True) for _ in range(n)] == [
        int(flat[pair]) for pair in used
    ]
    each = CPU.experts_compute(x, weights, pairs, w, limit)
    assert each.shape == (*ids.shape, x.shape[1])


@pytest.mark.parametrize("case", [c for c in CASES if c.by_token], ids=str)
def test_a_token_s_bits_do_not_depend_on_other_tokens(case: CheckedCase) -> None:
    """Alone, in batches of other sizes and at other offsets."""
    args = lay_out(CPU, case.args())
    num_tokens = args[case.by_token[0]].shape[0]
    whole = run(CPU, case, args)
    sizes = [n for n in (1, 2, 3, 6, 7, 17, 64) if n < num_tokens]
    for size, offset in itertools.product(sizes, (0, 1, num_tokens // 2, num_tokens - 1)):
        start, stop = offset, min(offset + size, num_tokens)
        alone = take_tokens(args, case.by_token, start, stop)
        part = run(CPU, case, tuple(_apart(arg) for arg in alone))
        for position, (one, other) in enumerate(zip(part, whole, strict=True)):
            if case.operator in WINDOW_WRITERS and position == len(part) - 1:
                *_, tokens, window = alone
                slots = write_slots(tokens, window.table)
                assert torch.equal(one[slots], other[slots])
                others = torch.ones(len(one), dtype=torch.bool).index_fill(0, slots, False)
                assert torch.equal(one[others], window.pool[others])
            else:
                assert torch.equal(one, other[start:stop]), (position, start, stop)


def _apart(arg: Any) -> Any:
    return arg.clone() if isinstance(arg, Tensor) else arg


@pytest.mark.parametrize("topk", [5, 100])
@pytest.mark.parametrize("rounds", [False, True])
def test_selections_do_not_depend_on_the_batch(topk: int, rounds: bool) -> None:
    """A decode beside others equals the same decode alone and as the last token of a chunk."""
    draw = Draw()
    chunks = tuple((400 + 50 * i, 401 + 50 * i) for i in range(20))
    tokens = step_tokens(chunks)
    table, num_rows = draw.page_table(entry_rows(chunks, 4), 64)
    q, weights, keys = draw.normal(20, 4, 128), draw.normal(20, 4), draw.normal(num_rows, 128)
    rotary = draw.rotation(tokens.max_len, 64)
    rest = topk, 0.1, rounds
    together = CPU.select_entries(q, weights, CacheRows(keys, table), rotary, tokens, *rest)
    for row, (start, end) in enumerate(chunks):
        for before in (0, 1, 30):
            own = PageTable(table.pages[row : row + 1], table.first[row : row + 1], 64)
            chosen = CPU.select_entries(
                torch.cat((draw.normal(before, 4, 128), q[row : row + 1])),
                weights[row].expand(before + 1, -1).contiguous(),
                CacheRows(keys, own),
                rotary,
                step_tokens(((start - before, end),)),
                *rest,
            )
            assert torch.equal(chosen[-1], together[row])


@pytest.mark.parametrize("rounding", ["none", "nope", "key"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_entries_do_not_depend_on_the_batch(
    ratio: Literal[4, 128], rounding: compressor.Rounding
) -> None:
    """A chunk's entries beside other chunks', and those of a part beside another's, equal its
    entries alone, read token by token.
    """
    chunks = ((0, 300), (255, 256), (127, 128))
    args = compress_args(Draw(), ratio, chunks, (16, 32), 8, (rounding, rounding))
    with torch.inference_mode():
        parts, tokens, rotary, eps, most = args
        together = results(CPU.compress, args, (0,))
        states, entries = parts[0].state.table, parts[0].entries.table
        for sequence, (start, end) in enumerate(chunks):
            rows = slice(sequence, sequence + 1)
            # Pages that hold every row of the state, since each step leaves its own.
            own_states, num_rows = Draw().page_table([(range(end),)], states.rows_per_page)
            own_entries = PageTable(entries.pages[rows], entries.first[rows], entries.rows_per_page)
            slots = entry_slots(entries, sequence, range(start // ratio, end // ratio))
            for number, part in enumerate(parts):
                state = torch.zeros(num_rows, part.state.pool.shape[1])
                for position in range(max(0, first_kept(start, ratio)), start):
                    kept = states.slots(np.array([sequence]), np.array([position]))
                    at = own_states.slots(np.array([0]), np.array([position]))
                    state[at] = part.state.pool[kept]
                own = CacheRows(torch.zeros_like(part.entries.pool), own_entries)
                alone = replace(part, state=CacheRows(state, own_states), entries=own)
                first = int(tokens.query_start[sequence])
                for position in range(start, end):
                    row = part.projected[first + position - start][None]
                    step = step_tokens(((position, position + 1),))
                    CPU.compress((replace(alone, projected=row),), step, rotary, eps, most)
                assert len(slots) and torch.equal(own.pool[slots], together[2 * number + 1][slots])


def entry_slots(table: PageTable, sequence: int, entries: range) -> Any:
    rows = np.array(entries)
    return table.slots(np.full_like(rows, sequence), rows)


# Matrices of the embedded model, [M,K].
SHAPES = ((256, 256), (1024, 128), (3072, 128), (1040, 256), (4096, 256), (128, 512), (256, 128))
NEEDS_HALF = pytest.mark.skipif(
    not cpu_gemm._rows_are_independent(), reason="torch has no usable FBGEMM here"
)


@NEEDS_HALF
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("M, K", SHAPES)
def test_rows_of_a_packed_gemm_do_not_depend_on_other_rows(M: int, K: int, threads: int) -> None:
    draw = Draw()
    weight = draw.normal(M, K, scale=K**-0.5).bfloat16().float()
    multiply, x = cpu_gemm.gemm(weight), outliers(draw, 700, K)
    assert isinstance(multiply, cpu_gemm._Half)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = multiply(x)
        for rows in (*range(1, 65), 100, 127, 128, 129, 255, 500, 699):
            for start in (0, 1, 700 - rows):
                assert torch.equal(multiply(x[start : start + rows]), whole[start : start + rows])
    finally:
        torch.set_num_threads(before)


@NEEDS_HALF
def test_what_checkpoints_store_is_packed_without_loss() -> None:
    """E4M3 and E2M1 times powers of two, and bfloat16; a float32 that is none of them is not."""
    draw = Draw()
    identity = torch.eye(64)
    e4m3 = draw.normal(32, 64).to(torch.float8_e4m3fn).float() * 2.0**-9
    for stored in (e4m3, outliers(draw, 32, 64).bfloat16().float(), torch.full((32, 64), 2.0**-30)):
        multiply = cpu_gemm.gemm(stored)
        assert isinstance(multiply, cpu_gemm._Half)
        assert torch.equal(multiply(identity), stored.T)
    for other in (draw.normal(32, 64), torch.cat((e4m3, e4m3 * 2.0**-60)), e4m3 * torch.nan):
        assert not isinstance(cpu_gemm.gemm(other), cpu_gemm._Half)


def test_forms_of_a_weight_end_with_it_and_when_they_are_forgotten() -> None:
    weight = Draw().normal(32, 64)
    key, packed = id(weight), cpu_gemm.gemm(weight)
    assert cpu_gemm.gemm(weight) is packed
    forget_forms(weight)
    assert key not in _FORMS and cpu_gemm.gemm(weight) is not packed
    array = cpu_math.view(weight)
    assert cpu_math.view(weight) is array and len(_FORMS[key][1]) == 2
    del weight
    assert key not in _FORMS


def test_without_fbgemm_every_weight_takes_the_gemvs(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = Draw().normal(32, 64).bfloat16().float()
    for missing in (_fails, _depends_on_the_rows):
        monkeypatch.setattr(cpu_gemm, "_MULTIPLY", missing)
        cpu_gemm._rows_are_independent.cache_clear()
        assert not isinstance(cpu_gemm.gemm(weight.clone()), cpu_gemm._Half)
    monkeypatch.undo()
    cpu_gemm._rows_are_independent.cache_clear()


def _by_the_stack(a: Any, b: Any, out: Any = None) -> Any:
    found = np.asarray(a @ b)
    return found * np.float32(1 + 2**-20) if found.ndim > 2 and len(found) > 2 else found


def _by_the_rows(a: Any, b: Any) -> Any:
    return (a * b).sum(-1) * np.float32(1 + 2**-20)


@pytest.mark.parametrize("name, wrong", [("matmul", _by_the_stack), ("vecdot", _by_the_rows)])
def test_a_blas_that_breaks_the_promise_is_found(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any
) -> None:
    assert cpu_math.blas_keeps_bits()
    cpu_math.blas_keeps_bits.cache_clear()
    monkeypatch.setattr(np, name, wrong)
    assert not cpu_math.blas_keeps_bits()
    monkeypatch.undo()
    cpu_math.blas_keeps_bits.cache_clear()


def _is_small(case: CheckedCase) -> bool:
    return sum(arg.numel() for arg in case.args() if isinstance(arg, Tensor)) < 2**17


@pytest.mark.parametrize("case", [c for c in CASES[::3] if c.by_token and _is_small(c)], ids=str)
def test_the_table_s_own_gemms(case: CheckedCase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither library keeps the promise: right values, and bits that are a token's own."""
    monkeypatch.setattr(cpu_math, "blas_keeps_bits", lambda: False)
    monkeypatch.setattr(cpu_gemm, "_rows_are_independent", lambda: False)
    test_against_the_reference(case)
    test_a_token_s_bits_do_not_depend_on_other_tokens(case)


def _fails(*_: Any) -> Tensor:
    raise RuntimeError("FBGEMM doesn't support this processor")


def _depends_on_the_rows(x: Tensor, *_: Any) -> Tensor:
    return torch.full((len(x), 75), float(len(x)))


def test_sinkhorn_of_few_and_of_many_tokens_adds_in_the_same_order() -> None:
    mix = Draw().normal(40, 4, 4, scale=3.0).softmax(-1).numpy() + np.float32(1e-6)
    together = np.empty((40, 2, 4))
    mhc._iterate(mix, 20, 1e-6, together)
    for token in range(40):
        factors = mhc._factors(mix[token].ravel().tolist(), 20, 1e-6)
        assert np.array_equal(np.array(factors), together[token].ravel())


def test_padding_of_slots_changes_no_bit() -> None:
    """Slots are padded to the longest sequence of the batch."""
    case = next(c for c in CASES if c.operator == "sparse_attention" and "328" in c.name)
    *before, entries, sink, scale, out = case.args()
    slots = entries.slots[:, :256]
    more = torch.cat((slots, torch.full((len(slots), 384), -1, dtype=torch.int32)), 1)
    outs = []
    for some in (slots, more):
        args = (*before, replace(entries, slots=some), sink, scale, out)
        outs += results(CPU.sparse_attention, args, case.written)
    assert outs[0].isfinite().all()
    assert torch.equal(outs[0], outs[1])


def test_longer_sequences_change_no_bit() -> None:
    """Tokens that see no, few and many complete entries, alone and in one batch."""
    chunks = ((127, 128), (900, 901), (4223, 4224), (4224, 4225), (20000, 20001), (30, 32))
    case = attention_cases._attend(attention_cases.Size(chunks=chunks, entries="all"))
    args = case.args()
    (together,) = run(CPU, case, args)
    for token, position in enumerate(args[3].host_positions):
        alone = list(take_tokens(args, case.by_token, token, token + 1))
        alone[3] = replace(alone[3], max_len=int(position) + 1)
        (found,) = run(CPU, case, tuple(_apart(arg) for arg in alone))
        assert torch.equal(found[0], together[token])


def test_rows_split_over_threads_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        args = lay_out(CPU, case.args())
        whole = run(CPU, case, args)
        monkeypatch.setattr(cpu_math, "PARALLEL_WORK", 1)
        monkeypatch.setattr(cpu_math, "NUM_WORKERS", 3)
        for one, other in zip(run(CPU, case, args), whole, strict=True):
            assert torch.equal(one, other), case
        monkeypatch.undo()


@pytest.mark.parametrize("group", [64, 128])
def test_e4m3_is_torch_s_at_every_value_and_boundary(group: int) -> None:
    """Every E4M3 value, the middles between neighbours and their float32 neighbours, at several
    scales: each group holds the scale's largest value and some of them.
    """
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = finite[finite.isfinite()].unique()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    near = torch.cat([points, *(torch.nextafter(points, torch.tensor(s)) for s in (-1e9, 1e9))])
    near = near[near.abs() <= 448]
    rows = -(-len(near) // (group - 1))
    grid = torch.zeros(rows * (group - 1))
    grid[: len(near)] = near
    tiles = torch.cat((torch.full((rows, 1), 448.0), grid.view(rows, group - 1)), 1)
    for exponent in (-20, -9, 0, 3, 60):
        x = tiles * 2.0**exponent
        assert np.array_equal(cpu_math.round_e4m3(x.numpy(), group), round_e4m3(x, group).numpy())


@pytest.mark.parametrize("width", [1, 63, 64, 65, 127, 128, 129, 300, 512])
def test_e4m3_of_random_rows(width: int) -> None:
    draw = Draw()
    for scale in (1e-30, 1e-6, 1e-4, 1.0, 1e5, 1e20):
        x = outliers(draw, 40, width) * scale
        assert np.array_equal(cpu_math.round_e4m3(x.numpy(), 128), round_e4m3(x, 128).numpy())
        apart = torch.cat((x, x), 1)[:, 1 : 1 + width]
        assert np.array_equal(cpu_math.round_e4m3(apart.numpy(), 64), round_e4m3(apart, 64).numpy())


@pytest.mark.parametrize(
    "function",
    [np.exp, np.sqrt, np.reciprocal, lambda x: np.logaddexp(x, cpu_math.constant(0.0))],
    ids=["exp", "sqrt", "reciprocal", "logaddexp"],
)
def test_functions_give_a_value_the_same_bits_wherever_it_lies(function: Any) -> None:
    """In a vector's tail, at any offset and with any stride."""
    x = (Draw().normal(400).abs() * 8 - 4).numpy()
    x = np.abs(x) if function in (np.sqrt, np.reciprocal) else x
    alone = np.array([function(x[i : i + 1].copy())[0] for i in range(len(x))])
    for offset, length in itertools.product(
        (0, 1, 3, 7), (1, 2, 5, 8, 15, 16, 17, 31, 33, 64, 129)
    ):
        part = slice(offset, offset + length)
        assert np.array_equal(function(x[part]), alone[part])
        wide = np.zeros((length, 3), np.float32)
        wide[:, 1] = x[part]
        assert np.array_equal(function(wide[:, 1]), alone[part])


@pytest.mark.parametrize("pairs", [2, 3, 5, 8, 9, 32])
def test_rotations_give_a_row_the_same_bits_wherever_it_lies(pairs: int) -> None:
    draw = Draw()
    x, turn = draw.normal(9, 2 * pairs).numpy(), cpu_math.turns(draw.rotation(9, 2 * pairs))
    whole = x.copy()
    cpu_math.rotate(whole, turn)
    heads = np.repeat(np.concatenate((x, x), 1)[:, None], 3, 1)
    cpu_math.rotate(heads, turn)
    for row in range(9):
        one = x[row : row + 1].copy()
        cpu_math.rotate(one, turn[row : row + 1].copy())
        assert np.array_equal(one[0], whole[row])
        assert np.array_equal(heads[row, 1, 2 * pairs :], whole[row])


@pytest.mark.parametrize("topk", [1, 2, 3, 4])
def test_the_lowest_of_equal_scores_are_chosen(topk: int) -> None:
    """Zeros of either sign are equal."""
    scores = np.array([[-0.0, 0.0, -1.0, 0.0]], np.float32)
    assert sorted(indexer.best_indices(scores, topk)[0].tolist()) == sorted([0, 1, 3, 2][:topk])
