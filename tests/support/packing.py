"""Converts an operator's arguments and results between packed tables and the references.

A packed table is checked against the float32 references on the same values: float32 represents its
packed rows, keys and weights exactly.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.op_case import Args
from tests.support.packed_pools import pack_keys, pack_rows, page_parts
from torch import Tensor

from finwhale.checkpoint.formats import (
    dequantise_fp4,
    dequantise_fp8_block,
    quantise_fp4,
    quantise_fp8_block,
    scale_to_float32,
)
from finwhale.ops.attention import NOPE_GROUP, AllEntries, TopkEntries, Window
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.compressor import CompressPart
from finwhale.ops.indexer.layout import IndexKey
from finwhale.ops.linear import KERNEL_GROUP, LinearWeight
from finwhale.ops.moe import ExpertWeight
from finwhale.ops.paging import CacheRows, PageTable, Tokens
from finwhale.ops.rounding import unscaled_fp4

# The operators with packed arguments, and the positions of their arguments that are activations.
ACTIVATIONS = {
    "linear": (0,),
    "grouped_linear": (0,),
    "swiglu_mlp": (0,),
    "experts": (0, 5),
    "prepare_qkv": (0, 2),
    "store_window_rows": (0,),
    "select_entries": (0,),
    "sparse_attention": (0, 8),
    "compress": (),
}
# Their last arguments are kv, the form, the tokens and the window's rows.
WINDOW_WRITERS = ("prepare_qkv", "store_window_rows")


# --- From packed to plain -------------------------------------------------------------------------


def unpack_rows(pool: Tensor, rows_per_page: int, head_dim: int, rope_dim: int) -> Tensor:
    """A packed pool [num_pages, page_bytes] as dense rows [num_pages * rows_per_page, C] float32.

    Row r of the result is slot r of the pool. Every value is exact in bfloat16.
    """
    record = RopeRow(head_dim, rope_dim)
    value_part, scale_part = page_parts(pool, rows_per_page, record.value_bytes, record.scale_bytes)
    value_part = value_part.flatten(0, 1).contiguous()
    exponent = scale_part.flatten(0, 1)[:, : record.num_groups].to(torch.int32)
    scale = (exponent << 23).view(torch.float32).repeat_interleave(NOPE_GROUP, 1)
    width = head_dim - rope_dim
    nope = value_part[:, :width].view(torch.float8_e4m3fn).float() * scale[:, :width]
    rope = value_part[:, width:].contiguous().view(torch.bfloat16).float()
    return torch.cat((nope, rope), 1)


def unpack_keys(pool: Tensor, rows_per_page: int, width: int) -> Tensor:
    """Keys of packed pages uint8 [pages, bytes], as float32 [pages * rows_per_page, width]."""
    record = IndexKey(width)
    end = rows_per_page * record.code_bytes
    words = pool[:, :end].reshape(-1, record.code_bytes)
    size = torch.stack((words & 7, words >> 4 & 7), -1).flatten(1)
    sign = torch.stack((words >> 7, words >> 3 & 1), -1).unflatten(1, (-1, 4)).mT.flatten(1)
    codes = size | sign << 3
    exponents = pool[:, end : end + rows_per_page * record.scale_bytes]
    scale = (exponents.reshape(-1, record.scale_bytes).int() << 23).view(torch.float32)
    return unscaled_fp4(codes, scale)


def plain_args(operator: str, args: Args) -> Args:
    """Convert a packed table's arguments to the reference's: the same values in float32."""
    if operator not in ACTIVATIONS:
        return args
    plain = list(args)
    for position in ACTIVATIONS[operator]:
        if position < len(plain) and plain[position] is not None and not _is_e4m3(plain[position]):
            plain[position] = plain[position].float()
    if operator in WINDOW_WRITERS:
        plain[-1] = _plain_rows(args[-1], args[-4].shape[1], _rope(args[-3].rotary))
    elif operator == "sparse_attention":
        plain[4], plain[5] = (
            arg and replace(arg, rows=_plain_rows(arg.rows, args[0].shape[2], _rope(args[1])))
            for arg in args[4:6]
        )
    elif operator == "select_entries":
        plain[2] = _plain_keys(args[2], args[0].shape[2])
    elif operator == "compress":
        plain[0] = tuple(
            replace(part, entries=_plain_entries(part, _rope(args[2]))) for part in args[0]
        )
    return tuple(plain_weight(arg) for arg in plain)


def plain_results(operator: str, args: Args, found: Sequence[Tensor]) -> list[Tensor]:
    """Convert a packed table's results to the reference's form.

    Rows and keys become bfloat16, which holds them exactly; `compare` allows bfloat16 results one
    rounding more. Selections are padded to the reference's width.

    Args:
        args: the packed arguments.
        found: the tensors that the operator returned and wrote.
    """
    found = list(found)
    if operator in WINDOW_WRITERS:
        written = replace(args[-1], pool=found[-1])
        rows = _plain_rows(written, args[-4].shape[1], _rope(args[-3].rotary))
        return [*found[:-1], rows.pool.bfloat16()]
    if operator == "select_entries":
        return [F.pad(found[0], (0, args[5] - found[0].shape[1]), value=-1)]
    if operator == "compress":
        for i, part in enumerate(args[0]):
            part = replace(part, entries=replace(part.entries, pool=found[2 * i + 1]))
            found[2 * i + 1] = _plain_entries(part, _rope(args[2])).pool.bfloat16()
    return found


def _is_e4m3(x: Tensor) -> bool:
    """Whether a tensor is an output that the operator rounds to E4M3."""
    return x.dtype == torch.float8_e4m3fn


def _rope(rotary: Tensor) -> int:
    return 2 * rotary.shape[1]


def _plain_rows(rows: CacheRows, width: int, rope: int) -> CacheRows:
    if rows.pool.dtype != torch.uint8:
        return rows
    return replace(rows, pool=unpack_rows(rows.pool, rows.table.rows_per_page, width, rope))


def _plain_keys(rows: CacheRows, width: int) -> CacheRows:
    return replace(rows, pool=unpack_keys(rows.pool, rows.table.rows_per_page, width))


def _plain_entries(part: CompressPart, rope: int) -> CacheRows:
    width = part.weight.norm.shape[0]
    if part.rounding == "key":
        return _plain_keys(part.entries, width)
    return _plain_rows(part.entries, width, rope)


def plain_weight(arg: Any) -> Any:
    """Convert a weight to float32; other arguments stay as they are."""
    if isinstance(arg, LinearWeight):
        weight = arg.weight.float() if arg.scale is None else _fp8_values(arg.weight, arg.scale)
        return LinearWeight(weight, arg.input_group)
    if isinstance(arg, ExpertWeight):
        w13, w2 = _expert_values(arg.w13, arg.scale13), _expert_values(arg.w2, arg.scale2)
        return ExpertWeight(w13, w2, arg.input_group)
    return arg


def _fp8_values(weight: Tensor, scale: Tensor) -> Tensor:
    if weight.dim() == 2:
        return dequantise_fp8_block(weight, scale, torch.float32)
    return torch.stack([_fp8_values(w, s) for w, s in zip(weight, scale, strict=True)])


def _expert_values(weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return weight.float()
    if weight.dtype == torch.uint8:
        return dequantise_fp4(weight.view(torch.int8), scale, torch.float32)
    return _fp8_values(weight, scale)


# --- From plain to packed -------------------------------------------------------------------------


def packed_args(operator: str, args: Args) -> Args | None:
    """Convert a shared case's arguments to a packed table's; None: packing does not support them.

    Packing rounds the values. So give the reference `plain_args` of the result.
    """
    if operator not in ACTIVATIONS:
        return args
    packed = list(args)
    for position in ACTIVATIONS[operator]:
        if position < len(packed) and not _is_e4m3(packed[position]):
            packed[position] = _bfloat16(packed[position])
    try:
        if operator in WINDOW_WRITERS:
            packed[-1] = _packed_rows(args[-1], _rope(args[-3].rotary))
            return tuple(packed) if args[-3].round_nope else None
        if operator == "sparse_attention":
            if args[2] is None:  # The kernels normalise every head.
                return None
            packed[4], packed[5] = (
                arg and replace(arg, rows=_packed_rows(arg.rows, _rope(args[1])))
                for arg in args[4:6]
            )
        elif operator == "select_entries":
            if not args[7]:  # Unrounded keys may have widths that FP4's groups do not divide.
                return None
            packed[2] = _packed_keys(args[2])
            return tuple(packed)
        elif operator == "compress":
            if any(part.rounding == "none" for part in args[0]):
                return None
            packed[0] = tuple(_packed_part(part, _rope(args[2])) for part in args[0])
    except ValueError:  # Packed rows do not support this width.
        return None
    weights = [_packed_weight(arg) for arg in packed]
    return None if any(w is _NO_FORM for w in weights) else tuple(weights)


_NO_FORM = object()


def _bfloat16(x: Tensor) -> Tensor:
    """Convert to bfloat16, and keep the strides."""
    out = torch.empty_strided(x.size(), x.stride(), dtype=torch.bfloat16, device=x.device)
    return out.copy_(x)


def _packed_rows(rows: CacheRows, rope: int) -> CacheRows:
    return replace(rows, pool=pack_rows(rows.pool, rows.table.rows_per_page, rope))


def _packed_keys(rows: CacheRows) -> CacheRows:
    return replace(rows, pool=pack_keys(rows.pool, rows.table.rows_per_page))


def _packed_part(part: CompressPart, rope: int) -> CompressPart:
    key = part.rounding == "key"
    entries = _packed_keys(part.entries) if key else _packed_rows(part.entries, rope)
    return replace(part, entries=entries)


def _packed_weight(arg: Any) -> Any:
    """Pack a weight: FP8 or FP4 if its inputs are rounded, otherwise bfloat16."""
    if isinstance(arg, LinearWeight):
        if not arg.input_group:
            return LinearWeight(arg.weight.bfloat16(), out_dtype=torch.float32)
        if arg.input_group != KERNEL_GROUP:
            return _NO_FORM
        weight, scale = _fp8(arg.weight)
        return LinearWeight(weight, arg.input_group, scale, torch.bfloat16)
    if isinstance(arg, ExpertWeight):
        if arg.input_group != KERNEL_GROUP:
            return _NO_FORM
        shared = arg.w13.dim() == 2
        if not shared and (arg.w13.shape[-1] % 32 or arg.w2.shape[-1] % 32):
            return _NO_FORM
        (w13, scale13), (w2, scale2) = (_fp8(w) if shared else _fp4(w) for w in (arg.w13, arg.w2))
        return ExpertWeight(w13, w2, arg.input_group, scale13, scale2)
    return arg


def _fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    if weight.dim() == 2:
        data, scale = quantise_fp8_block(weight)
        return data, scale_to_float32(scale)
    parts = [_fp8(w) for w in weight]
    return torch.stack([w for w, _ in parts]), torch.stack([s for _, s in parts])


def _fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    codes, exponents = quantise_fp4(weight)
    return codes.view(torch.uint8), exponents.view(torch.uint8)


# --- Variants of a call ---------------------------------------------------------------------------


def far_pages(args: Args, least_bytes: int) -> Args:
    """Move all pages after empty ones, so that their offsets are at least `least_bytes`."""
    tables: dict[int, tuple[PageTable, int]] = {}

    def moved(rows: CacheRows) -> CacheRows:
        pool, table = rows.pool, rows.table
        page_rows = 1 if pool.dtype == torch.uint8 else table.rows_per_page
        if id(table) not in tables:
            page_bytes = page_rows * pool.stride(0) * pool.element_size()
            count = -(-least_bytes // page_bytes)
            tables[id(table)] = replace(table, pages=table.pages + count), count
        shifted, count = tables[id(table)]
        far = pool.new_zeros(count * page_rows + len(pool), *pool.shape[1:])
        far[count * page_rows :] = pool
        return CacheRows(far, shifted)

    def far(arg: Any) -> Any:
        if isinstance(arg, CacheRows):
            return moved(arg)
        if isinstance(arg, Window | AllEntries):
            return replace(arg, rows=moved(arg.rows))
        if isinstance(arg, TopkEntries):
            rows = moved(arg.rows)
            slots = arg.slots + tables[id(arg.rows.table)][1] * rows.table.rows_per_page
            return TopkEntries(rows, slots.where(arg.slots >= 0, -1))
        if isinstance(arg, CompressPart):
            return replace(arg, state=moved(arg.state), entries=moved(arg.entries))
        return tuple(map(far, arg)) if isinstance(arg, tuple) else arg

    return tuple(map(far, args))


def padded(args: Args, by_token: Sequence[int], count: int) -> Args:
    """Add `count` padding tokens (position -1) to a step, each in a sequence without pages."""

    def table(arg: PageTable) -> PageTable:
        pages = torch.cat((arg.pages, arg.pages.new_zeros(count, arg.pages.shape[1])))
        return replace(arg, pages=pages, first=torch.cat((arg.first, arg.first.new_zeros(count))))

    def more(arg: Any) -> Any:
        if isinstance(arg, Tokens):
            last = arg.query_start[-1:]
            steps = torch.arange(1, count + 1, dtype=torch.int32, device=last.device)
            return Tokens(
                positions=F.pad(arg.positions, (0, count), value=-1),
                sequence=torch.cat((arg.sequence, len(arg.query_start) - 2 + steps)),
                query_start=torch.cat((arg.query_start, last + steps)),
                max_len=arg.max_len,
                max_query=max(1, arg.max_query),
            )
        if isinstance(arg, CacheRows):
            return replace(arg, table=table(arg.table))
        if isinstance(arg, Window | AllEntries):
            return replace(arg, rows=more(arg.rows))
        if isinstance(arg, TopkEntries):
            return replace(arg, slots=F.pad(arg.slots, (0, 0, 0, count), value=-1))
        if isinstance(arg, tuple):
            return tuple(map(more, arg))
        if isinstance(arg, CompressPart):
            projected = more(arg.projected)
            state, entries = more(arg.state), more(arg.entries)
            return replace(arg, projected=projected, state=state, entries=entries)
        if isinstance(arg, Tensor):
            rows = torch.arange(len(arg) + count, device=arg.device) % len(arg)
            return arg.index_select(0, rows)
        return arg

    return tuple(more(arg) if i in by_token else arg for i, arg in enumerate(args))
