"""Pages of cached state: who holds which. Pure Python; the tensors are in kv_cache.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class PageGroup(Protocol):
    """What this module reads of a model's cache declaration (cache_spec.CacheGroup)."""

    @property
    def name(self) -> str: ...
    @property
    def tokens_per_row(self) -> int: ...
    @property
    def rows_per_page(self) -> int: ...
    @property
    def tokens_per_page(self) -> int: ...
    @property
    def keep(self) -> tuple[int, int] | None: ...
    def first_needed(self, num_tokens: int) -> int: ...
    def first_written(self, start: int, end: int) -> int: ...


@dataclass(slots=True)
class BlockTable:
    """One sequence's pages in one group: pages[i] is its page number first + i.

    Page number k holds the rows of tokens k * tokens_per_page on.
    """

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


BlockTables = dict[str, BlockTable]


class PagePool:
    """The free pages of one group. Page 0 is nobody's: it stands where there is no page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        assert self._free, "no free page: admission must have reserved them"
        return self._free.pop()

    def give(self, page: int) -> None:
        assert 0 < page < self.num_pages
        self._free.append(page)


class PageManager:
    """Gives pages to sequences as they grow and takes back those that no later token needs."""

    def __init__(self, groups: Sequence[PageGroup], num_pages: Mapping[str, int]) -> None:
        """num_pages: pages of each group, page 0 included."""
        self.groups = tuple(groups)
        self.pools = {group.name: PagePool(num_pages[group.name]) for group in groups}

    def new_tables(self) -> BlockTables:
        return {group.name: BlockTable() for group in self.groups}

    def grow(self, tables: BlockTables, start: int, end: int) -> None:
        """Give the pages that a step over tokens start..end-1 reads and writes."""
        for group in self.groups:
            table = tables[group.name]
            first_row = group.first_written(start, end) // group.tokens_per_row
            last_row = end // group.tokens_per_row - 1
            if last_row < first_row:
                continue
            if not table.pages:
                table.first = first_row // group.rows_per_page
            while table.end <= last_row // group.rows_per_page:
                # Pages between those read and those written are never touched.
                skipped = group.keep is not None and table.end < first_row // group.rows_per_page
                table.pages.append(0 if skipped else self.pools[group.name].take())

    def trim(self, tables: BlockTables, num_tokens: int) -> None:
        """Take back the pages whose rows no token at position num_tokens or later needs."""
        for group in self.groups:
            table = tables[group.name]
            first = group.first_needed(num_tokens) // group.tokens_per_page
            while table.pages and table.first < first:
                self._give(group.name, table.pages.pop(0))
                table.first += 1

    def release(self, tables: BlockTables) -> None:
        """Take everything back."""
        for group in self.groups:
            table = tables[group.name]
            for page in table.pages:
                self._give(group.name, page)
            table.pages.clear()

    def _give(self, name: str, page: int) -> None:
        if page:
            self.pools[name].give(page)

    def check_integrity(self, live: Sequence[BlockTables]) -> None:
        """Assert that every page is free or held exactly once by one of `live`."""
        for group in self.groups:
            held = [page for tables in live for page in tables[group.name].pages if page]
            free = self.pools[group.name]._free
            every = sorted(held + free)
            assert every == list(range(1, self.pools[group.name].num_pages)), (
                f"pages of {group.name} lost or held twice"
            )


def windowed_pages(group: PageGroup, max_num_seqs: int, max_step_tokens: int) -> int:
    """Pages that let max_num_seqs sequences and one step always run, for a group that forgets."""
    assert group.keep is not None
    align, before = group.keep
    kept = align + before
    each = -(-kept // group.tokens_per_page) + 2
    return 1 + max_num_seqs * each + -(-max_step_tokens // group.tokens_per_page)
