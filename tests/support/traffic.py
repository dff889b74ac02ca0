"""Random steps: chunks of sequences at random positions, with pages as an engine allocates them."""

import random
from collections.abc import Sequence

import torch
from tests.support.tiny import tiny_config

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.prefix_index import PrefixIndex
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.plan.step_planner import StepPlanner
from finwhale.engine.steps.inputs import Batch, planned_inputs
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config_json import config_of
from finwhale.request import SamplingParams


def planned(chunks: Sequence[Chunk]) -> tuple[StepPlan, SlotTables]:
    """Make a step's plan, and the rank's page tables of its slots."""
    plan = StepPlanner(vocab_size=0).plan(chunks)
    tables = SlotTables(list(chunks[0].sequence.tables))
    tables.apply(plan)
    return plan, tables


class Traffic:
    """Sequences with tokens computed in earlier steps, and the chunks of one more step.

    Args:
        seed: seed of the tiny model whose caches have the pages.
        decode: each sequence has one token in the step.
        prefix_caching: sequences also have pages for the state at the ends of blocks.
    """

    def __init__(
        self,
        seed: int,
        draw: random.Random,
        num_seqs: int,
        *,
        decode: bool = False,
        prefix_caching: bool = False,
    ) -> None:
        self.prefix_caching = prefix_caching
        self.config = config_of(tiny_config(seed))
        self.groups = cache_spec(self.config)
        self.pages = PageManager(self.groups, {g.name: 2000 for g in self.groups})
        if prefix_caching:
            PrefixIndex(self.pages)
        self.rows_per_page = {g.name: g.rows_per_page for g in self.groups}
        for pool in self.pages.pools.values():
            draw.shuffle(pool._free)
        self.chunks: list[Chunk] = []
        for i in range(num_seqs):
            start = draw.choice((0, 1, 3, 4, 5, 127, 128, 129, 255, 256, draw.randint(0, 600)))
            count = draw.choice((1, 1, 2, 3, 4, 5, 8, 127, 128, 130, draw.randint(1, 300)))
            count = 1 if decode else count
            known = start + count + draw.choice((0, 0, 1, 7))
            token_ids = [draw.randrange(self.config.vocab_size) for _ in range(known)]
            sequence = SequenceState(
                str(i), str(i), i, token_ids, known, known + 5, SamplingParams()
            )
            sequence.slot = i
            sequence.tables = self.pages.new_tables()
            at = 0
            while at < start:
                end = min(start, at + draw.choice((1, 50, 200)))
                self.pages.grow(sequence.tables, at, end)
                self.pages.trim(sequence.tables, end)
                at = end
            self.pages.grow(sequence.tables, start, start + count)
            self.chunks.append(Chunk(sequence, start, start + count))

    def build(self) -> Batch:
        """Build the step's inputs on the CPU."""
        plan, tables = planned(self.chunks)
        return planned_inputs(plan, self.groups, tables, torch.device("cpu"))

    def has_page(self, sequence: SequenceState, group: str, row: int) -> bool:
        """Whether the sequence has a page with this row."""
        table = sequence.tables[group]
        number = row // self.rows_per_page[group] - table.first
        return 0 <= number < len(table.pages) and table.pages[number] > 0

    def slot(self, sequence: SequenceState, group: str, row: int) -> int:
        """Slot of a row according to the sequence's own page table; the page must exist."""
        table, per_page = sequence.tables[group], self.rows_per_page[group]
        number = row // per_page - table.first
        assert number >= 0
        page = table.pages[number]
        assert page
        return page * per_page + row % per_page

    def tokens(self) -> list[tuple[Chunk, int]]:
        """(chunk, position) of the step's tokens, in order."""
        return [(chunk, t) for chunk in self.chunks for t in range(chunk.start, chunk.end)]
