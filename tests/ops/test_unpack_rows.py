"""Which rows of a step are unpacked, and what they hold, in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.support.op_case import CONFIGS, Args, Chunks, ModelDraw
from tests.support.operator_checks import model_case
from tests.support.packing import plain_args

from finwhale.ops.attention import sparse_attention_hopper_unpack as unpacking
from finwhale.ops.attention.sparse_attention_hopper_unpack import UnpackedRows, unpack_rows
from finwhale.ops.paging import CacheRows, Tokens

from . import kernels_support as kernels_support

NONE = unpacking.NOT_UNPACKED.value
WINDOW = 128


def arguments(kind: str, chunks: Chunks) -> Args:
    return model_case(CONFIGS["flash"], ModelDraw("cpu"), "sparse_attention", kind, chunks).args()


def unpack(source: CacheRows, tokens: Tokens, ratio: int) -> UnpackedRows:
    return unpack_rows(
        source,
        tokens,
        window=WINDOW if ratio == 1 else 0,
        ratio=ratio,
        selected=ratio == 4,
        inline_asm=False,
        early_launch=False,
    )


def check(kind: str, ratio: int, chunks: Chunks) -> list[bool]:
    """Compare all rows that are unpacked; returns for each sequence whether they are."""
    args = arguments(kind, chunks)
    tokens, plain = args[3], plain_args("sparse_attention", args)
    source, rows = (args[4], plain[4]) if ratio == 1 else (args[5], plain[5])
    source, wanted, table = source.rows, rows.rows.pool, source.rows.table
    size = table.rows_per_page
    found = unpack(source, tokens, ratio)
    for sequence, (start, end) in enumerate(chunks):
        page = int(found.page[sequence])
        if page == NONE:
            continue
        first, last = (max(0, start - WINDOW + 1), end) if ratio == 1 else (0, end // ratio)
        for row in range(first, last):
            slot = int(table.slots(np.array([sequence]), np.array([row]))[0])
            at = page * size + row
            got = found.rows[at].float()
            got[:448] *= 2.0**64
            assert torch.equal(got, wanted[slot].float()), (sequence, row)
            if found.copies is not None:
                assert int(found.copies[slot // size]) == at // size
    return [page != NONE for page in found.page.tolist()]


@pytest.fixture
def least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "LEAST_TOKENS", 8)


@pytest.mark.usefixtures("least")
@pytest.mark.parametrize(("kind", "ratio"), [("window", 1), ("C4", 4), ("C128", 128)])
def test_prompts_are_unpacked_and_decodes_are_not(kind: str, ratio: int) -> None:
    chunks = ((0, 8), (699, 700), (130, 150), (60, 67), (500, 513))
    assert check(kind, ratio, chunks) == [True, False, True, False, True]


@pytest.mark.usefixtures("least")
def test_more_sequences_than_a_program_reads_at_once() -> None:
    chunks = [*((at, at + 1) for at in range(200)), (20, 40)]
    assert check("C4", 4, chunks) == [False] * 200 + [True]


@pytest.mark.usefixtures("least")
def test_long_contexts_of_few_tokens_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "ROWS_PER_TOKEN", 16)
    assert check("C4", 4, ((511, 519), (1200, 1208), (500, 530))) == [False, False, True]


@pytest.mark.usefixtures("least")
def test_what_does_not_fit_stays_packed() -> None:
    """A step has room for its longest sequence, and for all its tokens."""
    chunks = ((2000, 2010), (2000, 2010), (2000, 2010))
    args = arguments("C4", chunks)
    tokens = replace(args[3], max_len=2010)
    found = unpack(args[5].rows, tokens, 4)
    assert len(found.rows) == 64 * (-(-(2010 + 8 * 30) // 256) + 30 // 8)
    assert [page != NONE for page in found.page.tolist()] == [True, False, False]


@pytest.mark.usefixtures("least")
def test_padding_is_not_unpacked() -> None:
    args = arguments("window", ((0, 20), (64, 80)))
    tokens = args[3]
    tokens.positions[20:] = -1
    found = unpack(args[4].rows, tokens, 1)
    assert [page != NONE for page in found.page.tolist()] == [True, False]


def test_the_bounds_of_a_step_tell_whether_it_may_have_prompts() -> None:
    tokens = arguments("window", ((0, 300),))[3]
    assert unpacking.has_prompts(tokens)
    assert not unpacking.has_prompts(replace(tokens, max_query=1))
    assert not unpacking.has_prompts(tokens.part(slice(0, 100)))
