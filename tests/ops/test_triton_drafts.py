"""The Triton kernels of the operators around drafts in the interpreter, against the definitions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.op_case import Draw
from torch import Tensor

from finwhale import LLM, SamplingParams
from finwhale.bench.engine import draft_on_device
from finwhale.demo import DEMO_PATH, DSPARK_PATH
from finwhale.engine.ranks.ranks import first_rank
from finwhale.ops import Ops, load_ops
from finwhale.ops.drafts import BlockShape, DraftBlock, ref
from finwhale.ops.drafts import drafts_triton as kernels
from finwhale.ops.paging import PageTable

from ..engine.dspark_steps import Proposal, Proposals  # noqa: TID252
from .draft_cases import (
    LAST,
    PARAMS,
    STEPS,
    confidence_weight,
    continuation,
    one_each,
    verification,
    window_table,
)
from .kernels_support import DTYPES


@pytest.mark.parametrize(
    "num_tokens, rows, width", [(0, 1, 2), (1, 1, 2), (128, 5, 4), (300, 64, 8)]
)
def test_continued_tokens(num_tokens: int, rows: int, width: int) -> None:
    found, wanted = (continuation(num_tokens, rows, width) for _ in range(2))
    kernels.continue_tokens(*found)
    ref.continue_tokens(*wanted)
    assert torch.equal(found[2], wanted[2]) and torch.equal(found[3], wanted[3])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_accepted_drafts(step: tuple[tuple[int, ...], int, int, int], seed: int) -> None:
    case = verification(*step, seed=seed)
    wanted_args, found_args = case.args(), case.args()
    wanted = ref.accept_drafts(*wanted_args), *wanted_args[2:]
    found = kernels.accept_drafts(*found_args), *found_args[2:]
    for one, other in zip((*found[0], *found[1:]), (*wanted[0], *wanted[1:]), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def parts(block: DraftBlock) -> tuple[Tensor, ...]:
    tokens = block.tokens
    return block.ids, tokens.positions, tokens.sequence, tokens.query_start, block.extra_kv_slots


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("last", [LAST, (129,), (-1,), ()], ids=len)
def test_blocks(rows: int, last: tuple[int, ...]) -> None:
    """With newest ids that are a column of a tensor."""
    newest = Draw().integers(1000, len(last), 6)[:, 0]
    table = window_table(last, 64, 128, rows)
    args = newest, one_each(last), table, BlockShape(rows, 2**17 + 1, 128)
    found, wanted = kernels.make_blocks(*args), ref.make_blocks(*args)
    assert (found.tokens.max_len, found.tokens.max_query) == (1100 + rows, rows)
    for one, other in zip(parts(found), parts(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_slots_of_the_last_pages() -> None:
    """Slots above 2^24, which float32 would not hold, and a table that is longer than needed."""
    pages = torch.full((2, 40), 2**24 - 3, dtype=torch.int32)[:, :33]
    table = PageTable(pages, torch.tensor([0, 1], dtype=torch.int32), 64)
    args = torch.tensor([4, 5]), one_each((2, 300)), table, BlockShape(3, 1, 128)
    found, wanted = kernels.make_blocks(*args), ref.make_blocks(*args)
    assert torch.equal(found.extra_kv_slots, wanted.extra_kv_slots)
    assert int(found.extra_kv_slots.max()) > 2**29


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("count", "num_drafts", "width", "markov"),
    [
        (0, 2, 64, 8),
        (1, 1, 64, 0),
        (3, 5, 100, 8),
        (2, 7, 48, 5),
        (2, 2, 1500, 256),
        (1, 3, 4096, 64),
    ],
)
def test_confidences(
    count: int, num_drafts: int, width: int, markov: int, dtype: torch.dtype
) -> None:
    """Streams are rows of larger blocks. float32 sums in another order: 1e-5 of a confidence."""
    draw, w = Draw(), confidence_weight(width, markov)
    streams = draw.normal(count, num_drafts + 2, 4, width, scale=2.0).to(dtype)
    streams = streams[:, 1 : 1 + num_drafts]
    newest, ids = draw.integers(40, count, 3)[:, 0], draw.integers(40, count, num_drafts)
    found = kernels.draft_confidences(streams, newest, ids, w, PARAMS)
    wanted = ref.draft_confidences(streams, newest, ids, w, PARAMS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    if count > 1:
        assert len(found.unique()) > 2
        last = slice(count - 1, count)
        alone = kernels.draft_confidences(streams[last], newest[last], ids[last], w, PARAMS)
        assert torch.equal(alone, found[last])


def test_unsupported_arguments_are_refused() -> None:
    case = verification(*STEPS[3])
    chosen, step, next_ids, advanced = case.args()
    with pytest.raises(ValueError, match="contiguous"):
        kernels.accept_drafts(chosen, step, next_ids.T.contiguous().T, advanced)
    with pytest.raises(ValueError, match=r"3 drafts need results of shape \(6, 4\)"):
        kernels.accept_drafts(chosen, step, next_ids[:, :3].contiguous(), advanced)
    w, ids = confidence_weight(8, 0), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.draft_confidences(torch.zeros(1, 1, 8, 4).mT, ids[0], ids, w, PARAMS)
    table = PageTable(torch.zeros(4, 1, dtype=torch.int32).T[:, ::2], torch.zeros(1).int(), 64)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.make_blocks(ids[0], one_each((3,)), table, BlockShape(2, 1, 128))


KERNELS = {
    name: getattr(kernels, name)
    for name in ("continue_tokens", "accept_drafts", "make_blocks", "draft_confidences")
}


def drafts_of(path: Path, draft_tokens: int) -> tuple[list[list[int]], list[Proposal]]:
    """What requests get in steps on the device that run ahead of the host, and all drafts."""
    engine = LLM(
        path, device="cpu", draft_tokens=draft_tokens, max_num_seqs=4, max_model_len=300
    )._engine
    steps = draft_on_device(first_rank(engine.executor), engine.config)
    engine.steps_ahead = 1
    proposals = Proposals(engine, steps)
    results = []
    for i, length in enumerate((3, 130, 60)):
        params = SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=24 + i)
        prompt = [20 + (i + 3) * n % 400 for n in range(length)]
        results.append(engine.add_request(str(i), prompt, replace(params, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    assert engine.metrics().drafts_accepted[0] > 5
    return [result.outputs[0].token_ids for result in results], proposals.found


@pytest.mark.parametrize(
    "path, draft_tokens", [(DSPARK_PATH, 5), (DEMO_PATH, 3)], ids=["dspark", "mtp"]
)
def test_an_engine_with_these_kernels(
    monkeypatch: pytest.MonkeyPatch, path: Path, draft_tokens: int
) -> None:
    """Every draft and every token is that of the definitions."""
    wanted_ids, wanted = drafts_of(path, draft_tokens)

    def with_kernels(*args: Any, **named: Any) -> Ops:
        return replace(load_ops(*args, **named), **KERNELS)

    monkeypatch.setattr("finwhale.engine.start.decisions.load_ops", with_kernels)
    found_ids, found = drafts_of(path, draft_tokens)
    assert found_ids == wanted_ids
    assert len(found) == len(wanted) > 20
    for one, other in zip(found, wanted, strict=True):
        assert one == replace(other, confidences=one.confidences)
        assert one.confidences == pytest.approx(other.confidences, rel=1e-5, abs=1e-6)
    assert any(one.confidences for one in found) is (path == DSPARK_PATH)
