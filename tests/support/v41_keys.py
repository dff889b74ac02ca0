"""Selections of DeepSeek-V4.1 beside the reference, with scores that are exact in any order."""

from collections.abc import Callable
from dataclasses import replace

import torch
from tests.support.op_arguments import strided
from tests.support.op_case import Chunks, Draw, entry_rows, step_tokens, to_device
from torch import Tensor

from finwhale.ops.deepseek_v41 import IndexRule, Selection, ref
from finwhale.ops.paging import CacheRows, Tokens
from finwhale.ops.rounding import scaled_fp4, unscaled_fp4

Call = tuple[Tensor, Tensor, CacheRows, Tensor, Tokens]


def packed_keys(keys: Tensor, rows_per_page: int) -> Tensor:
    """Pages of codes, the first of two in the low bits, then of the groups' exponents."""
    codes, scale = scaled_fp4(keys)
    exponents = (scale.view(torch.int32) >> 23).to(torch.uint8)
    pages = len(keys) // rows_per_page
    parts = (codes[:, 0::2] | codes[:, 1::2] << 4, exponents)
    return torch.cat([part.reshape(pages, -1) for part in parts], 1)


def selection_call(
    chunks: Chunks, ratio: int, width: int = 32, page: int = 64, heads: int = 3
) -> tuple[Call, CacheRows]:
    """The arguments of a call, and the dense keys. Groups of a key differ in their scales."""
    draw, tokens = Draw(), step_tokens(chunks)
    table, num_rows = draw.page_table(entry_rows(chunks, ratio), page)
    values = draw.integers(2, num_rows, width // 32, 32, low=-1).float()
    values *= torch.exp2(draw.integers(9, num_rows, width // 32, 1, low=-4).float())
    keys = values.flatten(1)
    assert torch.equal(unscaled_fp4(*scaled_fp4(keys)), keys)
    q = draw.integers(2, len(tokens.positions), heads, width, low=-1).float()
    weights = draw.integers(3, len(q), heads + 4, low=-2).float()[:, 4:]
    rotary = draw.quarter_turns(tokens.max_len, 16)
    pool = strided(packed_keys(keys, page))
    return (q, weights, CacheRows(pool, table), rotary, tokens), CacheRows(keys, table)


def agree(found: Tensor | None, wanted: Tensor | None) -> bool:
    """Whether selections are the same up to columns of -1."""
    if found is None or wanted is None:
        return found is wanted
    width = min(found.shape[1], wanted.shape[1])
    rest = torch.cat((found[:, width:].flatten(), wanted[:, width:].flatten()))
    return torch.equal(found[:, :width], wanted[:, :width]) and bool((rest == -1).all())


def check_selections(
    select: Callable[..., Selection],
    call: tuple[Call, CacheRows],
    rule: IndexRule,
    keeps: int,
    device: str = "cpu",
) -> None:
    """A layer that keeps blocks, unless keeps is 0, and a layer that selects within them."""
    args: Call
    args, dense = to_device(call, device)
    q, weights, _, rotary, tokens = args
    plain = q, weights, dense, rotary, tokens
    found = wanted = Selection(dense.pool)
    if keeps:
        source = replace(rule, keeps=keeps)
        found, wanted = select(*args, source), ref.select_shared(*plain, source)
        assert agree(found.slots, wanted.slots) and agree(found.blocks, wanted.blocks)
    found = select(*args, rule, found.blocks)
    wanted = ref.select_shared(*plain, rule, wanted.blocks)
    assert agree(found.slots, wanted.slots) and found.blocks is None
