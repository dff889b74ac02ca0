"""Pages: given before they are needed, taken back as soon as they are not, never lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finwhale.engine.pages import BlockTables, PageManager, PagePool, windowed_pages
from finwhale.models.deepseek_v4.cache_spec import CacheGroup, cache_spec
from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.testing.tiny import tiny_config


def groups(seed: int) -> tuple[CacheGroup, ...]:
    return cache_spec(ModelConfig.from_dict(tiny_config(seed)))


def manager(seed: int = 0, num_pages: int = 40) -> PageManager:
    made = groups(seed)
    return PageManager(made, {g.name: num_pages for g in made})


def test_a_pool_never_gives_page_zero() -> None:
    pool = PagePool(4)
    taken = [pool.take() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3] and pool.num_free == 0
    with pytest.raises(AssertionError, match="no free page"):
        pool.take()
    with pytest.raises(AssertionError):
        pool.give(0)
    pool.give(2)
    assert pool.take() == 2


def test_growth_gives_each_page_when_its_first_row_comes() -> None:
    pages = manager(num_pages=100)
    tables = pages.new_tables()
    for token in range(600):
        pages.grow(tables, token, token + 1)
        # 64 entries of 4 tokens a page; 2 entries of 128: both pages are 256 tokens, but an
        # entry needs its page only when it completes.
        assert len(tables["c4"].pages) == ((token + 1) // 4 + 63) // 64
        assert len(tables["c128"].pages) == ((token + 1) // 128 + 1) // 2
        assert len(tables["window"].pages) == token // 64 + 1
    pages.release(tables)
    pages.check_integrity([])


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
    pages.check_integrity([])


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
    pages.check_integrity([tables])
    pages.trim(tables, 133)
    pages.release(tables)
    pages.check_integrity([])


def test_integrity_finds_lost_and_shared_pages() -> None:
    pages = manager()
    one, two = pages.new_tables(), pages.new_tables()
    pages.grow(one, 0, 10)
    pages.grow(two, 0, 10)
    pages.check_integrity([one, two])
    with pytest.raises(AssertionError, match="lost or held twice"):
        pages.check_integrity([one])
    two["window"].pages[0] = one["window"].pages[0]
    with pytest.raises(AssertionError, match="lost or held twice"):
        pages.check_integrity([one, two])


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_groups_that_forget_never_run_out(data: st.DataObject) -> None:
    """Any sequences at any positions, one step of any chunks: windowed_pages is enough."""
    made = groups(data.draw(st.integers(0, 40)))
    num_seqs = data.draw(st.integers(1, 5))
    budget = data.draw(st.sampled_from([1, 2, 7, 64, 65, 130, 300]))
    sizes = {g.name: windowed_pages(g, num_seqs, budget) if g.keep else 1000 for g in made}
    pages = PageManager(made, sizes)
    live: list[tuple[BlockTables, list[int]]] = []
    for _ in range(num_seqs):
        start = data.draw(st.integers(0, 700))
        tables = pages.new_tables()
        # As if read in steps of its own, the others idle.
        for at in range(0, start, budget):
            end = min(at + budget, start)
            pages.grow(tables, at, end)
            pages.trim(tables, end)
        live.append((tables, [start]))
    for _ in range(8):
        left = budget
        step = []
        for tables, position in live:
            count = data.draw(st.integers(0, left))
            left -= count
            if count:
                step.append((tables, position, count))
        for tables, position, count in step:
            pages.grow(tables, position[0], position[0] + count)
        pages.check_integrity([tables for tables, _ in live])
        for tables, position, count in step:
            position[0] += count
            pages.trim(tables, position[0])
    for tables, _ in live:
        pages.release(tables)
    pages.check_integrity([])
