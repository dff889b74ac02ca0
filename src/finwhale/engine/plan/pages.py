"""Allocates cache pages and counts their references, without torch: kv_cache.py has the tensors."""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # it imports torch
    from finwhale.models.cache import CacheGroup


@dataclass(slots=True)
class BlockTable:
    """One sequence's pages in one group: pages[i] is the sequence's page number first + i.

    Page number k holds the rows of tokens k * tokens_per_page to (k + 1) * tokens_per_page - 1.

    Attributes:
        allocated_tokens: the most tokens for which the table's pages are enough.
        trim_at: number of tokens at which `trim` frees the next pages.
        version: replaced by a new object whenever `first` or `pages` changes.
    """

    first: int = 0
    pages: list[int] = field(default_factory=list)
    allocated_tokens: int = 0
    trim_at: int = 0
    version: object = None

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class BlockTables(dict[str, BlockTable]):
    """One sequence's tables by group, in order. `version` changes with that of any table."""

    version: object = None


class SentTables:
    """The block tables that another place has, by row, so that it gets only the changes."""

    def __init__(self) -> None:
        # For each table of a row: its version, the table, its `first` and its number of pages.
        self._rows: dict[int, list[tuple[object, BlockTable | None, int, int]]] = {}

    def forget(self) -> None:
        """Record that the other place may have nothing."""
        self._rows.clear()

    def changes(self, row: int, tables: BlockTables) -> Iterator[tuple[int, BlockTable, int]]:
        """Yield the changed tables of a row, which the other place then has.

        Each comes with the number of its group and the index of its first changed page; 0: all of
        it has changed.
        """
        if row not in self._rows:
            self._rows[row] = [(None, None, 0, 0)] * len(tables)
        sent = self._rows[row]
        for group, table in enumerate(tables.values()):
            version, before, first, count = sent[group]
            if version is not table.version:
                # Pages in the middle of a table never change.
                yield group, table, count if before is table and first == table.first else 0
                sent[group] = table.version, table, table.first, len(table.pages)


class PagePool:
    """The pages of one group. Page 0 is never allocated: it marks table entries without a page.

    Attributes:
        references: reference count of each page; 0: the page is free.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Allocate a free page, with one reference."""
        assert self._free, "no free page: the planner of a step must check that there are enough"
        page = self._free.pop()
        self.references[page] = 1
        return page

    def add_reference(self, page: int) -> None:
        """Add a reference to an allocated page."""
        assert self.references[page] > 0
        self.references[page] += 1

    def remove_reference(self, page: int) -> None:
        """Remove a reference to a page. A page without references is free."""
        assert 0 < page < self.num_pages and self.references[page] > 0
        self.references[page] -= 1
        if not self.references[page]:
            self._free.append(page)


class Reclaimer(Protocol):
    """A cache that frees its pages when sequences need them (prefix_index.PrefixIndex)."""

    @property
    def num_idle(self) -> int:
        """Number of blocks that the cache can at least free now, in the full groups."""

    def reclaim(self, group: "CacheGroup") -> None:
        """Free at least one page of the group, unless the cache has none that it can free."""


class PageManager:
    """Allocates pages to sequences as they grow and frees pages that no later token needs.

    Attributes:
        full_groups: the groups that keep every row.
        windowed_groups: the groups that drop rows when no later token needs them.
        has_states: a sequence needs some of their pages to resume after a block.
        replay_tokens: number of tokens that a sequence computes again when it resumes.
        reclaimer: frees cached pages on demand. If it is set, `grow` also allocates the pages
            whose rows the prefix cache keeps at the ends of blocks.
    """

    def __init__(self, groups: "Sequence[CacheGroup]", num_pages: Mapping[str, int]) -> None:
        """num_pages: number of pages of each group, including page 0."""
        self.groups = tuple(groups)
        self.full_groups = tuple(g for g in groups if g.keep is None)
        self.windowed_groups = tuple(g for g in groups if g.keep is not None)
        self.has_states = any(map(pages_at_block_end, self.windowed_groups))
        self.replay_tokens = max(group.rebuilt for group in groups)
        self.pools = {group.name: PagePool(num_pages[group.name]) for group in groups}
        self.reclaimer: Reclaimer | None = None

    def new_tables(self) -> BlockTables:
        tables = BlockTables((group.name, BlockTable()) for group in self.groups)
        self.renew(tables)
        return tables

    def renew(self, tables: BlockTables) -> None:
        """Mark tables as changed, after another class has filled them."""
        tables.version = object()
        for table in tables.values():
            table.version = tables.version

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can still be allocated in the full groups."""
        idle = self.reclaimer.num_idle if self.reclaimer is not None else 0
        if not self.full_groups:
            return sys.maxsize
        return idle + min(
            self.pools[g.name].num_free * g.tokens_per_page // g.block_tokens
            for g in self.full_groups
        )

    def fits(self, tables: BlockTables, end: int) -> bool:
        """Whether enough pages are free for a step that ends with token end-1.

        The windowed groups have enough pages for every step (`windowed_pages`).
        """
        idle = self.reclaimer.num_idle if self.reclaimer is not None else 0
        for group in self.full_groups:
            table = tables[group.name]
            if table.allocated_tokens >= end:
                continue
            missing = -(-(end // group.tokens_per_row) // group.rows_per_page) - table.end
            spare = idle * group.pages_of_block
            if missing > self.pools[group.name].num_free + spare:
                return False
        return True

    def grow(self, tables: BlockTables, start: int, end: int, decodes: bool = False) -> int:
        """Allocate the pages that a step over tokens start..end-1 reads and writes.

        Args:
            decodes: the following steps are decodes, of one or a few tokens each.

        Returns:
            The most tokens for which the sequence's pages are now enough.
        """
        allocated_tokens = sys.maxsize
        tables.version = version = object()
        for group, table in zip(self.groups, tables.values(), strict=True):
            if table.allocated_tokens < end:
                rows, per_row, table.version = group.rows_per_page, group.tokens_per_row, version
                first_row = group.first_written(start, end) // per_row
                last_row = end // per_row - 1
                if last_row >= first_row:
                    first, last = first_row // rows, last_row // rows
                    if table.pages and first == last == table.end:
                        table.pages.append(self.allocate(group))
                        if group.tail_only and decodes and end == start + 1:
                            # A decode frees such pages after a few tokens, so allocating two at
                            # once halves the number of calls. A step of many tokens would not use
                            # the second page.
                            table.pages.append(self.allocate(group))
                    else:
                        self._extend(group, table, start, end, first, last)
                table.allocated_tokens = (table.end * rows + 1) * per_row - 1
            if table.allocated_tokens < allocated_tokens:
                allocated_tokens = table.allocated_tokens
        return allocated_tokens

    def _extend(
        self, group: "CacheGroup", table: BlockTable, start: int, end: int, first: int, last: int
    ) -> None:
        """Allocate the pages with numbers first..last, and earlier ones that the prefix cache keeps
        at the ends of blocks.
        """
        keeps_ends = self.reclaimer is not None and group.tail_only
        if not table.pages:
            table.trim_at = 0
            table.first = start // group.tokens_per_page if keeps_ends else first
        begin = table.end
        if group.keep is None:
            table.pages.extend(self.allocate(group) for _ in range(begin, last + 1))
            return
        # A step does not use the pages between those that it reads and those that it writes.
        wanted = set(range(max(begin, first), last + 1))
        if keeps_ends:
            wanted |= _at_block_ends(group, begin, end)
        table.pages.extend(
            self.allocate(group) if number in wanted else 0 for number in range(begin, last + 1)
        )

    def allocate(self, group: "CacheGroup") -> int:
        """Allocate a page, for which the prefix cache gives one back if none is free."""
        pool = self.pools[group.name]
        if not pool.num_free and self.reclaimer is not None:
            self.reclaimer.reclaim(group)
        return pool.allocate()

    def allocate_several(self, num_pages: "Mapping[CacheGroup, int]") -> dict[str, tuple[int, ...]]:
        """Allocate pages: for each group, as many as `num_pages` says. Returns their numbers, by
        the groups' names.
        """
        return {
            group.name: tuple(self.allocate(group) for _ in range(count))
            for group, count in num_pages.items()
        }

    def trim(self, tables: BlockTables, num_tokens: int) -> int:
        """Free the pages whose rows no token at position num_tokens or later needs.

        Returns:
            The number of tokens at which `trim` can free pages again.
        """
        again = sys.maxsize
        for group in self.windowed_groups:
            table = tables[group.name]
            if table.trim_at <= num_tokens:
                unneeded = group.first_needed(num_tokens) // group.tokens_per_page - table.first
                if unneeded > 0:
                    self.drop({group.name: table.pages[:unneeded]})
                    del table.pages[:unneeded]
                    table.first += unneeded
                    table.version = tables.version = object()
                table.trim_at = group.unneeded_at(table.first)
            if table.trim_at < again:
                again = table.trim_at
        return again

    def release(self, tables: BlockTables) -> None:
        """Free all pages of a sequence."""
        self.drop({name: table.pages for name, table in tables.items()})
        for table in tables.values():
            table.pages.clear()

    def hold(self, pages: Mapping[str, Sequence[int]]) -> None:
        """Add a reference to each page, by group; 0 is no page."""
        for name, numbers in pages.items():
            add_reference = self.pools[name].add_reference
            for page in numbers:
                if page:
                    add_reference(page)

    def drop(self, pages: Mapping[str, Sequence[int]]) -> None:
        """Remove a reference to each page, by group; 0 is no page."""
        for name, numbers in pages.items():
            remove_reference = self.pools[name].remove_reference
            for page in numbers:
                if page:
                    remove_reference(page)


def _at_block_ends(group: "CacheGroup", first: int, end: int) -> set[int]:
    """The page numbers, from `first` on, that a sequence needs to resume at the ends of blocks.

    The blocks are those that end at token `end` or before.
    """
    size, rows = group.block_tokens, group.tokens_per_page
    found: set[int] = set()
    for block in range(first * rows // size, end // size):
        block_end = (block + 1) * size
        needed = max(group.first_needed(block_end), block * size)
        found.update(range(max(first, needed // rows), block_end // rows))
    return found


def pages_at_block_end(group: "CacheGroup") -> int:
    """Number of pages of a windowed group that a sequence needs to resume after a block."""
    assert group.keep is not None
    return len(group.state_pages(group.block_tokens * (1 + sum(group.keep) // group.block_tokens)))


def windowed_pages(
    group: "CacheGroup",
    max_num_seqs: int,
    max_step_tokens: int,
    prefix_caching: bool = False,
    drafts: bool = False,
) -> int:
    """Number of pages with which a windowed group never runs out of pages.

    Args:
        max_num_seqs: number of running sequences.
        max_step_tokens: number of tokens of one step.
        prefix_caching: the prefix cache also keeps pages at the ends of blocks.
        drafts: sequences also have pages for a few tokens after those of a step.
    """
    assert group.keep is not None
    align, before = group.keep
    more = max_num_seqs if drafts else 0
    size = group.tokens_per_page
    # Between two steps a sequence keeps at most align + before - 1 rows. Their first row is a
    # multiple of `unit`.
    unit = math.gcd(align, before, size)
    kept = (size - unit + align + before - 2) // size + 1
    if not group.tail_only:
        return 1 + max_num_seqs * (kept + 1) + -(-max_step_tokens // size) + more
    num_pages = 1 + max_num_seqs * 2 * kept + more
    if prefix_caching:
        num_blocks = max_num_seqs + max_step_tokens // group.block_tokens
        num_pages += num_blocks * pages_at_block_end(group)
    return num_pages
