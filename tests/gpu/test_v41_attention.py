"""DeepSeek-V4.1's records and attention on a GPU, against the reference on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.model_cases.compressor import state_rows
from tests.support.op_arguments import outliers, strided
from tests.support.op_case import Chunks, Draw, entry_rows, step_tokens, to_device
from tests.support.v41_rows import Case, Entries, check, empty, padded, unpack
from torch import Tensor

from finwhale.ops.deepseek_v41 import RowRounding, ref
from finwhale.ops.deepseek_v41.attention_triton import sparse_attention
from finwhale.ops.deepseek_v41.layout import entry, index_key, window_row
from finwhale.ops.deepseek_v41.merge_pairs_triton import merge_pairs
from finwhale.ops.deepseek_v41.store_rows_triton import prepare_qkv, store_rows
from finwhale.ops.paging import CacheRows, StepCache

DEVICE = "cuda"
CHUNKS: Chunks = ((254, 700), (7, 8), (0, 5), (511, 512), (40, 80), (2, 3))
STEPS: dict[str, Chunks] = {
    "1": ((5000, 5001),),
    "4": ((5000, 5001), (0, 1), (127, 128), (700, 702)),
    "24": tuple((300 * n, 300 * n + 1) for n in range(24)),
    "300": ((0, 40), (1000, 1260)),
}


def attention(case: Case, **how: bool) -> Tensor:
    q = to_device(case.q, DEVICE)
    out = strided(torch.full_like(q, torch.nan))
    args: Any = (*to_device(case.arguments(out)[:-1], DEVICE), out)
    sparse_attention(*args, **how)
    return out.cpu()


@pytest.mark.parametrize("kind, topk", [("none", 0), ("fp4", 512), ("window", 5)])
@pytest.mark.parametrize("heads", [64, 32, 16, 8])
@pytest.mark.parametrize("step", STEPS)
def test_attention(step: str, heads: int, kind: Entries, topk: int) -> None:
    """The PTX changes no bit, nor does a launch that is repeated."""
    case = Case(STEPS[step], heads, 512, 128, kind, topk)
    found = attention(case, early_launch=True, inline_asm=True)
    check(found.float(), case.wanted())
    assert torch.equal(found, attention(case))
    again = attention(case, early_launch=True, inline_asm=True)
    assert torch.equal(found, again)
    check(attention(case, invariant=True, inline_asm=True).float(), case.wanted())


@pytest.mark.parametrize("kind, topk", [("none", 0), ("fp4", 512)])
@pytest.mark.parametrize("heads", [64, 8])
@pytest.mark.parametrize("step", ["4", "300"])
def test_windows_that_begin_later(step: str, heads: int, kind: Entries, topk: int) -> None:
    """Within a window, at a token, and after some tokens, which then see no row."""
    case = Case(STEPS[step], heads, 512, 128, kind, topk)
    begin = torch.tensor([start - 40 + 20 * n for n, (start, _) in enumerate(STEPS[step])])
    case.tokens = replace(case.tokens, windows_begin=begin, cache=StepCache())
    found = attention(case, early_launch=True, inline_asm=True)
    check(found.float(), case.wanted())
    assert torch.equal(found, attention(case))


@pytest.mark.parametrize("rounding", ["e4m3", "fp4", "key"])
@pytest.mark.parametrize("ratio, dtype", [(1, torch.bfloat16), (2, torch.float32)])
def test_rows_are_stored(rounding: RowRounding, ratio: int, dtype: torch.dtype) -> None:
    """A GPU's rope may differ in the last bit, which carries few values over to the next one."""
    draw, tokens = Draw(), step_tokens(CHUNKS)
    record = {"e4m3": window_row(512), "fp4": entry(512), "key": index_key(128)}[rounding]
    rows = empty(draw.page_table(entry_rows(CHUNKS, ratio), 64), record)
    rotary = draw.rotation(tokens.max_len, 64)
    values = outliers(draw, len(tokens.positions), record.width).to(dtype)
    wanted = replace(rows, pool=unpack(rows, record))
    ref.store_rows(values, wanted, rotary, tokens, ratio, rounding)
    run = torch.cat((values, values[:2]))
    args = to_device((run, rows, rotary, padded(tokens), ratio, rounding), DEVICE)
    store_rows(*args, early_launch=True)
    found = unpack(CacheRows(args[1].pool.cpu(), rows.table), record)
    differ = found != wanted.pool
    assert not differ[:, :-64].any()
    assert differ.float().mean() < 1e-3
    largest = wanted.pool.unflatten(1, (-1, record.group)).abs().amax(2, keepdim=True)
    error = (found - wanted.pool).abs().unflatten(1, (-1, record.group))
    assert (error <= largest / 3).all()


@pytest.mark.parametrize("chunks", [((700, 701),), CHUNKS])
def test_latents_are_normalised_and_stored(chunks: Any) -> None:
    """One token and many, with the sizes of Flash."""
    draw, tokens = Draw(), step_tokens(chunks)
    rows = empty(draw.page_table(entry_rows(chunks, 1), 64), window_row(512))
    latents = draw.normal(len(tokens.positions), 1792).bfloat16().split((1280, 512), 1)
    norms, rotary = (draw.normal(1280), draw.normal(512)), draw.rotation(tokens.max_len, 64)
    wanted = replace(rows, pool=unpack(rows, window_row(512)))
    normed = ref.prepare_qkv(latents, norms, 1e-20, wanted, rotary, tokens, "e4m3")
    args = to_device((latents, norms, 1e-20, rows, rotary, tokens, "e4m3"), DEVICE)
    found = prepare_qkv(*args, early_launch=True).cpu()
    assert (found != normed).float().mean() < 0.01
    assert torch.allclose(found.float(), normed.float(), rtol=0.01)
    stored = unpack(CacheRows(args[3].pool.cpu(), rows.table), window_row(512))
    assert (stored != wanted.pool).float().mean() < 0.01 and stored.any()


@pytest.mark.parametrize("max_verify_tokens", [1, 6])
def test_pairs_are_merged(max_verify_tokens: int) -> None:
    draw, tokens, width = Draw(), step_tokens(CHUNKS), 512
    table, num_rows = draw.page_table(state_rows(CHUNKS, 2, max_verify_tokens), 8)
    state, norm = CacheRows(draw.normal(num_rows, 2 * width), table), draw.normal(width)
    projected = draw.normal(len(tokens.positions), 2 * width, scale=3.0)
    run = torch.cat((projected, projected[:2]))
    args: Any = to_device((run, norm, state, padded(tokens), 1e-20, max_verify_tokens), DEVICE)
    found = merge_pairs(*args, early_launch=True).cpu()
    wanted = ref.merge_pairs(projected, norm, state, tokens, 1e-20, max_verify_tokens)
    torch.testing.assert_close(found[:-2], wanted, rtol=1e-5, atol=1e-5)
    assert not found[-2:].any()
    assert torch.equal(args[2].pool.cpu(), state.pool)
