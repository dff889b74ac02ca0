"""Calls operators on copies of arguments, takes some tokens of a step, and strides tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from tests.support.op_case import Args, Draw
from torch import Tensor

from finwhale.ops.attention import AllEntries, TopkEntries, Window
from finwhale.ops.compressor import CompressPart
from finwhale.ops.paging import CacheRows, PageTable, Tokens
from finwhale.ops.rounding import unscaled_e4m3

# Number of columns between the rows of a strided tensor.
MORE_COLUMNS = 16


def outliers(draw: Draw, *shape: int) -> Tensor:
    """Normal values. About 1% of them are 300 times as large, and the last row is zero."""
    x = draw.normal(*shape)
    rare = torch.rand(shape, generator=draw.generator) < 0.01
    x = torch.where(rare, 300 * x, x)
    x[-1:] = 0
    return x


def results(fn: Callable[..., Any], args: Args, written: Sequence[int]) -> list[Tensor]:
    """Call an operator on copies of the arguments; returns its results, then the written tensors.

    Written E4M3 values and their scales are combined into float32 values.
    """
    args = tuple(_copied(arg) for arg in args)
    returned = fn(*args)
    if not isinstance(returned, tuple):
        returned = () if returned is None else (returned,)
    return [*returned, *written_tensors(args, written)]


def written_tensors(args: Args, written: Sequence[int]) -> list[Tensor]:
    """The tensors that an operator has written, in the form of `results`."""
    found = list(chain.from_iterable(_written(args[i]) for i in written))
    if found and found[0].dtype == torch.float8_e4m3fn:
        values, scales = found
        return [unscaled_e4m3(values.flatten(1), scales).view(values.shape)]
    return found


def _written(arg: Any) -> list[Tensor]:
    """The tensors of an argument that an operator writes: itself, or its pools."""
    if isinstance(arg, Tensor):
        return [arg]
    if isinstance(arg, CacheRows):
        return [arg.pool]
    return [rows.pool for part in arg for rows in (part.state, part.entries)]


def _copied(arg: Any) -> Any:
    """Copy the tensors that an operator may write, with the same strides."""
    if isinstance(arg, Tensor):
        if 0 in arg.stride():  # Operators do not write expanded tensors.
            return arg
        copy = torch.empty_strided(arg.size(), arg.stride(), dtype=arg.dtype, device=arg.device)
        return copy.copy_(arg)
    if isinstance(arg, tuple):
        return tuple(_copied(part) for part in arg)
    if isinstance(arg, CacheRows):
        return replace(arg, pool=_copied(arg.pool))
    if isinstance(arg, CompressPart):
        return replace(arg, state=_copied(arg.state), entries=_copied(arg.entries))
    return arg


def take_tokens(args: Args, by_token: Sequence[int], start: int, stop: int) -> Args:
    """The arguments of a step with only tokens start..stop-1; chunks are cut to that range."""
    sequences = slice(0, 0)
    for arg in args:
        if isinstance(arg, Tokens):
            owners = arg.host_sequence[start:stop]
            sequences = slice(int(owners[0]), int(owners[-1]) + 1)
    rows = slice(start, stop)
    return tuple(
        _taken(arg, rows, sequences) if position in by_token else arg
        for position, arg in enumerate(args)
    )


def _taken(arg: Any, rows: slice, sequences: slice) -> Any:
    if isinstance(arg, Tokens):
        starts = arg.query_start[sequences.start : sequences.stop + 1]
        return Tokens(
            positions=arg.positions[rows],
            sequence=arg.sequence[rows] - sequences.start,
            query_start=starts.clamp(rows.start, rows.stop) - rows.start,
            max_len=arg.max_len,
            max_query=arg.max_query,
        )
    if isinstance(arg, CacheRows):
        table = arg.table
        pages, first = table.pages[sequences], table.first[sequences]
        return CacheRows(arg.pool, PageTable(pages, first, table.rows_per_page))
    if isinstance(arg, Window | AllEntries):
        return replace(arg, rows=_taken(arg.rows, rows, sequences))
    if isinstance(arg, TopkEntries):
        return replace(arg, slots=arg.slots[rows])
    if isinstance(arg, tuple):
        return tuple(_taken(part, rows, sequences) for part in arg)
    if isinstance(arg, CompressPart):
        state, entries = (_taken(part, rows, sequences) for part in (arg.state, arg.entries))
        return replace(arg, projected=arg.projected[rows], state=state, entries=entries)
    return None if arg is None else arg[rows]


def strided(x: Tensor) -> Tensor:
    """Copy x [N,..,W] to memory with gaps between its rows, filled with NaN, or 255 for bytes."""
    flat = x.flatten(1)
    between = 255 if x.dtype == torch.uint8 else torch.nan
    wide = flat.new_full((flat.shape[0], flat.shape[1] + MORE_COLUMNS), between)
    wide[:, : flat.shape[1]] = flat
    own: Tensor = wide[:, : flat.shape[1]].unflatten(1, x.shape[1:])
    return own
