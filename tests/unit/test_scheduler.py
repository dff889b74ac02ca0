"""The scheduler under random traffic, over a memory that remembers what each row was made from."""

import hashlib
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.support.integrity import check_scheduler
from tests.support.tiny import tiny_config
from tools.stepping import new_sequence

from finwhale.engine.plan import prefix_index as prefix
from finwhale.engine.plan.admission import PATIENCE, WATERMARK
from finwhale.engine.plan.draft_policy import DraftChooser
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.plan.step_plan import PENDING
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.engine.start.kv_cache import plan_cache
from finwhale.models.cache import CacheGroup
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config_json import config_of
from tools import prefix_search


def make_scheduler(
    seed: int,
    seqs: int,
    budget: int,
    blocks: int,
    states: int = 1000,
    moving_states: int = 0,
    **options: Any,
) -> Scheduler:
    """One with room for so many blocks, and states beside what running sequences need."""
    spec = cache_spec(config_of(tiny_config(seed)))
    plan = plan_cache(
        spec,
        itemsize=4,
        budget_bytes=10**12,
        max_num_seqs=seqs,
        max_step_tokens=budget,
        wanted_tokens=256 * blocks,
        prefix_caching=True,
        moving_states=moving_states,
    )
    spare = {g.name: (plan.num_states - min(states, plan.num_states)) for g in spec if g.keep}
    num_pages = {
        name: count - spare.get(name, 0) * (1 if name == "c4_state" else 0)
        for name, count in plan.num_pages.items()
    }
    pages = PageManager(spec, num_pages)
    return Scheduler(pages, sizes=StepSizes.given(seqs, budget), **options)


def make_sequence(
    key: str, prompt: int | list[int], output: int, priority: int = 0
) -> SequenceState:
    """A prompt of this length has tokens that no other has, the key among them."""
    if isinstance(prompt, int):
        prompt = [1000 + int.from_bytes(key.encode()[-2:]), *[5] * (prompt - 1)]
    made = new_sequence(key, prompt, len(prompt) + output)
    made.priority = priority
    return made


class Text:
    """Tokens, and for each the hash of all up to it."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.hashes = [0]
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.hashes.append(hash((self.hashes[-1], token)))

    @property
    def next_token(self) -> int:
        """What the model would say: it depends on everything before."""
        return 1 + self.hashes[-1] % 400


@dataclass
class Memory:
    """By page: what its rows were made from, as the hash of all tokens up to there."""

    scheduler: Scheduler
    window: int
    pages: dict[tuple[str, int], list[int | None]] = field(default_factory=dict)

    def page_key(self, group: CacheGroup, sequence: SequenceState, number: int) -> tuple[str, int]:
        """Where the sequence's page of this number lies."""
        table = sequence.tables[group.name]
        assert 0 <= number - table.first < len(table.pages), (
            f"page {number} of {group.name} has no entry"
        )
        page = table.pages[number - table.first]
        assert page, f"page {number} of {group.name} is nobody's"
        return group.name, page

    def step(self, chunks: Sequence[Chunk], texts: dict[str, Text]) -> None:
        """Write what the model writes, then read what it reads, by the model's formulas."""
        for chunk in chunks:
            self._step(chunk, texts[chunk.sequence.key])

    def _write(self, group: CacheGroup, sequence: SequenceState, text: Text, row: int) -> None:
        key = self.page_key(group, sequence, row // group.rows_per_page)
        pool = self.scheduler.pages.pools[group.name]
        assert pool.references[key[1]] == 1, "a page that others read is written"
        rows = self.pages.setdefault(key, [None] * group.rows_per_page)
        rows[row % group.rows_per_page] = text.hashes[(row + 1) * group.tokens_per_row]

    def _read(self, group: CacheGroup, sequence: SequenceState, text: Text, rows: range) -> None:
        """A page at a time: a long prompt's steps read all that is before them."""
        if not rows:
            return
        size, per_page = group.tokens_per_row, group.rows_per_page
        for number in range(rows.start // per_page, (rows.stop - 1) // per_page + 1):
            before = number * per_page
            start, stop = max(rows.start, before), min(rows.stop, before + per_page)
            page = self.pages.get(self.page_key(group, sequence, number), [])
            found = page[start - before : stop - before]
            wanted = text.hashes[(start + 1) * size : stop * size + 1 : size]
            assert found == wanted, f"{group.name}: others stand for rows {start} to {stop - 1}"

    def _step(self, chunk: Chunk, text: Text) -> None:
        start, end, sequence = chunk.start, chunk.end, chunk.sequence
        groups: Any = self.scheduler.pages.groups
        for group in groups:
            size = group.tokens_per_row
            if group.name == "window":
                written, read = [*range(start, end)], range(max(0, start - self.window + 1), end)
            elif size > 1:
                written, read = [*range(start // size, end // size)], range(end // size)
            else:  # rows of earlier tokens that the entries completing in this step mix
                ratio, mixed = (4, 8) if group.name == "c4_state" else (128, 128)
                entries = range(start // ratio, end // ratio)
                first = (entries[0] + 1) * ratio - mixed if entries else start
                self._read(group, sequence, text, range(max(0, first), start))
                # What is left behind: all that an entry that is still open will mix, here or
                # where another sequence goes on.
                open_from = (end // ratio + 1) * ratio - mixed
                written = [*range(max(start, open_from), end)]
                read = range(0)
                if ratio == 4 and self.scheduler.prefix is not None:
                    ends = range((start // 256 + 1) * 256, end + 1, 256)
                    written += [row for b in ends for row in range(max(start, b - 4), b)]
            for row in written:
                self._write(group, sequence, text, row)
            self._read(group, sequence, text, read)


class Driver:
    """A scheduler, the model's memory, and an engine's part: who gets which token and when.

    Args:
        ahead: each step is planned before the tokens of the last are known.
        eos: ends a sequence.
    """

    def __init__(self, scheduler: Scheduler, seed: int, ahead: bool, eos: int = -1) -> None:
        self.eos = eos
        self.scheduler = scheduler
        self.memory = Memory(scheduler, tiny_config(seed)["sliding_window"])
        self.ahead = ahead
        self.texts: dict[str, Text] = {}
        self.finished: list[SequenceState] = []
        self._flight: list[tuple[SequenceState, int]] = []

    def add(self, sequence: SequenceState) -> None:
        self.texts[sequence.key] = Text(sequence.token_ids)
        self.scheduler.add(sequence)

    def step(self) -> list[Chunk]:
        scheduler, before = self.scheduler, list(self.scheduler.running)
        stored, might_admit = scheduler.admission.stored, scheduler.admission.might_admit
        might_admit = might_admit or (stored is not None and stored.busy)
        chunks = scheduler.schedule()
        if not might_admit:
            assert all(s in before for s in scheduler.running), "nobody was to be admitted"
        waits = scheduler.counts.preemptions or (stored is not None and stored.busy)
        assert chunks or self._flight or not scheduler.has_work or waits
        assert sum(c.end - c.start for c in chunks) <= scheduler.sizes.num_tokens
        assert len(scheduler.running) <= scheduler.sizes.num_seqs
        assert len({c.sequence.key for c in chunks}) == len(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            assert chunk.start == sequence.num_computed < chunk.end <= len(sequence.token_ids)
        self.memory.step(chunks, self.texts)
        check_scheduler(scheduler)
        scheduler.record_computed(chunks)
        check_scheduler(scheduler)
        flight = self._flight
        self._flight = []
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.completes:
                self._flight.append((sequence, len(sequence.token_ids)))
                text = self.texts[sequence.key]
                text.append(text.next_token)
                sequence.token_ids.append(PENDING)
        self._arrive(flight if self.ahead else self._flight)
        if not self.ahead:
            self._flight = []
        return chunks

    def _arrive(self, flight: list[tuple[SequenceState, int]]) -> None:
        for sequence, index in flight:
            if index >= len(sequence.token_ids) or sequence in self.finished:
                continue
            token = self.texts[sequence.key].tokens[index]
            sequence.token_ids[index] = token
            if index + 1 >= sequence.max_len or token == self.eos:
                self.end(sequence)
                self.finished.append(sequence)

    def end(self, sequence: SequenceState) -> None:
        while sequence.token_ids[-1] == PENDING:
            sequence.token_ids.pop()
        self._flight = [(s, index) for s, index in self._flight if s is not sequence]
        self.scheduler.finish(sequence)
        check_scheduler(self.scheduler)

    def run(self, most: int = 20_000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no end in sight")


def living(scheduler: Scheduler) -> list[SequenceState]:
    aside = [s for some in scheduler.admission.followers.values() for s in some]
    return [*scheduler.running, *scheduler.admission.waiting, *aside]


def assert_said_as_alone(driver: Driver) -> None:
    """Every finished sequence has the tokens that it has without any other."""
    for sequence in driver.finished:
        said = Text(sequence.token_ids[: sequence.num_prompt])
        while len(said.tokens) < len(sequence.token_ids):
            said.append(said.next_token)
        assert said.tokens == sequence.token_ids


def assert_empty(scheduler: Scheduler) -> None:
    assert not scheduler.has_work
    check_scheduler(scheduler)
    scheduler.reset_prefix_cache()
    for pool in scheduler.pages.pools.values():
        assert pool.num_free == pool.num_pages - 1


@given(st.data())
def test_random_traffic(data: st.DataObject) -> None:
    """Arrivals, common beginnings, chunks, finishes, aborts, preemption and eviction at random.

    What is read is what was written from the same tokens; nothing is lost; everyone comes to an
    end with the tokens that it has alone.
    """
    seed = data.draw(st.integers(0, 40), "model")
    # Many at once whose outputs are longer than there are pages, or anything.
    crowded = data.draw(st.booleans(), "crowded")
    budget = data.draw(st.sampled_from([600, 150, 64] + [300, 1, 16] * (not crowded)), "budget")
    blocks = data.draw(st.integers(2, 3 if crowded else 6), "blocks")
    scheduler = make_scheduler(
        seed,
        data.draw(st.integers(2, 6), "sequences"),
        budget,
        blocks,
        data.draw(st.sampled_from([0, 1, 3, 1000]), "states"),
        prefix_caching=data.draw(st.sampled_from([True, True, True, False]), "caching"),
    )
    driver = Driver(scheduler, seed, data.draw(st.booleans(), "ahead"), eos=7)
    draw = random.Random(data.draw(st.integers(0, 2**32), "draws"))
    arrivals = data.draw(st.integers(4, 12), "arrivals")
    longest = min(256 * blocks, 20 * budget)
    outputs = (300,) if crowded else (5, 100, 300)
    rate = 1.0 if crowded else draw.choice((0.03, 0.3, 1))
    priorities = draw.choice([(0,), (0, 0, 1, 5)])
    trunks = [[draw.randrange(40) for _ in range(longest)] for _ in range(2)]
    count = steps = 0
    while count < arrivals or scheduler.has_work:
        steps += 1
        assert steps < 20_000
        while count < arrivals and (draw.random() < rate or not scheduler.has_work):
            output = draw.randint(1, min(longest - 1, draw.choice(outputs)))
            prompt = some_prompt(
                draw, [*trunks, *(t.tokens for t in driver.texts.values())], longest - output
            )
            driver.add(make_sequence(f"s{count}", prompt, output, draw.choice(priorities)))
            count += 1
        driver.step()
        if draw.random() < 0.01 and scheduler.has_work:
            driver.end(draw.choice(living(scheduler)))
        if draw.random() < 0.002:
            scheduler.reset_prefix_cache()
    assert_said_as_alone(driver)
    event(f"preempted: {scheduler.counts.preemptions > 0}")
    event(f"found: {scheduler.counts.cached_tokens > 0}")
    assert_empty(scheduler)


def some_prompt(draw: random.Random, texts: Sequence[list[int]], longest: int) -> list[int]:
    """The beginning of some text, up to around a boundary, and then other tokens."""
    text = draw.choice(texts)
    cut = draw.choice((128, 256, 256, 384, 512, 768, len(text))) + draw.choice((0, 0, 1, -1, 4, -4))
    cut = max(0, min(cut, longest - 1, len(text)))
    more = draw.randint(1, min(longest - cut, draw.choice((3, 150, 400))))
    return text[:cut] + [draw.randrange(40) for _ in range(more)]


# --- Order ----------------------------------------------------------------------------------------


def keys_of(chunks: Sequence[Chunk]) -> list[str]:
    return [c.sequence.key for c in chunks]


def sizes(chunks: Sequence[Chunk]) -> list[tuple[str, int]]:
    return [(c.sequence.key, c.end - c.start) for c in chunks]


def test_decodes_come_before_prompts() -> None:
    """Each decode gets its token; beside them a long prompt takes half of what prompts may."""
    driver = Driver(make_scheduler(0, 3, budget=40, blocks=8), 0, ahead=False)
    driver.add(make_sequence("short", 4, 50))
    driver.add(make_sequence("long", 200, 5))
    assert sizes(driver.step()) == [("short", 4), ("long", 36)]
    for _ in range(9):
        assert sizes(driver.step()) == [("short", 1), ("long", 14)]
    # What is left is no longer than a step: three quarters, the decode counted.
    assert sizes(driver.step()) == [("short", 1), ("long", 29)]
    assert sizes(driver.step()) == [("short", 1), ("long", 9)]
    assert sizes(driver.step()) == [("short", 1), ("long", 1)]


def test_a_long_prompt_takes_less_of_a_step_as_its_context_grows() -> None:
    """So that a step takes no longer: at 262,144 tokens a token counts twice."""
    scheduler = make_scheduler(0, 3, budget=16384, blocks=1400)
    short, long = make_sequence("short", 4, 5000), make_sequence("long", 320_000, 5)
    scheduler.add(short)
    scheduler.add(long)
    count = 0
    while (start := long.num_computed) < 300_000:
        chunks = scheduler.schedule()
        scheduler.record_computed(chunks)
        short.token_ids.append(1)
        part = dict(sizes(chunks))["long"]
        assert not start or 6140 < part * (1 + start / 2**18) <= 6146
        count += 1
    assert count > 70


def test_a_long_prompt_does_not_hold_up_short_ones() -> None:
    driver = Driver(make_scheduler(0, 8, budget=40, blocks=30), 0, ahead=False)
    driver.add(make_sequence("long", 1000, 2))
    assert sizes(driver.step()) == [("long", 40)]
    driver.add(make_sequence("a", 20, 1))
    driver.add(make_sequence("b", 30, 1))
    assert sizes(driver.step()) == [("a", 20), ("b", 10), ("long", 10)]
    assert sizes(driver.step()) == [("b", 20), ("long", 20)]
    driver.add(make_sequence("longer", 2000, 2))
    # Of several long ones, the first.
    assert sizes(driver.step()) == [("long", 40)]
    driver.run()
    assert [s.key for s in driver.finished] == ["a", "b", "long", "longer"]


def test_a_long_prompt_gets_no_more_than_is_left() -> None:
    """Whatever was kept for others before it began."""
    driver = Driver(make_scheduler(0, 8, budget=40, blocks=30), 0, ahead=False)
    driver.add(make_sequence("stream", 4, 50))
    driver.step()
    driver.add(make_sequence("short", 25, 1))
    driver.add(make_sequence("long", 1000, 2))
    assert sizes(driver.step()) == [("stream", 1), ("short", 25), ("long", 4)]


def test_short_prompts_pass_beside_a_long_one_however_many_decode() -> None:
    """Where decodes leave no more of a step than a long prompt may take."""
    driver = Driver(make_scheduler(0, 150, budget=256, blocks=5000), 0, ahead=False)
    for number in range(130):
        driver.add(make_sequence(f"{number}", 2, 500))
    driver.step()
    driver.add(make_sequence("long", 20_000, 2))
    driver.step()
    driver.add(make_sequence("short", 20, 2))
    read = 0
    while read < 20:
        step = dict(sizes(driver.step()))
        assert step["short"] > 0 and step["long"] > 0
        read += step["short"]


def test_the_first_in_line_is_not_overtaken() -> None:
    """A small request waits behind a large one that does not fit yet, so that it gets its turn."""
    driver = Driver(make_scheduler(0, 4, budget=1000, blocks=3), 0, ahead=False)
    for key, prompt in (("two blocks", 300), ("two more", 310), ("small", 10)):
        driver.add(make_sequence(key, prompt, 10))
    assert keys_of(driver.step()) == ["two blocks"]
    driver.end(driver.scheduler.running[0])
    assert keys_of(driver.step()) == ["two more", "small"]


def test_no_more_run_than_allowed() -> None:
    driver = Driver(make_scheduler(0, 2, budget=100, blocks=9), 0, ahead=False)
    for i in range(4):
        driver.add(make_sequence(f"s{i}", 3, 1 + i % 2))
    assert keys_of(driver.step()) == ["s0", "s1"]
    assert keys_of(driver.step()) == ["s1", "s2"]


def test_lower_priority_numbers_go_first() -> None:
    driver = Driver(make_scheduler(0, 1, budget=100, blocks=9), 0, ahead=False)
    for key, priority in (("a", 1), ("b", 0), ("c", -3), ("d", 1), ("e", 0)):
        driver.add(make_sequence(key, 5, 2, priority))
    driver.run()
    assert [s.key for s in driver.finished] == ["c", "b", "e", "a", "d"]


def test_every_request_is_admitted_eventually() -> None:
    """However many more urgent ones come: PATIENCE of them go first, then it is its turn."""
    driver = Driver(make_scheduler(0, 1, budget=100, blocks=9), 0, ahead=False)
    patient = make_sequence("patient", 5, 1, priority=9)
    for i in range(3):
        driver.add(make_sequence(f"u{i}", 5, 1))
    driver.add(patient)
    count = 3
    while patient not in driver.finished:
        driver.step()
        driver.add(make_sequence(f"u{count}", 5, 1))
        count += 1
        assert count < 3 * PATIENCE
    ahead = driver.finished.index(patient)
    assert PATIENCE < ahead <= PATIENCE + 4


@pytest.mark.parametrize(("later", "begins"), [(3, True), (4, False)])
def test_blocks_that_a_running_prompt_needs_are_not_given_away(later: int, begins: bool) -> None:
    """Of nine blocks, a prompt that has two so far needs six."""
    driver = Driver(make_scheduler(0, 3, budget=512, blocks=9), 0, ahead=False)
    driver.add(make_sequence("six", 6 * 256 - 2, 2))
    driver.step()
    driver.add(make_sequence("later", later * 256 - 2, 2))
    driver.step()
    assert [s.key for s in driver.scheduler.running] == ["six", "later"][: 1 + begins]
    driver.run()
    assert driver.scheduler.counts.preemptions == 0


@pytest.mark.parametrize(("later", "begins"), [(2, True), (3, False)])
def test_a_share_of_the_blocks_is_kept_for_sequences_that_run(later: int, begins: bool) -> None:
    """Two blocks of 2 * WATERMARK stay free; a sequence that is alone may take all of them."""
    blocks = 2 * WATERMARK
    alone = blocks - 4
    driver = Driver(make_scheduler(0, 3, budget=blocks * 256, blocks=blocks), 0, ahead=False)
    driver.add(make_sequence("alone", alone * 256 - 100, 99))
    driver.step()
    driver.add(make_sequence("later", later * 256 - 10, 9))
    assert ("later" in keys_of(driver.step())) == begins
    driver.run()
    driver.add(make_sequence("whole", blocks * 256 - 1, 1))
    assert keys_of(driver.step()) == ["whole"]


# --- Preemption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("ahead", [True, False])
def test_the_last_in_order_is_preempted(caching: bool, ahead: bool) -> None:
    """Four blocks for three that grow to two each: all come to an end, the first uninterrupted."""
    scheduler = make_scheduler(0, 3, budget=600, blocks=4, prefix_caching=caching)
    driver = Driver(scheduler, 0, ahead)
    for i in range(3):
        driver.add(make_sequence(f"s{i}", 250, 200))
    first_steps = [keys_of(driver.step()) for _ in range(3)]
    assert first_steps[-1] == ["s0", "s1", "s2"][: len(first_steps[-1])]
    driver.run()
    assert driver.finished[0].key == "s0"
    assert len(driver.finished) == 3 and scheduler.counts.preemptions >= 1
    assert_empty(scheduler)


def test_a_preempted_sequence_resumes_from_its_last_block() -> None:
    """Preempted at 512 tokens, its blocks are still there when it is its turn again."""
    scheduler = make_scheduler(0, 2, budget=600, blocks=4)
    driver = Driver(scheduler, 0, ahead=False)
    driver.add(make_sequence("a", 480, 60))
    driver.add(make_sequence("b", 481, 60))
    starts = [(c.sequence.key, c.start) for _ in range(40) for c in driver.step()]
    assert scheduler.counts.preemptions == 1 and ("b", 0) in starts
    again: list[int] = []
    while scheduler.has_work:
        again += [c.start for c in driver.step() if c.sequence.key == "b"]
    # While "a" grew by one block, one of the two was given up: the later one.
    assert again[0] == 256
    assert driver.finished[1].num_cached == 0
    assert_empty(scheduler)


def test_a_less_urgent_request_is_preempted_by_a_more_urgent_one() -> None:
    scheduler = make_scheduler(0, 2, budget=600, blocks=3)
    driver = Driver(scheduler, 0, ahead=False)
    driver.add(make_sequence("early", 250, 200, priority=1))
    driver.step()
    driver.add(make_sequence("urgent", 500, 200))
    while scheduler.has_work:
        driver.step()
    assert [s.key for s in driver.finished] == ["urgent", "early"]
    assert scheduler.counts.preemptions >= 1


# --- Common beginnings ----------------------------------------------------------------------------


def read(driver: Driver, key: str, prompt: list[int], output: int = 2) -> SequenceState:
    """Serve one request to its end."""
    sequence = make_sequence(key, prompt, output)
    driver.add(sequence)
    driver.run()
    return sequence


def text(length: int, salt: int = 0) -> list[int]:
    draw = random.Random(salt)
    return [draw.randrange(40) for _ in range(length)]


@pytest.mark.parametrize("length", [255, 256, 257, 511, 512, 513, 700, 1023])
@pytest.mark.parametrize("ahead", [True, False])
def test_the_second_turn_finds_all_but_the_last_partial_block(length: int, ahead: bool) -> None:
    driver = Driver(make_scheduler(0, 4, budget=200, blocks=20), 0, ahead)
    first = read(driver, "first", text(length), 80)
    assert first.num_cached == 0
    # The last token was never read.
    known = len(first.token_ids) - 1
    second = read(driver, "second", first.token_ids + text(30, 1))
    assert second.num_cached == known // 256 * 256
    other = read(driver, "other", [41, *first.token_ids])
    assert other.num_cached == 0
    again = read(driver, "again", first.token_ids[:length])
    assert again.num_cached == (length - 1) // 256 * 256
    assert_empty(driver.scheduler)


@pytest.mark.parametrize("common", [252, 255, 256, 257, 260, 384, 510, 512, 514, 768])
def test_many_requests_with_one_long_prefix(common: int) -> None:
    """From the second on, each finds the common text up to its last whole block."""
    driver = Driver(make_scheduler(0, 4, budget=200, blocks=20), 0, ahead=False)
    for i in range(4):
        question = [41 + i, *text(20 + 90 * i, i + 1)]
        asked = read(driver, f"q{i}", text(common) + question)
        assert asked.num_cached == (common // 256 * 256 if i else 0)


def test_the_last_common_block_of_two_prompts_is_kept() -> None:
    """States on the way are given up first; the third that comes by finds what the second left."""
    driver = Driver(make_scheduler(0, 1, budget=200, blocks=40, states=1), 0, ahead=False)
    common = text(512)
    read(driver, "a", common + text(3000, 1))
    assert read(driver, "b", common + text(600, 2)).num_cached in (0, 256)
    read(driver, "noise", text(2500, 4))
    assert read(driver, "c", common + text(600, 3)).num_cached == 512


@pytest.mark.parametrize("count", [2, 5])
def test_requests_with_a_common_prompt_compute_it_once(count: int) -> None:
    """Several that begin alike and arrive together: one reads, the others wait and then go on."""
    scheduler = make_scheduler(0, 8, budget=200, blocks=20)
    driver = Driver(scheduler, 0, ahead=False)
    for i in range(count):
        driver.add(make_sequence(f"s{i}", text(700), 3))
    other = make_sequence("other", 30, 3)
    driver.add(other)
    # The other one shares nothing, so it does not wait.
    first = sizes(driver.step())
    assert first == [("other", 30), ("s0", 170)]
    total = 200
    while scheduler.has_work:
        total += sum(c.end - c.start for c in driver.step())
    # The prompt once, the rest behind the last block of it for the others, and 2 tokens each.
    assert total == 700 + (count - 1) * (700 - 512) + 30 + 2 * (count + 1)
    assert scheduler.counts.cached_tokens == (count - 1) * 512
    assert scheduler.counts.prompt_tokens == count * 700 + 30


def test_a_request_that_waits_for_an_aborted_one_computes_the_block_itself() -> None:
    scheduler = make_scheduler(0, 8, budget=200, blocks=20)
    driver = Driver(scheduler, 0, ahead=False)
    leader, one, two = (make_sequence(key, text(700), 3) for key in ("l", "a", "b"))
    for sequence in (leader, one, two):
        driver.add(sequence)
    driver.step()
    assert scheduler.num_waiting == 2 and not scheduler.admission.waiting
    driver.end(two)
    driver.end(leader)
    assert scheduler.admission.waiting == [one]
    driver.run()
    assert driver.finished == [one]
    assert_empty(scheduler)


def test_a_more_urgent_request_does_not_wait_for_a_less_urgent_one() -> None:
    driver = Driver(make_scheduler(0, 8, budget=100, blocks=20), 0, ahead=False)
    driver.add(make_sequence("slow", text(700), 3, priority=1))
    driver.step()
    driver.add(make_sequence("urgent", text(700), 3, priority=0))
    assert "urgent" in keys_of(driver.step())


def test_least_recently_used_goes_first() -> None:
    """Room for two texts: of three, the one that was not asked for again is forgotten."""
    driver = Driver(make_scheduler(0, 1, budget=4000, blocks=5), 0, ahead=False)
    texts = [text(600, salt) for salt in range(3)]
    for i in (0, 1, 0, 2):
        read(driver, f"a{i}", texts[i])
    assert read(driver, "b0", texts[0]).num_cached == 512
    assert read(driver, "b1", texts[1]).num_cached == 0


def test_of_two_resume_points_the_one_that_was_used_again_is_kept() -> None:
    """There is room for all blocks, but only for the states of three texts."""
    driver = Driver(make_scheduler(0, 1, budget=200, blocks=60, states=1), 0, ahead=False)
    texts = [text(600, salt) for salt in range(4)]
    for i in (0, 1, 0, 2, 3):
        read(driver, f"a{i}", texts[i])
    assert read(driver, "b0", texts[0]).num_cached == 512
    assert read(driver, "b1", texts[1]).num_cached == 0


@pytest.mark.parametrize("length", [511, 512, 513])
def test_a_repeated_prompt_finds_its_last_block_after_other_prompts(length: int) -> None:
    """A prompt of whole blocks resumes one block before its end."""
    driver = Driver(make_scheduler(0, 1, budget=200, blocks=40, states=1), 0, ahead=False)
    read(driver, "first", text(length))
    read(driver, "noise", text(2500, 4))
    assert read(driver, "again", text(length)).num_cached == (length - 1) // 256 * 256


@pytest.mark.parametrize("output", [1, 2, 3, 9])
def test_no_draft_is_verified_beyond_the_end_of_the_output(output: int) -> None:
    """A step also gives the token after the accepted drafts."""
    scheduler = make_scheduler(0, 1, budget=99, blocks=9)
    scheduler.drafting.chooser = DraftChooser(3)
    sequence = make_sequence("a", 10, output + 1)
    scheduler.add(sequence)
    scheduler.record_computed(scheduler.schedule())
    sequence.token_ids.append(7)
    sequence.drafts = [7, 7, 7]
    (chunk,) = scheduler.schedule()
    assert len(chunk.drafts) == min(3, output - 1)


def test_steps_run_ahead_while_others_wait_for_blocks() -> None:
    """A step with drafts is followed on the device until the one in line might start."""
    scheduler = make_scheduler(0, 4, budget=2048, blocks=9)
    scheduler.drafting.chooser = DraftChooser(1)
    first, second = make_sequence("a", 2 * 256 - 9, 99), make_sequence("b", 2 * 256 - 9, 99)
    waits = make_sequence("c", 6 * 256, 9)
    for sequence in (first, second, waits):
        scheduler.add(sequence)
    scheduler.record_computed(scheduler.schedule())
    for sequence in (first, second):
        sequence.token_ids.append(7)
    chunks = scheduler.schedule()
    assert keys_of(chunks) == ["a", "b"] and not scheduler.admission.might_admit
    assert keys_of(scheduler.schedule_ahead(chunks)) == ["a", "b"]
    scheduler.finish(second)
    assert not scheduler.schedule_ahead(chunks)
    first.token_ids.append(7)
    assert keys_of(scheduler.schedule()) == ["a", "c"]


def test_without_prefix_caching_nothing_is_kept() -> None:
    driver = Driver(make_scheduler(0, 2, budget=600, blocks=9, prefix_caching=False), 0, False)
    for i in range(2):
        assert read(driver, f"s{i}", text(600)).num_cached == 0
    assert driver.scheduler.pages.reclaimer is None
    for pool in driver.scheduler.pages.pools.values():
        assert pool.num_free == pool.num_pages - 1


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_read_token_by_token_gives_its_pages_back(caching: bool) -> None:
    """As a decode it would keep them until it takes more; here the next chunk may be a long one."""
    driver = Driver(make_scheduler(0, 2, 3, blocks=9, states=0, prefix_caching=caching), 0, False)
    driver.add(make_sequence("first", 2, 200))
    driver.add(make_sequence("second", 500, 2))
    driver.run()
    assert len(driver.finished) == 2


def test_after_a_reset_nothing_is_found() -> None:
    scheduler = make_scheduler(0, 2, budget=600, blocks=9)
    driver = Driver(scheduler, 0, ahead=False)
    driver.add(make_sequence("a", text(600), 9))
    driver.step()
    scheduler.reset_prefix_cache()
    check_scheduler(scheduler)
    driver.run()
    # What ran then has left nothing either.
    assert read(driver, "b", text(600)).num_cached == 0
    assert read(driver, "c", text(600)).num_cached == 512


@pytest.mark.parametrize("what", ["order", "users", "parent", "state"])
def test_integrity_finds_what_is_wrong_with_a_block(what: str) -> None:
    driver = Driver(make_scheduler(0, 2, budget=600, blocks=9), 0, ahead=False)
    read(driver, "a", text(600))
    prefix = driver.scheduler.prefix
    assert prefix is not None
    first = next(iter(prefix.blocks.values()))
    if what == "order":
        prefix._idle.move_to_end(first.key, last=False)
    elif what == "users":
        first.users += 1
    elif what == "parent":
        prefix._drop(prefix._idle.pop(first.key))
    else:
        first.state = None
    with pytest.raises(AssertionError):
        check_scheduler(driver.scheduler)


def operations(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Of a prompt that was read before, until it is planned: calls, and bytes hashed."""
    scheduler = prefix_search._scheduler(num_tokens)
    prompt = list(range(num_tokens))
    first, again = (new_sequence(key, prompt, num_tokens + 1) for key in ("first", "again"))
    scheduler.add(first)
    while first.remaining:
        scheduler.record_computed(scheduler.schedule())
    scheduler.finish(first)
    calls = hashed = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def blake2b(data: bytes, **options: Any) -> Any:
        nonlocal hashed
        hashed += len(data)
        return hashlib.blake2b(data, **options)

    monkeypatch.setattr(prefix, "hashlib", SimpleNamespace(blake2b=blake2b))
    before = sys.getprofile()
    sys.setprofile(count)
    scheduler.add(again)
    scheduler.schedule()
    sys.setprofile(before)
    monkeypatch.undo()
    assert again.num_cached is not None and again.num_cached > 0.9 * num_tokens
    return calls, hashed


def test_a_lookup_costs_the_same_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tools/prefix_search.py` says how long it takes."""
    lengths = (8192, 131072)
    short, long = (operations(n, monkeypatch) for n in lengths)
    for few, many in zip(short, long, strict=True):
        assert 0 < many <= 16 * 1.1 * few
    assert long[0] < lengths[1] / 10
    assert long[1] < 5 * lengths[1]


def test_the_measurement_of_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_search, "stamp", lambda *args: {})
    for allowed, status in ((0.0, 1), (math.inf, 0)):
        monkeypatch.setattr(prefix_search, "TOKEN_NS", allowed)
        assert prefix_search.main(["--tokens", "2048", "--repeats", "1"]) == status
