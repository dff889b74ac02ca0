"""The scheduler under random traffic, over a memory that remembers who wrote each row."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from finwhale.engine.kv_cache import plan_cache
from finwhale.engine.pages import PageManager
from finwhale.engine.scheduler import Chunk, Scheduler, Sequence
from finwhale.models.deepseek_v4.cache_spec import CacheGroup, cache_spec
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.request import SamplingParams
from finwhale.testing.tiny import tiny_config

PARAMS = SamplingParams()


def make_scheduler(seed: int, seqs: int, budget: int, pages_more: int) -> Scheduler:
    """One with room for `pages_more` reservation units beyond the least."""
    spec = cache_spec(ModelConfig.from_dict(tiny_config(seed)))
    plan = plan_cache(
        spec,
        itemsize=4,
        budget_bytes=10**12,
        max_num_seqs=seqs,
        max_step_tokens=budget,
        wanted_tokens=256 * (1 + pages_more),
    )
    return Scheduler(
        PageManager(spec, plan.num_pages),
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        capacity_tokens=plan.capacity_tokens,
        reserve_multiple=plan.reserve_multiple,
    )


def make_sequence(key: str, prompt: int, output: int) -> Sequence:
    return Sequence(
        key=key,
        request_id=key,
        index=0,
        token_ids=[5] * prompt,
        num_prompt=prompt,
        max_len=prompt + output,
        params=PARAMS,
    )


@dataclass
class Memory:
    """Row by row: whose, and which row of its sequence."""

    groups: tuple[CacheGroup, ...]
    window: int
    rows: dict[tuple[str, int, int], tuple[str, int]] = field(default_factory=dict)

    def place(self, group: CacheGroup, sequence: Sequence, row: int) -> tuple[str, int, int]:
        table = sequence.tables[group.name]
        number = row // group.rows_per_page - table.first
        assert 0 <= number < len(table.pages), f"row {row} of {group.name} has no page"
        page = table.pages[number]
        assert page, f"row {row} of {group.name} lies in nobody's page"
        return group.name, page, row % group.rows_per_page

    def step(self, chunk: Chunk) -> None:
        """Write what the model writes, then read what it reads, by the model's formulas."""
        start, end, sequence = chunk.start, chunk.end, chunk.sequence
        for group in self.groups:
            size = group.tokens_per_row
            if group.name == "window":
                written, read = range(start, end), range(max(0, start - self.window + 1), end)
            elif size > 1:
                written, read = range(start // size, end // size), range(end // size)
            else:  # rows of earlier tokens that the entries completing in this step mix
                ratio, mixed = (4, 8) if group.name == "c4_state" else (128, 128)
                entries = range(start // ratio, end // ratio)
                first = (entries[0] + 1) * ratio - mixed if entries else start
                read = range(max(0, first), start)
                # What is left behind: all that an entry that is still open will mix.
                open_from = (end // ratio + 1) * ratio - mixed
                written = range(max(start, open_from), end)
                for row in read:
                    self.check(group, sequence, row)
                read = written
            for row in written:
                self.rows[self.place(group, sequence, row)] = (sequence.key, row)
            for row in read:
                self.check(group, sequence, row)

    def check(self, group: CacheGroup, sequence: Sequence, row: int) -> None:
        found = self.rows.get(self.place(group, sequence, row))
        assert found == (sequence.key, row), f"{group.name}: {found} stands for row {row}"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_random_traffic(data: st.DataObject) -> None:
    """Arrivals, chunks, finishes and aborts at random; what is read is what was written."""
    seed = data.draw(st.integers(0, 40))
    budget = data.draw(st.sampled_from([1, 3, 16, 64, 150, 600]))
    scheduler = make_scheduler(
        seed, data.draw(st.integers(1, 5)), budget, data.draw(st.integers(0, 4))
    )
    memory = Memory(scheduler.pages.groups, tiny_config(seed)["sliding_window"])  # type: ignore[arg-type]
    draw = random.Random(data.draw(st.integers(0, 2**32)))
    arrived: list[Sequence] = []
    first_read: list[Sequence] = []
    arrivals = data.draw(st.integers(3, 16))
    steps = 0
    while len(arrived) < arrivals or scheduler.has_work:
        steps += 1
        assert steps < 20_000
        while len(arrived) < arrivals and (draw.random() < 0.3 or not scheduler.has_work):
            longest = min(scheduler.capacity_tokens, 1 + 20 * budget)
            prompt = draw.randint(1, longest - 1)
            output = draw.randint(1, min(longest - prompt, 20))
            arrived.append(make_sequence(f"s{len(arrived)}", prompt, output))
            scheduler.add(arrived[-1])
        chunks = scheduler.schedule()
        assert chunks, "there is work, and nothing runs"
        assert sum(c.end - c.start for c in chunks) <= budget
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert sum(s.reserved for s in scheduler.running) <= scheduler.capacity_tokens
        assert len({c.sequence.key for c in chunks}) == len(chunks)
        first_read += [c.sequence for c in chunks if c.start == 0]
        for chunk in chunks:
            assert chunk.start == chunk.sequence.num_computed < chunk.end
            assert chunk.completes == (chunk.end == len(chunk.sequence.token_ids))
            memory.step(chunk)
        scheduler.check_integrity()
        scheduler.computed(chunks)
        scheduler.check_integrity()
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.completes:
                sequence.token_ids.append(5)
                if len(sequence.token_ids) >= sequence.max_len or draw.random() < 0.05:
                    scheduler.finish(sequence)
                    scheduler.check_integrity()
        if draw.random() < 0.05 and scheduler.has_work:
            scheduler.finish(draw.choice([*scheduler.running, *scheduler.waiting]))
            scheduler.check_integrity()
    # First come, first served.
    order = [arrived.index(s) for s in first_read]
    assert order == sorted(order)
    for pool in scheduler.pages.pools.values():
        assert pool.num_free == pool.num_pages - 1


def test_decodes_come_before_prompts() -> None:
    """A long prompt never holds up the tokens of those that run."""
    scheduler = make_scheduler(0, 3, budget=10, pages_more=8)
    short, long = make_sequence("short", 4, 50), make_sequence("long", 100, 5)
    scheduler.add(short)
    scheduler.add(long)
    chunks = scheduler.schedule()
    assert [(c.sequence.key, c.start, c.end) for c in chunks] == [("short", 0, 4), ("long", 0, 6)]
    assert [c.completes for c in chunks] == [True, False]
    for step in range(10):
        scheduler.computed(chunks)
        short.token_ids.append(5)
        chunks = scheduler.schedule()
        assert [(c.sequence.key, c.end - c.start) for c in chunks] == [("short", 1), ("long", 9)]
        assert chunks[1].start == 6 + 9 * step
    scheduler.computed(chunks)


def test_the_first_in_line_is_not_overtaken() -> None:
    """A small request waits behind a large one that does not fit yet, so that it gets its turn."""
    scheduler = make_scheduler(0, 4, budget=1000, pages_more=2)  # three units of 256 tokens
    for key, prompt in (("two units", 300), ("two more", 300), ("small", 10)):
        scheduler.add(make_sequence(key, prompt, 10))
    chunks = scheduler.schedule()
    assert [c.sequence.key for c in chunks] == ["two units"]
    scheduler.computed(chunks)
    scheduler.finish(chunks[0].sequence)
    assert [c.sequence.key for c in scheduler.schedule()] == ["two more", "small"]


def test_no_more_run_than_allowed() -> None:
    scheduler = make_scheduler(0, 2, budget=100, pages_more=8)
    for i in range(4):
        scheduler.add(make_sequence(f"s{i}", 3, 2))
    chunks = scheduler.schedule()
    assert [c.sequence.key for c in chunks] == ["s0", "s1"]
    scheduler.computed(chunks)
    scheduler.finish(chunks[0].sequence)
    chunks[1].sequence.token_ids.append(5)
    assert [c.sequence.key for c in scheduler.schedule()] == ["s1", "s2"]
