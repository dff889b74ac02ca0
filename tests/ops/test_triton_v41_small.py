"""DeepSeek-V4.1's small operators as Triton kernels in the interpreter, against the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.op_case import Draw, step_tokens
from torch import Tensor

from finwhale.ops.deepseek_v41 import HashTensors, Pending, engram_triton, ref
from finwhale.ops.deepseek_v41 import mhc_delayed_triton as mhc
from finwhale.ops.mhc import MhcParams, MhcWeight, mhc_triton
from finwhale.ops.mhc.ref import mhc_post
from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.paging import CacheRows, PageTable, StepCache
from finwhale.weights.table import LookupTable

from .kernels_support import DTYPES, Inputs, assert_all_close, assert_close

PARAMS = MhcParams(num_iters=20, eps=1e-6, rms_eps=1e-20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "width", "few"), [(0, 64, 128), (1, 40, 128), (17, 100, 128), (9, 64, 4)]
)
def test_inputs_of_the_mixes_before(
    num_tokens: int, width: int, few: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """few: the most tokens that the kernels for few tokens take."""
    monkeypatch.setattr(mhc_triton, "FEW_TOKENS", few)
    inputs = Inputs()
    w = MhcWeight(
        *(inputs.normal(24, 4 * width, scale=width**-0.5), inputs.normal(24).abs()),
        *(inputs.normal(24), inputs.normal(width)),
    )
    residual = inputs.outliers(num_tokens, 4, width, dtype=dtype)
    x, pre = inputs.normal(num_tokens, width, dtype=dtype), inputs.normal(num_tokens, 4).abs()
    post, res = inputs.normal(num_tokens, 4).abs(), inputs.normal(num_tokens, 4, 4).softmax(-1)

    def check(last: Pending | None, given: Tensor, total: Tensor | None) -> None:
        y, streams, parts = mhc.mhc_input(last, given, pre, w, PARAMS)
        assert_close(streams, given if total is None else mhc_post(total, post, res, given))
        assert_close(y, ref.mhc_input(None, streams, pre, w, PARAMS)[0])
        assert (parts is None) == (num_tokens <= few)
        mixes = mhc.mhc_mixes(streams, parts, w, PARAMS)
        assert_all_close(mixes, ref.mhc_mixes(streams, None, w, PARAMS))

    check(None, residual, None)
    each, ids = inputs.normal(num_tokens, 3, width, dtype=dtype), torch.zeros(num_tokens, 3).int()
    check((x, post, res), residual, x)
    if num_tokens <= few:
        terms = UnreducedExperts(each, ids, x, dtype)
        check((terms, post, res), residual, (each.float().sum(1) + x.float()).to(dtype))
    if num_tokens:
        check(None, x[:, None].expand(-1, 4, -1), None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_collapse_of_the_residual_streams(dtype: torch.dtype) -> None:
    inputs = Inputs()
    streams, pre = inputs.normal(3, 4, 1030, dtype=dtype), inputs.normal(3, 4).abs()
    wanted = (pre[:, :, None] * streams.float()).sum(1).to(dtype)
    assert_close(mhc.collapse(streams, pre), wanted)


def test_the_last_ids_of_a_sequence() -> None:
    """Over several steps. A padding token and one without a page store nothing."""
    draw = Draw()
    table, num_rows = draw.page_table([(range(9),), (range(4),), (range(64, 200),)], 64)
    pool = draw.integers(99092, num_rows, 3).float()[:, 1:2]
    texts = [draw.integers(99092, n) for n in (9, 4, 200)]
    for chunks in (((0, 3), (0, 1), (70, 135)), ((3, 4), (1, 4), (135, 136)), ((4, 9), (3, 4))):
        tokens = step_tokens(chunks)
        parts = [text[slice(*chunk)] for text, chunk in zip(texts, chunks, strict=False)]
        ids = torch.cat(parts)
        rows = CacheRows(pool.clone(), table)
        wanted = ref.recall_ids(ids, 4, 7, rows, tokens)
        found = engram_triton.recall_ids(ids, 4, 7, CacheRows(pool, table), tokens)
        assert torch.equal(found, wanted) and torch.equal(pool, rows.pool)
        starts = torch.tensor([1, -1, 134][: len(chunks)])
        replayed = replace(tokens, windows_begin=starts, cache=StepCache())
        wanted = ref.recall_ids(ids, 4, 7, rows, replayed)
        assert torch.equal(engram_triton.recall_ids(ids, 4, 7, rows, replayed), wanted)
    before = pool.clone()
    padded = replace(tokens, positions=torch.full_like(tokens.positions, -1), cache=StepCache())
    found = engram_triton.recall_ids(ids, 4, 7, CacheRows(pool, table), padded)
    assert (found == 7).all() and torch.equal(pool, before)
    one_page = PageTable(torch.tensor([[0, 3]]).int(), torch.zeros(1).int(), 64)
    step = step_tokens(((60, 66),))
    engram_triton.recall_ids(ids[:6], 4, 7, CacheRows(pool, one_page), step)
    before[3 * 64 : 3 * 64 + 2, 0] = ids[4:6].float()
    assert torch.equal(pool, before)


@pytest.mark.parametrize("scaled", [True, False])
def test_rows_of_the_table(scaled: bool) -> None:
    draw, heads = Draw(), 3
    rng = np.random.default_rng(0)
    multipliers = 2 * rng.integers(0, (2**63 - 1) // 99092 // 2, 4) + 1
    sizes = np.array([[101, 103, 107], [109, 113, 127], [131, 137, 139]])
    starts = (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)
    ids = draw.integers(99092, 5, 4)
    ids[0] = 99091
    values = draw.normal(int(sizes.sum()), 64)
    table = LookupTable(values.bfloat16())
    if scaled:
        exponents = draw.integers(254, len(values), 2).to(torch.uint8)
        table = LookupTable(values.to(torch.float8_e4m3fn), exponents)
    hashes = HashTensors(*map(torch.from_numpy, (multipliers, sizes, starts)))
    given = ids, hashes, table.rows, table.scale, torch.bfloat16
    found = engram_triton.look_up(*given)
    assert found.shape == (5, 3 * heads, 64) and torch.equal(found, ref.look_up(*given))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 600])
def test_the_gate_of_engram(width: int, dtype: torch.dtype) -> None:
    inputs, N, H = Inputs(), 5, 4
    streams = inputs.normal(N, H, width, dtype=dtype)
    kv = inputs.normal(N, (H + 1) * width, dtype=dtype)
    kv[0] = 0  # a score of 0 gives a gate of 1/2
    key, value = kv[:, :-width].unflatten(1, (H, width)), kv[:, -width:]
    weights = inputs.normal(H, width), inputs.normal(H, width)
    args = streams, key, value, *weights, 1e-20
    assert_close(engram_triton.engram_gate(*args), ref.engram_gate(*args))
