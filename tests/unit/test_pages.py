"""Pages: given before they are needed, taken back as soon as they are not, never lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.integrity import check_pages
from tests.support.tiny import tiny_config

from finwhale.engine.plan.pages import BlockTables, PageManager, PagePool, windowed_pages
from finwhale.engine.plan.prefix_index import PrefixIndex
from finwhale.models.cache import CacheGroup
from finwhale.models.deepseek_v4.cache_spec import cache_spec
from finwhale.models.deepseek_v4.config_json import config_of


def groups(seed: int) -> tuple[CacheGroup, ...]:
    return cache_spec(config_of(tiny_config(seed)))


def manager(seed: int = 0, num_pages: int = 40) -> PageManager:
    made = groups(seed)
    return PageManager(made, {g.name: num_pages for g in made})


def test_a_pool_never_gives_page_zero() -> None:
    pool = PagePool(4)
    taken = [pool.allocate() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3] and pool.num_free == 0
    with pytest.raises(AssertionError, match="no free page"):
        pool.allocate()
    with pytest.raises(AssertionError):
        pool.remove_reference(0)
    pool.remove_reference(2)
    assert pool.allocate() == 2


def test_a_page_is_free_when_its_last_reference_is_removed() -> None:
    pool = PagePool(3)
    page = pool.allocate()
    pool.add_reference(page)
    pool.remove_reference(page)
    assert pool.num_free == 1
    pool.remove_reference(page)
    assert pool.num_free == 2
    for wrong in (pool.add_reference, pool.remove_reference):
        with pytest.raises(AssertionError):
            wrong(page)


def test_growth_gives_each_page_when_its_first_row_comes() -> None:
    pages = manager(num_pages=100)
    tables = pages.new_tables()
    for token in range(600):
        pages.grow(tables, token, token + 1, decodes=True)
        # 64 entries of 4 tokens a page; 2 entries of 128: both pages are 256 tokens, but an
        # entry needs its page only when it completes.
        assert len(tables["c4"].pages) == ((token + 1) // 4 + 63) // 64
        assert len(tables["c128"].pages) == ((token + 1) // 128 + 1) // 2
        assert len(tables["window"].pages) == token // 64 + 1
    pages.release(tables)
    check_pages(pages, [])


def test_trimming_leaves_the_numbering() -> None:
    """Page number k stays page number k when earlier ones have gone."""
    pages = manager()
    tables = pages.new_tables()
    pages.grow(tables, 0, 500)
    window, keep = tables["window"], dict(enumerate(tables["window"].pages))
    pages.trim(tables, 500)
    first = next(g for g in pages.groups if g.name == "window").first_needed(500) // 64
    assert window.first == first > 0
    assert {window.first + i: p for i, p in enumerate(window.pages)} == {
        k: p for k, p in keep.items() if k >= first
    }
    pages.release(tables)
    check_pages(pages, [])


def test_pages_that_a_long_step_skips_are_not_taken() -> None:
    """A chunk over many pages of state writes only the last, and reads only the first."""
    pages = manager(num_pages=4)
    tables = pages.new_tables()
    pages.grow(tables, 0, 5)  # the window and state pages of five tokens
    pages.trim(tables, 5)
    pages.grow(tables, 5, 133)
    state = tables["c4_state"]
    assert state.pages[0] != 0 and state.pages[-1] != 0
    assert set(state.pages[1:-1]) == {0}
    check_pages(pages, [tables])
    pages.trim(tables, 133)
    pages.release(tables)
    check_pages(pages, [])


def test_integrity_finds_lost_and_shared_pages() -> None:
    pages = manager()
    one, two = pages.new_tables(), pages.new_tables()
    pages.grow(one, 0, 10)
    pages.grow(two, 0, 10)
    check_pages(pages, [one, two])
    check_pages(pages, [one], {name: table.pages for name, table in two.items()})
    with pytest.raises(AssertionError, match="reference counts"):
        check_pages(pages, [one])
    two["window"].pages[0] = one["window"].pages[0]
    with pytest.raises(AssertionError, match="reference counts"):
        check_pages(pages, [one, two])
    pages.pools["window"]._free.append(one["window"].pages[0])
    with pytest.raises(AssertionError, match=r"reference counts|free list"):
        check_pages(pages, [one, two])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 40),
    prefix_caching=st.booleans(),
    steps=st.lists(st.sampled_from([1, 1, 1, 2, 3, 8, 63, 64, 127, 130, 256, 300]), max_size=40),
)
def test_grow_and_trim_do_nothing_before_the_lengths_they_return(
    seed: int, prefix_caching: bool, steps: list[int]
) -> None:
    """A decode calls neither before these lengths."""
    pages = manager(seed, num_pages=500)
    if prefix_caching:
        PrefixIndex(pages)
    tables = pages.new_tables()
    allocated_tokens = trim_at = start = 0

    def held() -> dict[str, tuple[int, list[int]]]:
        return {name: (table.first, list(table.pages)) for name, table in tables.items()}

    for count in steps:
        end = start + count
        before = held()
        now = pages.grow(tables, start, end, decodes=count == 1)
        if end <= allocated_tokens:
            assert held() == before
        allocated_tokens = now
        before = held()
        now = pages.trim(tables, end)
        if end < trim_at:
            assert held() == before
        trim_at, start = now, end
    pages.release(tables)
    check_pages(pages, [])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 40), start=st.integers(0, 900), count=st.integers(1, 900))
def test_steps_have_pages_for_the_ends_of_blocks(seed: int, start: int, count: int) -> None:
    """With a prefix index: every row that a sequence needs there, of the steps that wrote it."""
    pages = manager(seed, num_pages=500)
    PrefixIndex(pages)
    tables, end = pages.new_tables(), start + count
    if start:
        pages.grow(tables, 0, start)
        pages.trim(tables, start)
    pages.grow(tables, start, end)
    for block_end in range((start // 256 + 1) * 256, end + 1, 256):
        for group in pages.windowed_groups:
            table = tables[group.name]
            for row in range(group.first_needed(block_end), block_end):
                assert table.pages[row // group.rows_per_page - table.first]
    check_pages(pages, [tables])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_groups_that_forget_never_run_out(data: st.DataObject) -> None:
    """Any sequences at any positions, one step of any chunks: windowed_pages is enough."""
    made = groups(data.draw(st.integers(0, 40)))
    num_seqs = data.draw(st.integers(1, 5))
    budget = data.draw(st.sampled_from([1, 2, 7, 64, 65, 130, 300]))
    prefix_caching = data.draw(st.booleans())
    sizes = {
        g.name: windowed_pages(g, num_seqs, budget, prefix_caching) if g.keep else 1000
        for g in made
    }
    pages = PageManager(made, sizes)
    if prefix_caching:
        PrefixIndex(pages)
    live: list[tuple[BlockTables, list[int], list[bool]]] = []
    for _ in range(num_seqs):
        start = data.draw(st.integers(0, 700))
        tables = pages.new_tables()
        # As if read in steps of its own, the others idle.
        for at in range(0, start, budget):
            end = min(at + budget, start)
            pages.grow(tables, at, end)
            pages.trim(tables, end)
        live.append((tables, [start], [False]))
    for _ in range(8):
        left = budget
        step = []
        for tables, position, decodes in live:
            # A prompt may be read a token at a time, too; what decodes goes on to.
            decodes[0] = decodes[0] or data.draw(st.booleans())
            count = data.draw(st.integers(0, min(left, 1) if decodes[0] else left))
            left -= count
            if count:
                step.append((tables, position, count))
                pages.grow(tables, position[0], position[0] + count, decodes[0])
        check_pages(pages, [tables for tables, *_ in live])
        for tables, position, count in step:
            position[0] += count
            pages.trim(tables, position[0])
    for tables, *_ in live:
        pages.release(tables)
    check_pages(pages, [])


def test_a_token_of_a_prompt_takes_no_page_ahead() -> None:
    """The step after it may be of many tokens, and skip that page."""
    made = groups(0)
    sizes = {g.name: windowed_pages(g, 1, 64) if g.keep else 1000 for g in made}
    pages = PageManager(made, sizes)
    tables = pages.new_tables()
    for start, end in ((0, 8), (8, 9), (9, 33)):
        pages.grow(tables, start, end)
        pages.trim(tables, end)
    pages.release(tables)
    check_pages(pages, [])


def test_keys_depend_on_the_salt() -> None:
    """Processes with one salt have the same keys; without one, each has its own."""

    def keys(salt: str | None) -> list[bytes]:
        found: list[bytes] = []
        PrefixIndex(manager(), salt).extend_keys(found, list(range(600)))
        return found

    assert len(keys("a")) == 2 and keys("a") == keys("a")
    assert not set(keys("a")) & set(keys("b"))
    assert not set(keys(None)) & set(keys(None))


def test_keys_depend_on_the_owner() -> None:
    index = PrefixIndex(manager(), "a")

    def keys(owner: str) -> list[bytes]:
        found: list[bytes] = []
        # In two steps, as a sequence that grows.
        index.extend_keys(found, list(range(300)), owner)
        index.extend_keys(found, list(range(600)), owner)
        return found

    owners = ["", "name:ann", "name:bob", "name:ann/salt", "/salt", "\ud800"]
    assert all(keys(owner) == keys(owner) for owner in owners)
    assert len({key for owner in owners for key in keys(owner)}) == 2 * len(owners)
