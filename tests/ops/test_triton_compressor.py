"""The compressors' Triton kernel in the interpreter, against the reference on dense pools.

The kernel writes packed pools. Entries are compared as the values that they stand for: E4M3 and FP4
values differ by a step where a sum in another order falls on the other side of a boundary, in at
most one value of 200; state rows are copies and must be equal; what is not written must not change.
"""

from dataclasses import replace

import pytest
import torch
from tests.support.cases.compressor import VERIFICATIONS
from tests.support.checked_case import E4M3_FLIP, FP4_FLIP
from tests.support.model_cases.compressor import EPS, compress_args
from tests.support.op_arguments import strided
from tests.support.op_case import Chunks, Draw
from tests.support.packed_pools import pack_keys, pack_rows
from tests.support.packing import unpack_keys, unpack_rows
from torch import Tensor

from finwhale.ops.compressor import CompressPart, Rounding, ref
from finwhale.ops.compressor import compress_triton as kernels
from finwhale.ops.paging import MAX_DECODE_QUERY, CacheRows, PageTable, StepCache, Tokens
from finwhale.ops.rounding import hadamard

from . import kernels_support as kernels_support

FLIPS = 0.005
# A step has a ratio, chunks (first token, end), widths of its parts' entries, and a rope width.
STEPS: tuple[tuple[int, Chunks, tuple[int, ...], int], ...] = (
    (4, ((0, 1),), (128,), 64),
    (4, ((0, 4), (7, 8), (5, 7)), (128, 64), 64),
    (4, ((0, 41), (9, 12)), (144, 64), 32),
    (4, ((8, 12),), (512, 128), 64),
    (4, ((7, 8), (511, 512), (255, 256), (14, 15), (259, 260)), (128, 128), 64),
    (4, ((240, 530), (254, 259), (253, 257)), (64, 32), 16),
    (128, ((126, 127),), (128,), 64),
    (128, ((0, 130), (255, 256), (100, 101)), (48,), 16),
    (128, ((200, 384),), (512,), 64),
    (128, ((511, 512), (130, 131), (767, 769)), (64,), 32),
)


def packed(part: CompressPart, rope: int) -> CompressPart:
    entries, rows = part.entries, part.entries.table.rows_per_page
    if part.rounding == "key":
        pool = pack_keys(entries.pool, rows)
    else:
        pool = pack_rows(entries.pool, rows, rope)
    # Pages and rows lie apart, as in a cache of several layers.
    return with_pools(part, strided(part.state.pool), strided(pool))


def with_pools(part: CompressPart, state: Tensor, entries: Tensor) -> CompressPart:
    return replace(
        part,
        state=replace(part.state, pool=state),
        entries=replace(part.entries, pool=entries),
    )


def dense(part: CompressPart, rope: int) -> Tensor:
    width, pool, rows = part.weight.norm.shape[0], part.entries.pool, part.entries.table
    if part.rounding == "key":
        return unpack_keys(pool, rows.rows_per_page, width)
    return unpack_rows(pool, rows.rows_per_page, width, rope)


def check(
    parts: tuple[CompressPart, ...],
    tokens: Tokens,
    rotary: Tensor,
    run: Tokens | None = None,
    max_verify_tokens: int = 4,
) -> tuple[CompressPart, ...]:
    """Returns what the kernel wrote.

    Args:
        run: the tokens that the kernel gets, if not those that the reference gets.
    """
    rope = 2 * rotary.shape[1]
    found = tuple(packed(part, rope) for part in parts)
    before = [dense(part, rope) for part in found]
    wanted = tuple(
        with_pools(part, part.state.pool.clone(), values.clone())
        for part, values in zip(parts, before, strict=True)
    )
    kernels.compress(found, run or tokens, rotary, EPS, max_verify_tokens)
    count = tokens.positions.shape[0]
    cut = tuple(replace(part, projected=part.projected[:count]) for part in wanted)
    ref.compress(cut, tokens, rotary, EPS, max_verify_tokens)
    for part, one, other, old in zip(parts, found, wanted, before, strict=True):
        assert torch.equal(one.state.pool, other.state.pool)
        values = dense(one, rope)
        written = (other.entries.pool != old).any(1)
        assert torch.equal(values[~written], old[~written])
        if written.any():
            values, wanted_values = values[written], other.entries.pool[written]
            error = (values - wanted_values).abs()
            allowed = 2.0**-7 * wanted_values.abs() + 8e-6 * wanted_values.abs().amax()
            assert (error > allowed).float().mean() <= FLIPS
            step = FP4_FLIP if part.rounding == "key" else E4M3_FLIP
            assert (error <= step * wanted_values.abs().amax()).all()
    return found


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_against_the_reference(step: tuple[int, Chunks, tuple[int, ...], int]) -> None:
    ratio, chunks, widths, rope = step
    roundings: tuple[Rounding, ...] = ("nope", "key")
    args = compress_args(Draw(), ratio, chunks, widths, rope, roundings)  # type: ignore[arg-type]
    parts, tokens, rotary, _, _ = args
    check(parts, tokens, rotary)


@pytest.mark.parametrize("step", VERIFICATIONS, ids=str)
def test_verifications_of_up_to_8_tokens(
    step: tuple[int, int, Chunks, tuple[int, ...], int],
) -> None:
    """They run as decodes, with padding, and write the bits that a prefill writes."""
    most, ratio, chunks, widths, rope = step
    args = compress_args(
        Draw(),
        ratio,  # type: ignore[arg-type]
        chunks,
        widths,
        rope,
        ("nope", "key"),
        max_verify_tokens=most,
    )
    parts, tokens, rotary, _, _ = args
    padded = replace(
        tokens,
        positions=torch.cat((tokens.positions, torch.full((3,), -1))),
        sequence=torch.cat((tokens.sequence, torch.tensor([0, 1, 1], dtype=torch.int32))),
        cache=StepCache(),
    )
    found = []
    for max_query in (MAX_DECODE_QUERY, MAX_DECODE_QUERY + 1):
        run = replace(padded, max_query=max_query, cache=StepCache())
        wide = tuple(
            replace(
                part,
                projected=torch.cat(
                    (part.projected, torch.full((3, part.projected.shape[1]), torch.nan))
                ),
            )
            for part in parts
        )
        found.append(check(wide, tokens, rotary, run, most))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.entries.pool, other.entries.pool)
        assert torch.equal(one.state.pool, other.state.pool)


@pytest.mark.parametrize("ratio", (4, 128))
def test_padding_of_a_captured_batch(ratio: int) -> None:
    chunks = ((ratio - 1, ratio), (10, 11))
    args = compress_args(Draw(), ratio, chunks, (64,), 16, ("nope",))  # type: ignore[arg-type]
    parts, tokens, rotary, _, _ = args
    more = torch.full((3,), -1)
    run = Tokens(
        positions=torch.cat((tokens.positions, more)),
        sequence=torch.cat((tokens.sequence, torch.tensor([0, 1, 1], dtype=torch.int32))),
        query_start=tokens.query_start,
        max_len=2**20,
        max_query=1,
    )
    wide = torch.cat((parts[0].projected, torch.full((3, parts[0].projected.shape[1]), torch.nan)))
    check((replace(parts[0], projected=wide),), tokens, rotary, run)


def test_an_entry_has_the_same_bits_in_a_prefill_and_in_a_decode() -> None:
    for ratio, start in ((4, 5), (128, 300)):
        end = start // ratio * ratio + ratio
        args = compress_args(
            Draw(),
            ratio,  # type: ignore[arg-type]
            ((0, end),),
            (64,),
            16,
            ("nope",),
        )
        (part,), tokens, rotary, _, _ = args
        pages = torch.arange(end // 8 + 1, dtype=torch.int32)[None]
        states = PageTable(pages, torch.zeros(1, dtype=torch.int32), 8)
        state_pool = torch.zeros(8 * pages.shape[1], part.projected.shape[1])
        state_pool[: end - 1] = part.projected[: end - 1]
        empty = CacheRows(torch.zeros_like(state_pool), states)
        whole = packed(replace(part, state=empty), 16)
        kernels.compress((whole,), tokens, rotary, EPS, 4)
        filled = CacheRows(state_pool, states)
        alone = packed(replace(part, state=filled, projected=part.projected[-1:]), 16)
        last = Tokens(
            positions=tokens.positions[-1:],
            sequence=tokens.sequence[-1:],
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            max_len=end,
            max_query=1,
        )
        kernels.compress((alone,), last, rotary, EPS, 4)
        slot = part.entries.table.slots(last.host_sequence, last.host_positions // ratio)
        assert torch.equal(dense(alone, 16)[slot], dense(whole, 16)[slot])


@pytest.mark.parametrize("width", (32, 64, 128))
def test_groups_of_a_key_that_lie_far_apart(width: int) -> None:
    """Rows that rotate into groups of other magnitudes, zeros, and scales less than 2^-11 of the
    largest: byte for byte what pack_keys makes of the rotated entry.

    All tokens have one row, which is then the mixture; nothing is turned.
    """
    args = compress_args(Draw(), 4, ((0, 28),), (width,), 32, ("key",))
    (part,), tokens, _, _, _ = args
    group = torch.tensor([[1, 1, 1, 1], [1, 2.0**-3, 2.0**-9, 3e3], [1, 2.0**-16, 2.0**-13, 0]])
    for scales in group[:, : width // 32]:
        wanted = (Draw(1).normal(width // 32, 32) * scales[:, None]).flatten()
        wanted /= wanted.square().mean().sqrt()
        row = hadamard(wanted)  # its own inverse
        projected = torch.cat((row, row, Draw(2).normal(2 * width)))
        weight = replace(part.weight, norm=torch.ones(width))
        filled = replace(part, projected=projected.expand(28, -1).contiguous(), weight=weight)
        written = packed(filled, 32)
        still = torch.stack((torch.ones(28, 16), torch.zeros(28, 16)), -1)
        kernels.compress((written,), tokens, still, 0.0, 4)
        slots = part.entries.table.slots(0, torch.arange(7).numpy())
        found = dense(written, 32)[slots]
        keys = unpack_keys(pack_keys(wanted[None], 1), 1, width)
        assert torch.equal(found, keys.expand(7, -1))
        page = int(slots[0]) // 64
        exponents = written.entries.pool[page, 32 * width :].view(64, -1)[:7]
        assert torch.equal(exponents, pack_keys(wanted[None], 1)[:, width // 2 :].expand(7, -1))


def test_unpacked_entries_are_refused() -> None:
    args = compress_args(Draw(), 4, ((0, 4),), (64,), 16, ("none",))
    parts, tokens, rotary, eps, _ = args
    with pytest.raises(ValueError, match="packed entries"):
        kernels.compress(parts, tokens, rotary, eps, 4)
