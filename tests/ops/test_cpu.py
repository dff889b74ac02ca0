"""The CPU table against the references, and its promise: a row's bits are its own."""

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from finwhale.ops import Ops, compressor, host, load_ops
from finwhale.ops.attention import cases as attention_cases
from finwhale.ops.case import Draw, OpCase
from finwhale.ops.compressor import cases as compressor_cases
from finwhale.ops.indexer import cases as indexer_cases
from finwhale.ops.linear import LinearWeight
from finwhale.ops.linear import cases as linear_cases
from finwhale.ops.mhc import cases as mhc_cases
from finwhale.ops.mhc import cpu as mhc
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.moe import cases as moe_cases
from finwhale.ops.norm import cases as norm_cases
from finwhale.ops.rounding import round_e4m3
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
CASES = [case for family in FAMILIES for case in family.CASES]
Args = tuple[Any, ...]


def lay_out(ops: Ops, args: Args) -> Args:
    """The arguments with the weights as the table wants them in memory."""
    return tuple(_prepared(ops, arg) for arg in args)


def _prepared(ops: Ops, arg: Any) -> Any:
    if isinstance(arg, LinearWeight):
        w = ops.prepare_linear(LinearWeight(torch.empty_like(arg.weight), arg.round_input))
        w.weight.copy_(arg.weight)
        return w
    if isinstance(arg, ExpertWeight):
        w13, w2 = torch.empty_like(arg.w13), torch.empty_like(arg.w2)
        e = ops.prepare_experts(ExpertWeight(w13, w2, arg.round_input))
        e.w13.copy_(arg.w13)
        e.w2.copy_(arg.w2)
        return e
    return arg


def results(ops: Ops, case: OpCase, args: Args) -> list[Tensor]:
    """What the operator returns, then what it writes; the arguments are left as they are."""
    args = tuple(copy.deepcopy(arg) if isinstance(arg, Tensor) else arg for arg in args)
    with torch.inference_mode():
        returned = getattr(ops, case.operator)(*args)
    if returned is None:
        returned = ()
    elif isinstance(returned, Tensor):
        returned = (returned,)
    return [*returned, *(args[i] for i in case.written)]


def assert_close(found: Tensor, wanted: Tensor, case: OpCase) -> None:
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
def test_against_the_reference(case: OpCase) -> None:
    args = case.args()
    found = results(CPU, case, lay_out(CPU, args))
    wanted = results(REFERENCE, case, args)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, case)


@pytest.mark.parametrize("case", [c for c in CASES if c.by_token], ids=str)
def test_a_token_s_bits_are_its_own(case: OpCase) -> None:
    """Alone, in batches of other sizes and at other offsets."""
    args = lay_out(CPU, case.args())
    num_tokens = args[case.by_token[0]].shape[0]
    whole = results(CPU, case, args)
    sizes = [n for n in (1, 2, 3, 6, 7, 17, 64) if n < num_tokens]
    for size, offset in itertools.product(sizes, (0, 1, num_tokens // 2, num_tokens - 1)):
        rows = slice(offset, min(offset + size, num_tokens))
        part = results(CPU, case, _rows(case, args, rows))
        for position, (one, other) in enumerate(zip(part, whole, strict=True)):
            if case.operator == "store_window":
                slots = args[6][rows]
                assert torch.equal(one[slots], other[slots])
            else:
                assert torch.equal(one, other[rows]), (position, rows)


def _rows(case: OpCase, args: Args, rows: slice) -> Args:
    return tuple(
        arg[rows].clone() if position in case.by_token else arg for position, arg in enumerate(args)
    )


@pytest.mark.parametrize("topk", [5, 100])
def test_selections_do_not_depend_on_the_batch(topk: int) -> None:
    """A decode beside others equals the same decode alone and as the last token of a chunk."""
    draw = Draw()
    chunks = tuple((400 + 50 * i, 401 + 50 * i) for i in range(20))
    step = indexer_cases.index_step(draw, chunks, 500)
    q, weights, keys = draw.normal(20, 4, 128), draw.normal(20, 4), draw.normal(500, 128)
    together = CPU.select_entries(q, weights, keys, step, topk)
    for row, (start, end) in enumerate(chunks):
        for before in (0, 1, 30):
            alone = indexer_cases.index_step(Draw(), ((start - before, end),), 500)
            alone.entry_slots[0, : end // 4] = step.entry_slots[row, : end // 4]
            queries = torch.cat((draw.normal(before, 4, 128), q[row : row + 1]))
            chosen = CPU.select_entries(
                queries, weights[row].expand(before + 1, -1).contiguous(), keys, alone, topk
            )
            assert torch.equal(chosen[-1], together[row])


def test_entries_do_not_depend_on_the_batch() -> None:
    """A chunk's entries beside another chunk's equal its entries alone."""
    for ratio in (4, 128):
        draw = Draw()
        chunks = ((0, 300), (255, 256), (127, 128))
        step = compressor_cases.compress_step(draw, ratio, chunks)
        width = 16 * (4 if ratio == 4 else 2)
        w = compressor.CompressorWeight(
            draw.normal(8 if ratio == 4 else 128, 16), draw.normal(16), ratio
        )
        count = step.entry_positions.shape[0]
        rows, state, rotation = (
            draw.normal(302, width),
            draw.normal(compressor_cases.STATE_ROWS, width),
            draw.rotation(count, 8),
        )
        entries = torch.zeros(200, 16)
        slots = torch.arange(count)
        step = compressor.CompressStep(
            step.history_slots,
            step.entry_sources,
            slots,
            step.entry_positions,
            step.state_sources,
            step.state_slots,
        )
        CPU.compress(rows, w, step, rotation, 1e-6, "none", state.clone(), entries)
        for entry in range(count):
            alone = torch.zeros(200, 16)
            one = compressor.CompressStep(
                step.history_slots,
                step.entry_sources[entry : entry + 1],
                slots[:1],
                step.entry_positions[:1],
                step.state_sources[:0],
                step.state_slots[:0],
            )
            CPU.compress(
                rows, w, one, rotation[entry : entry + 1].clone(), 1e-6, "none", state, alone
            )
            assert torch.equal(alone[0], entries[entry])


def test_sinkhorn_of_few_and_of_many_tokens_adds_in_the_same_order() -> None:
    mix = Draw().normal(40, 4, 4, scale=3.0).softmax(-1).numpy() + np.float32(1e-6)
    inverse = np.empty((40, 2, 4))
    mhc._iterate(mix, 20, 1e-6, inverse)
    for token in range(40):
        factors = mhc._reciprocal_factors(mix[token].ravel().tolist(), 20, 1e-6)
        assert np.array_equal(np.array(factors), inverse[token].ravel())


def test_padding_of_slots_changes_no_bit() -> None:
    """Slots are padded to the longest sequence of the batch."""
    case = next(c for c in CASES if c.operator == "sparse_attention" and "328" in c.name)
    q, window, window_slots, rows, slots, sink, scale, out = case.args()
    out = torch.empty_like(q)
    CPU.sparse_attention(q, window, window_slots, rows, slots[:, :256], sink, scale, out)
    padded = torch.empty_like(q)
    more = torch.cat((slots[:, :256], torch.full((q.shape[0], 384), -1)), 1)
    CPU.sparse_attention(q, window, window_slots, rows, more, sink, scale, padded)
    assert torch.equal(out, padded)


def test_rows_split_over_threads_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in CASES:
        args = lay_out(CPU, case.args())
        whole = results(CPU, case, args)
        monkeypatch.setattr(host, "PARALLEL_WORK", 1)
        monkeypatch.setattr(host, "NUM_WORKERS", 3)
        for one, other in zip(results(CPU, case, args), whole, strict=True):
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
        assert np.array_equal(host.round_e4m3(x.numpy(), group), round_e4m3(x, group).numpy())


@pytest.mark.parametrize("width", [1, 63, 64, 65, 127, 128, 129, 300, 512])
def test_e4m3_of_random_rows(width: int) -> None:
    draw = Draw()
    for scale in (1e-30, 1e-6, 1e-4, 1.0, 1e5, 1e20):
        x = draw.outliers(40, width) * scale
        assert np.array_equal(host.round_e4m3(x.numpy(), 128), round_e4m3(x, 128).numpy())
        apart = torch.cat((x, x), 1)[:, 1 : 1 + width]
        assert np.array_equal(host.round_e4m3(apart.numpy(), 64), round_e4m3(apart, 64).numpy())


@pytest.mark.parametrize(
    "function",
    [np.exp, np.sqrt, np.reciprocal, lambda x: np.logaddexp(x, host.constant(0.0))],
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
    x, turn = draw.normal(9, 2 * pairs).numpy(), host.turns(draw.rotation(9, 2 * pairs))
    whole = x.copy()
    host.rotate(whole, turn)
    heads = np.repeat(np.concatenate((x, x), 1)[:, None], 3, 1)
    host.rotate(heads, turn)
    for row in range(9):
        one = x[row : row + 1].copy()
        host.rotate(one, turn[row : row + 1].copy())
        assert np.array_equal(one[0], whole[row])
        assert np.array_equal(heads[row, 1, 2 * pairs :], whole[row])
