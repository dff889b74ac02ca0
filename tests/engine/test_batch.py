"""The tensors of a step against the chunks and page tables that they describe."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.tiny import tiny_config
from tests.support.traffic import Traffic, planned

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.plan.step_plan import PromptBounds
from finwhale.engine.start.memory import largest_transfer
from finwhale.engine.steps import inputs as building
from finwhale.engine.steps.host_transfer import ALIGN, send
from finwhale.engine.steps.inputs import planned_inputs
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.cache import CacheGroup
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.models.step_inputs import StepInputs
from finwhale.request import SamplingParams

PARAMS = SamplingParams()
SEEDS, NUM_SEQS, DECODE = st.integers(0, 40), st.integers(1, 5), st.booleans()
DRAWS = st.integers(0, 2**32).map(random.Random)


def build(groups: Sequence[CacheGroup], chunks: list[Chunk]) -> StepInputs:
    plan, tables = planned(chunks)
    return planned_inputs(plan, groups, tables, torch.device("cpu")).inputs


@settings(max_examples=100, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS, DECODE)
def test_tokens_and_logits_rows(
    seed: int, draw: random.Random, num_seqs: int, decode: bool
) -> None:
    traffic = Traffic(seed, draw, num_seqs, decode=decode)
    batch, tokens, chunks = traffic.build(), traffic.tokens(), traffic.chunks
    inputs, found = batch.inputs, batch.inputs.tokens
    assert inputs.token_ids.tolist() == [c.sequence.token_ids[t] for c, t in tokens]
    assert found.positions.tolist() == [t for _, t in tokens]
    assert found.sequence.tolist() == [chunks.index(c) for c, _ in tokens]
    starts = [0]
    for chunk in chunks:
        starts.append(starts[-1] + chunk.end - chunk.start)
    assert found.query_start.tolist() == starts
    assert found.max_len == max(c.end for c in chunks)
    assert found.max_query == max(c.end - c.start for c in chunks)
    # The last token of each chunk that reads all that is known.
    assert batch.logits_rows.tolist() == [
        i for i, (c, t) in enumerate(tokens) if t + 1 == len(c.sequence.token_ids)
    ]
    for tensor in (inputs.token_ids, found.positions, batch.logits_rows):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()
    for tensor in (found.sequence, found.query_start):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()


@settings(max_examples=50, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS, DECODE)
def test_the_largest_transfer(seed: int, draw: random.Random, num_seqs: int, decode: bool) -> None:
    """A step sends everything at once, and no more than the memory reserved for its size."""
    traffic = Traffic(seed, draw, num_seqs, decode=decode)
    plan, tables = planned(traffic.chunks)
    bounds = [(draw.randint(0, c.start), draw.randint(0, c.end + 9)) for c in traffic.chunks]
    plan = plan._replace(prompts=tuple(PromptBounds(*each) for each in bounds))
    sent: list[int] = []

    def counted(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
        sent.append(sum(-(-array.nbytes // ALIGN) * ALIGN for array in arrays))
        return send(device, *arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "send", counted)
        inputs = planned_inputs(plan, traffic.groups, tables, torch.device("cpu")).inputs
    tokens, prompts = inputs.tokens, inputs.prompts
    assert prompts is not None
    assert list(zip(prompts.cached.tolist(), prompts.tail_end.tolist(), strict=True)) == bounds
    assert list(prompts.chunks) == [
        (c.end - c.start, c.end - tail_end)
        for c, (_, tail_end) in zip(traffic.chunks, bounds, strict=True)
    ]
    limits = StepLimits(
        num_tokens=len(tokens.positions), num_seqs=len(traffic.chunks), max_len=tokens.max_len
    )
    assert len(sent) == 1
    assert sent[0] <= largest_transfer(traffic.groups, limits, vocab_size=32)


@settings(max_examples=100, deadline=None)
@given(SEEDS, DRAWS, NUM_SEQS, DECODE)
def test_page_tables(seed: int, draw: random.Random, num_seqs: int, decode: bool) -> None:
    traffic = Traffic(seed, draw, num_seqs, decode=decode)
    tables = traffic.build().inputs.tables
    assert set(tables) == set(traffic.rows_per_page)
    for name, table in tables.items():
        owned = [c.sequence.tables[name] for c in traffic.chunks]
        assert table.rows_per_page == traffic.rows_per_page[name]
        assert table.first.tolist() == [t.first for t in owned]
        width = table.pages.shape[1]
        # Rows of whole 64 bytes.
        assert width == -(-max(1, *(len(t.pages) for t in owned)) // 16) * 16
        assert table.pages.tolist() == [t.pages + [0] * (width - len(t.pages)) for t in owned]
        assert table.pages.dtype == table.first.dtype == torch.int32
        assert table.pages.stride(1) == 1


def test_a_model_of_window_layers_has_one_table() -> None:
    raw = tiny_config(0)
    config = config_of(raw | {"compress_ratios": [0] * (raw["num_hidden_layers"] + 1)})
    groups = cache_spec(config)
    pages = PageManager(groups, {g.name: 9 for g in groups})
    sequence = SequenceState(
        "a", "a", 0, [1, 2, 3], 3, 9, PARAMS, tables=pages.new_tables(), slot=0
    )
    pages.grow(sequence.tables, 0, 3)
    inputs = build(groups, [Chunk(sequence, 0, 3)])
    assert list(inputs.tables) == ["window"]


@pytest.mark.parametrize("count", [1, 3])
def test_before_the_first_entry_its_table_has_no_page(count: int) -> None:
    config = config_of(tiny_config(0))
    groups = cache_spec(config)
    pages = PageManager(groups, {g.name: 9 for g in groups})
    sequence = SequenceState(
        "a", "a", 0, [1, 2, 3], 3, 9, PARAMS, tables=pages.new_tables(), slot=0
    )
    pages.grow(sequence.tables, 0, count)
    inputs = build(groups, [Chunk(sequence, 0, count)])
    for name in ("c4", "c128"):
        assert inputs.tables[name].pages.tolist() == [[0] * 16]
