"""Prefixes that leave and come back: the scheduler with a prefix store, under random traffic."""

import random
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st
from tests.support.integrity import check_scheduler
from tests.unit.test_scheduler import (
    Driver,
    Memory,
    assert_empty,
    assert_said_as_alone,
    living,
    make_scheduler,
    make_sequence,
    some_prompt,
)

from finwhale.engine.plan import stored_prefixes
from finwhale.engine.plan.prefix_index import State
from finwhale.engine.plan.prefix_store import Record, StoreCounts
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.stored_prefixes import (
    LEAST_BLOCKS,
    LEAST_SECONDS,
    LONGEST_S,
    MOVING_STATES,
    StoredPrefixes,
    StoreSpeed,
)

# By record: what the rows of its pages were made from, by group.
Contents = dict[Record, dict[str, list[list[int | None]]]]


@dataclass(eq=False)
class Transfer:
    record: Record
    pages: State
    load: bool
    done: bool = False
    failed: bool = False


@dataclass
class Transfers:
    """Moves records between a dictionary and the memory, each at a random time.

    Attributes:
        failing, crowded: how often a transfer fails, and a save finds no room.
        hangs: nothing ends any more, except by `give_up_loads`.
    """

    contents: Contents
    memory: Memory
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    failing: float = 0.0
    crowded: float = 0.0
    pace: float = 1.0
    loaded: int = 0
    hangs: bool = False
    counts: StoreCounts = field(default_factory=StoreCounts)
    _under_way: list[Transfer] = field(default_factory=list)
    _searches: list[tuple[Future[list[bool]], Sequence[Record]]] = field(default_factory=list)

    def find(self, records: Sequence[Record]) -> Future[list[bool]]:
        search: Future[list[bool]] = Future()
        self._searches.append((search, records))
        return search

    def load(self, record: Record, pages: State) -> Transfer:
        return self._begin(Transfer(record, pages, load=True))

    def save(self, record: Record, pages: State) -> Transfer | None:
        if self.draw.random() < self.crowded:
            return None
        return self._begin(Transfer(record, pages, load=False))

    def _begin(self, transfer: Transfer) -> Transfer:
        self._under_way.append(transfer)
        return transfer

    def give_up_loads(self) -> None:
        for transfer in [t for t in self._under_way if t.load]:
            transfer.failed = transfer.done = True
            self._under_way.remove(transfer)

    def saving(self, keys: Collection[bytes]) -> bool:
        return any(not t.load and t.record.key in keys for t in self._under_way)

    def close(self) -> None:
        raise AssertionError("the scheduler does not close it")

    def advance(self) -> None:
        if self.hangs:
            return
        for search, records in self._searches:
            search.set_result([record in self.contents for record in records])
        self._searches.clear()
        for transfer in list(self._under_way):
            if self.draw.random() < self.pace:
                self._under_way.remove(transfer)
                transfer.failed = self.draw.random() < self.failing
                if not transfer.failed:
                    self._move(transfer)
                transfer.done = True

    def _move(self, transfer: Transfer) -> None:
        rows = self.memory.pages
        if not transfer.load:
            self.contents[transfer.record] = {
                name: [list(rows[name, page]) for page in pages]
                for name, pages in transfer.pages.items()
            }
            return
        if transfer.record not in self.contents:  # evicted since `find`
            transfer.failed = True
            return
        self.loaded += transfer.record.kind == "block"
        for name, found in self.contents[transfer.record].items():
            for page, content in zip(transfer.pages[name], found, strict=True):
                assert self.memory.scheduler.pages.pools[name].references[page] == 1
                rows[name, page] = list(content)


def with_store(
    scheduler: Scheduler, contents: Contents, *, saves_all: bool = True, **options: Any
) -> tuple[Driver, Transfers]:
    driver = Driver(scheduler, options.pop("seed", 0), options.pop("ahead", False), eos=7)
    transfers = Transfers(contents, driver.memory, **options)
    assert scheduler.prefix is not None
    stored = StoredPrefixes(scheduler.pages, scheduler.prefix, transfers, saves_all=saves_all)
    scheduler.admission.stored = stored
    return driver, transfers


def new(**options: Any) -> Scheduler:
    options = {"moving_states": MOVING_STATES, "prefix_salt": "salt", **options}
    return make_scheduler(0, 4, budget=600, blocks=12, **options)


def settle(driver: Driver) -> None:
    """Let every save and load end."""
    for _ in range(100):
        driver.scheduler.admission.advance_loads()
    check_scheduler(driver.scheduler)


def run(contents: Contents, prompt: list[int], output: int = 3, **options: Any) -> tuple[int, int]:
    """Run one request on a new server; returns the tokens that it found, and the blocks loaded."""
    driver, transfers = with_store(new(), contents, **options)
    sequence = make_sequence("s", prompt, output)
    driver.add(sequence)
    driver.run()
    settle(driver)
    assert_empty(driver.scheduler)
    assert sequence.num_cached is not None
    return sequence.num_cached, transfers.loaded


def text(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(8, 400) for _ in range(length)]


def test_a_restart_finds_the_prompt() -> None:
    contents: Contents = {}
    prompt = text(1100)
    assert run(contents, prompt) == (0, 0)
    assert {record.kind for record in contents} == {"block", "state"}
    assert run(contents, prompt) == (1024, 4)
    assert run(contents, [*prompt[:1050], 1, 2]) == (1024, 4)
    # Where two prompts part, there is no state yet: this one saves one.
    assert run(contents, [*prompt[:800], *text(300, 1)])[0] == 0
    assert run(contents, [*prompt[:800], *text(300, 2)])[0] in (0, 768)


def test_a_conversation_goes_on_after_a_restart() -> None:
    """At the end of the output, where the next prompt begins."""
    contents: Contents = {}
    driver, _ = with_store(new(), contents)
    first = make_sequence("s", text(300), 600)
    driver.eos = -1
    driver.add(first)
    driver.run()
    settle(driver)
    answer = first.token_ids
    assert len(answer) == 900
    assert run(contents, [*answer, 5, 6])[0] == 768


def flushing(**options: Any) -> tuple[Driver, Transfers, StoredPrefixes]:
    """A server on which a request that waits for the store has just ended."""
    driver, transfers = with_store(new(), {}, **options)
    sequence = make_sequence("s", text(1024), 3)
    sequence.saves_first = True
    driver.add(sequence)
    driver.run()
    assert driver.scheduler.admission.stored is not None
    return driver, transfers, driver.scheduler.admission.stored


def test_a_request_waits_until_the_store_has_its_blocks() -> None:
    """Also the blocks for which there was no room at first, and both states that may be needed."""
    driver, transfers, stored = flushing(pace=0.0, crowded=0.9)
    assert stored.is_flushing("s") and stored.busy and not transfers.contents
    transfers.crowded = 0.5
    for _ in range(100):
        driver.scheduler.admission.advance_loads()
    assert stored.is_flushing("s")
    transfers.pace = 1.0
    settle(driver)
    assert not stored.is_flushing("s") and not stored.busy
    kinds = [record.kind for record in transfers.contents]
    assert kinds.count("block") == 4 and kinds.count("state") >= 2
    # The last token of the prompt is computed, so a state before it is needed.
    assert run(transfers.contents, text(1024)) == (768, 3)


def test_a_request_waits_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, waits in ((1000.0, True), (0.0, False)):
        monkeypatch.setattr(stored_prefixes, "LONGEST_FLUSH_S", seconds)
        driver, _, stored = flushing(pace=0.0)
        driver.scheduler.admission.advance_loads()
        assert stored.is_flushing("s") is waits
        assert stored.busy  # the pages are still being copied


def test_a_request_waits_for_no_store_that_fails_or_is_off_and_no_cache_that_is_reset() -> None:
    driver, _, stored = flushing(failing=1.0)
    settle(driver)
    assert not stored.is_flushing("s")
    driver, transfers, stored = flushing(pace=0.0)
    stored.off = "it is slow"
    driver.scheduler.admission.advance_loads()
    assert not stored.is_flushing("s")
    driver, transfers, stored = flushing(pace=0.0)
    driver.scheduler.reset_prefix_cache()
    assert not stored.is_flushing("s")
    transfers.pace = 1.0
    settle(driver)
    assert_empty(driver.scheduler)


def test_what_found_no_room_is_saved_later() -> None:
    """Four sequences end together, and the store takes one record in three at first."""
    driver, transfers = with_store(new(), {}, crowded=0.7)
    prompts = [text(300, number) for number in range(4)]
    for number, prompt in enumerate(prompts):
        driver.add(make_sequence(f"s{number}", prompt, 3))
    driver.run()
    assert transfers.counts.skipped
    settle(driver)
    kinds = [record.kind for record in transfers.contents]
    assert kinds.count("block") == kinds.count("state") == 4
    assert_empty(driver.scheduler)


def test_few_blocks_are_computed() -> None:
    contents: Contents = {}
    run(contents, text(300))
    assert len([record for record in contents if record.kind == "block"]) < LEAST_BLOCKS
    assert run(contents, text(300)) == (0, 0)


def test_owners_share_nothing() -> None:
    contents: Contents = {}
    run(contents, text(1100))
    driver, transfers = with_store(new(), contents)
    sequence = make_sequence("s", text(1100), 3)
    sequence.prefix_owner = "somebody"
    driver.add(sequence)
    driver.run()
    settle(driver)
    assert sequence.num_cached == 0 and not transfers.loaded
    assert len({record.owner for record in contents}) == 2


def test_a_missing_block_ends_the_prefix() -> None:
    contents: Contents = {}
    prompt = text(1100)
    run(contents, prompt)
    blocks = [record for record in contents if record.kind == "block"]
    del contents[blocks[1]]
    assert run(contents, prompt) == (0, 0)
    assert run(contents, prompt) == (1024, 4)  # it is written again


def test_a_failure_is_a_miss() -> None:
    contents: Contents = {}
    prompt = text(1100)
    run(contents, prompt)
    assert run(contents, prompt, failing=1.0)[0] == 0
    assert run(contents, prompt) == (1024, 4)


def test_others_with_the_same_prompt_wait_for_one_load() -> None:
    contents: Contents = {}
    prompt = text(1100)
    run(contents, prompt)
    driver, transfers = with_store(new(), contents, pace=0.2)
    for number in range(3):
        driver.add(make_sequence(f"s{number}", [*prompt, number], 3))
    driver.run()
    settle(driver)
    assert transfers.loaded == 4
    assert [s.num_cached for s in driver.finished] == [1024] * 3
    assert_empty(driver.scheduler)


def test_a_sequence_that_leaves_does_not_stop_the_load_for_others() -> None:
    contents: Contents = {}
    prompt = text(1100)
    run(contents, prompt)
    driver, transfers = with_store(new(), contents, pace=0.2)
    first, second = (make_sequence(f"s{n}", [*prompt, n], 3) for n in range(2))
    driver.add(first)
    driver.add(second)
    driver.step()
    assert driver.scheduler.admission.stored.loads  # type: ignore[union-attr]
    driver.end(first)
    driver.run()
    settle(driver)
    assert second.num_cached == 1024 and transfers.loaded == 4
    assert_empty(driver.scheduler)


def test_a_reset_during_a_load() -> None:
    contents: Contents = {}
    prompt = text(1100)
    run(contents, prompt)
    driver, _ = with_store(new(), contents, pace=0.2)
    sequence = make_sequence("s", prompt, 3)
    driver.add(sequence)
    driver.step()
    driver.step()
    driver.scheduler.reset_prefix_cache()
    check_scheduler(driver.scheduler)
    driver.run()
    settle(driver)
    assert_empty(driver.scheduler)


@pytest.mark.parametrize("phase", ["search", "read"])
def test_a_store_that_hangs_is_switched_off(
    phase: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    contents: Contents = {}
    prompt = text(1100)
    run(contents, prompt)
    driver, transfers = with_store(new(), contents, pace=0.0)
    transfers.hangs = phase == "search"
    sequences = [make_sequence(f"s{n}", [*prompt, n], 3) for n in range(2)]
    for sequence in sequences:
        driver.add(sequence)
    for _ in range(5):
        driver.step()
    assert not driver.finished
    late = time.monotonic() + LONGEST_S + 1
    monkeypatch.setattr(time, "monotonic", lambda: late)
    driver.run()
    assert len(driver.finished) == 2 and transfers.loaded == 0
    stored = driver.scheduler.admission.stored
    assert stored is not None and not stored.loads and "longer than 30 s" in stored.off
    assert caplog.text.count("switched off") == 1
    driver.add(make_sequence("later", [*prompt, 7], 3))
    driver.run()
    assert caplog.text.count("switched off") == 1 and len(driver.finished) == 3
    transfers.hangs, transfers.pace = False, 1.0  # the saves from before
    settle(driver)
    assert_empty(driver.scheduler)


def test_steps_of_decodes_do_not_count_as_prefill() -> None:
    """Also once their tokens are appended, which is when their time is known."""
    speed = StoreSpeed(StoreCounts(), 256)
    sequence = make_sequence("s", 1000, 9)
    prompt, decode = Chunk(sequence, 0, 999), Chunk(sequence, 999, 1000)
    sequence.token_ids.append(7)
    speed.record([decode], 0.25)
    assert (speed.tokens, speed.seconds) == (0, 0.0)
    speed.record([prompt, decode], 0.5)
    assert (speed.tokens, speed.seconds) == (1000, 0.5)


@pytest.mark.parametrize(
    "read_seconds, prefill_seconds, is_off",
    [(3.0, 3.0, True), (3.0, LEAST_SECONDS / 2, False), (LEAST_SECONDS / 2, 3.0, False)],
)
def test_a_store_that_is_hardly_faster_than_prefill_is_switched_off(
    read_seconds: float,
    prefill_seconds: float,
    is_off: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Once both rates are known."""
    contents: Contents = {}
    run(contents, text(1100))
    driver, transfers = with_store(new(), contents)
    stored = driver.scheduler.admission.stored
    assert stored is not None
    blocks = int(2.9 * read_seconds)  # 2.9 a second
    transfers.counts.read_seconds, transfers.counts.read_blocks = read_seconds, blocks
    stored.speed.tokens = int(256 * prefill_seconds)  # 1 block a second
    stored.speed.seconds = prefill_seconds
    sequence = make_sequence("s", text(1100), 3)
    driver.add(sequence)
    driver.run()
    settle(driver)
    assert bool(stored.off) == is_off == ("times the 256" in caplog.text)
    assert sequence.num_cached == (0 if is_off else 1024)
    assert_empty(driver.scheduler)


def test_only_shared_blocks_are_saved() -> None:
    contents: Contents = {}
    driver, _ = with_store(new(), contents, saves_all=False)

    def ask(prompt: list[int]) -> list[int]:
        """Returns the lengths of the text whose blocks and states are saved."""
        driver.add(make_sequence(f"s{len(driver.finished)}", prompt, 3))
        driver.run()
        settle(driver)
        kinds = [record.kind for record in contents]
        return [256 * kinds.count("block"), kinds.count("state")]

    assert ask(text(1100)) == [0, 0]
    assert ask(text(600, 1)) == [0, 0]
    assert ask([*text(1100), *text(500, 2)]) == [1536, 2]  # shared, and what came to it
    assert run(contents, [*text(1100), *text(500, 2), 5]) == (1536, 6)
    assert_empty(driver.scheduler)


def test_a_preempted_sequence_comes_back_by_a_load() -> None:
    contents: Contents = {}
    driver, transfers = with_store(new(), contents)
    driver.eos = -1
    sequence = make_sequence("s", text(700), 400)
    driver.add(sequence)
    while len(sequence.token_ids) < 1040:
        driver.step()
    settle(driver)
    driver.scheduler.preempt_all()
    settle(driver)
    assert len([record for record in contents if record.kind == "state"]) == 2
    # Others need all pages.
    driver.scheduler.admission.waiting.remove(sequence)
    driver.add(make_sequence("other", text(2900, 1), 3))
    driver.run()
    driver.scheduler.admission.put_back(sequence)
    driver.run()
    settle(driver)
    assert transfers.loaded == 4 and len(driver.finished) == 2
    assert_said_as_alone(driver)
    assert_empty(driver.scheduler)


@given(st.data())
def test_random_traffic(data: st.DataObject) -> None:
    """As test_scheduler.test_random_traffic, with a store that outlives servers and loses records.

    Each row that a step reads was computed from the same tokens, here or on an earlier server.
    """
    seed = data.draw(st.integers(0, 40), "model")
    budget = data.draw(st.sampled_from([600, 150, 64, 300]), "budget")
    blocks = data.draw(st.integers(3, 7), "blocks")
    draw = random.Random(data.draw(st.integers(0, 2**32), "draws"))
    contents: Contents = {}
    longest = min(256 * blocks, 20 * budget)
    trunks = [[draw.randrange(40) for _ in range(longest)] for _ in range(2)]
    texts = list(trunks)
    loaded = 0
    for _ in range(data.draw(st.integers(1, 3), "servers")):
        scheduler = make_scheduler(
            seed,
            data.draw(st.integers(2, 6), "sequences"),
            budget,
            blocks,
            data.draw(st.sampled_from([0, 1, 3, 1000]), "states"),
            MOVING_STATES,
            prefix_salt="salt",
        )
        driver, transfers = with_store(
            scheduler,
            contents,
            seed=seed,
            ahead=data.draw(st.booleans(), "ahead"),
            draw=draw,
            saves_all=draw.random() < 0.8,
            pace=draw.choice((0.1, 0.5, 1.0)),
            failing=draw.choice((0.0, 0.0, 0.1)),
            crowded=draw.choice((0.0, 0.3)),
        )
        arrivals = data.draw(st.integers(4, 8), "arrivals")
        rate = draw.choice((0.03, 0.3, 1))
        priorities = draw.choice([(0,), (0, 0, 1, 5)])
        count = steps = 0
        while count < arrivals or scheduler.has_work:
            steps += 1
            assert steps < 20_000
            while count < arrivals and (draw.random() < rate or not scheduler.has_work):
                output = draw.randint(1, min(longest - 1, draw.choice((5, 100, 300))))
                prompt = some_prompt(draw, texts, longest - output)
                if draw.random() < 0.5:  # again, or further
                    whole = draw.choice(texts)[: longest - output - 1]
                    prompt = [*whole, draw.randrange(40)]
                sequence = make_sequence(f"s{count}", prompt, output, draw.choice(priorities))
                sequence.saves_first = draw.random() < 0.3
                driver.add(sequence)
                count += 1
            driver.step()
            if draw.random() < 0.01 and scheduler.has_work:
                driver.end(draw.choice(living(scheduler)))
            if draw.random() < 0.001:
                scheduler.reset_prefix_cache()
            if draw.random() < 0.002 and contents:
                del contents[draw.choice(list(contents))]
        assert_said_as_alone(driver)
        texts = [*trunks, *(t.tokens for t in driver.texts.values())]
        settle(driver)
        loaded += transfers.loaded
        assert_empty(scheduler)
    event(f"loaded: {loaded > 0}")


def test_agents_whose_prompts_do_not_fit_the_cache() -> None:
    """64 sessions in turn, with room for 5% of their blocks; then the same after a restart.

    The cache must not evict blocks that it has loaded for a session before that session uses them.
    """
    draw, contents = random.Random(0), Contents()
    sessions = [text(1100, 100 + n) for n in range(64)]
    reusable, reused = [0, 0], [0, 0]
    for restart in range(2):
        scheduler = make_scheduler(0, 4, 600, 32, moving_states=MOVING_STATES, prefix_salt="salt")
        driver, _ = with_store(scheduler, contents, pace=0.3)
        for turn in range(2):
            for first in range(0, 64, 8):
                asked = []
                for n in range(first, first + 8):
                    known = max(0, len(sessions[n]) - 1) // 256 * 256 if turn + restart else 0
                    sessions[n] = [
                        *sessions[n],
                        *text(draw.randint(200, 500), draw.randrange(10**9)),
                    ]
                    sequence = make_sequence(f"{restart} {turn} {n}", sessions[n], 20)
                    driver.add(sequence)
                    asked.append((n, known, sequence))
                driver.run()
                for n, known, sequence in asked:
                    sessions[n] = list(sequence.token_ids)
                    reusable[restart] += known
                    reused[restart] += min(known, sequence.num_cached or 0)
        settle(driver)
        assert_empty(scheduler)
    assert min(a / b for a, b in zip(reused, reusable, strict=True)) >= 0.97
