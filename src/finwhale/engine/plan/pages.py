"""Pages of cached state: who holds which. Pure Python; the tensors are in kv_cache.py."""

import math
import sys
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
    @property
    def tail_only(self) -> bool: ...
    @property
    def block_tokens(self) -> int: ...
    def first_needed(self, num_tokens: int) -> int: ...
    def first_written(self, start: int, end: int) -> int: ...
    def forgets_at(self, first_page: int) -> int: ...


@dataclass(slots=True)
class BlockTable:
    """One sequence's pages in one group: pages[i] is its page number first + i.

    Page number k holds the rows of tokens k * tokens_per_page on.

    Attributes:
        room: tokens that the sequence may have before this table must grow.
        due: tokens at which pages go back.
        version: another object whenever first or pages are others.
    """

    first: int = 0
    pages: list[int] = field(default_factory=list)
    room: int = 0
    due: int = 0
    version: object = None

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class BlockTables(dict[str, BlockTable]):
    """One sequence's tables by group, in the order of the groups.

    Attributes:
        version: another object whenever one of them has another.
    """

    version: object = None


class PagePool:
    """The pages of one group. Page 0 is nobody's: it stands where there is no page.

    Attributes:
        holders: by page, how many hold it; 0: it is free.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.holders = [0] * num_pages
        self._free = list(range(num_pages - 1, 0, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A page that nobody held."""
        assert self._free, "no free page: whoever plans a step must see that there are enough"
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def hold(self, page: int) -> None:
        """Hold a page that others hold too."""
        assert self.holders[page] > 0
        self.holders[page] += 1

    def give(self, page: int) -> None:
        """Hold a page no longer; the last one frees it."""
        assert 0 < page < self.num_pages and self.holders[page] > 0
        self.holders[page] -= 1
        if not self.holders[page]:
            self._free.append(page)

    def check_integrity(self, held: Sequence[int], name: str) -> None:
        """Assert that the pages of `held`, as often as they stand there, are held, others free."""
        counts = [0] * self.num_pages
        for page in held:
            counts[page] += 1
        assert counts[0] == 0
        assert counts == self.holders, f"pages of {name} lost or held by nobody who knows"
        free = [page for page in range(1, self.num_pages) if not counts[page]]
        assert sorted(self._free) == free, f"pages of {name} lost or free twice"


class Reclaimer(Protocol):
    """Who holds pages that sequences may have when there is no free one (prefix.PrefixIndex)."""

    @property
    def num_idle(self) -> int:
        """Blocks of the groups that keep everything which could be free at once."""
        ...

    def reclaim(self, group: PageGroup) -> None:
        """Give at least one page of the group back, if there is one to give."""
        ...


class PageManager:
    """Gives pages to sequences as they grow and takes back those that no later token needs.

    Attributes:
        keeping, forgetting: the groups that keep every row, and those that do not.
        reclaimer: gives pages back that it holds for later; with one, a step also gets pages for
            what is kept at the ends of blocks.
    """

    def __init__(self, groups: Sequence[PageGroup], num_pages: Mapping[str, int]) -> None:
        """num_pages: pages of each group, page 0 included."""
        self.groups = tuple(groups)
        self.keeping = tuple(g for g in groups if g.keep is None)
        self.forgetting = tuple(g for g in groups if g.keep is not None)
        self.pools = {group.name: PagePool(num_pages[group.name]) for group in groups}
        self.reclaimer: Reclaimer | None = None

    def new_tables(self) -> BlockTables:
        tables = BlockTables((group.name, BlockTable()) for group in self.groups)
        self.renew(tables)
        return tables

    def renew(self, tables: BlockTables) -> None:
        """Give tables that were filled from elsewhere new versions."""
        tables.version = object()
        for table in tables.values():
            table.version = tables.version

    @property
    def free_blocks(self) -> int:
        """Blocks that sequences can still be given in the groups that keep everything."""
        idle = self.reclaimer.num_idle if self.reclaimer is not None else 0
        if not self.keeping:
            return sys.maxsize
        return idle + min(
            self.pools[g.name].num_free * g.tokens_per_page // g.block_tokens for g in self.keeping
        )

    def fits(self, tables: BlockTables, end: int) -> bool:
        """Whether `grow` can give what a step up to token end-1 needs.

        The groups that forget have pages for every step (`windowed_pages`).
        """
        idle = self.reclaimer.num_idle if self.reclaimer is not None else 0
        for group in self.keeping:
            table = tables[group.name]
            if table.room >= end:
                continue
            missing = -(-(end // group.tokens_per_row) // group.rows_per_page) - table.end
            spare = idle * (group.block_tokens // group.tokens_per_page)
            if missing > self.pools[group.name].num_free + spare:
                return False
        return True

    def grow(self, tables: BlockTables, start: int, end: int, decodes: bool = False) -> int:
        """Give the pages that a step over tokens start..end-1 reads and writes.

        Args:
            decodes: so will the steps that follow, a token or a few at a time.

        Returns:
            How many tokens the sequence may have before it must grow again.
        """
        room = sys.maxsize
        tables.version = version = object()
        for group, table in zip(self.groups, tables.values(), strict=True):
            if table.room < end:
                rows, per_row, table.version = group.rows_per_page, group.tokens_per_row, version
                first_row = group.first_written(start, end) // per_row
                last_row = end // per_row - 1
                if last_row >= first_row:
                    first, last = first_row // rows, last_row // rows
                    if table.pages and first == last == table.end:
                        table.pages.append(self._take(group))
                        if group.tail_only and decodes and end == start + 1:
                            # They come back in a few tokens: one more halves how often. A step of
                            # many would skip it, and need as many pages besides.
                            table.pages.append(self._take(group))
                    else:
                        self._extend(group, table, start, end, first, last)
                table.room = (table.end * rows + 1) * per_row - 1
            if table.room < room:
                room = table.room
        return room

    def _extend(
        self, group: PageGroup, table: BlockTable, start: int, end: int, first: int, last: int
    ) -> None:
        """Pages number first..last, and those before that the ends of blocks need."""
        shares = self.reclaimer is not None and group.tail_only
        if not table.pages:
            table.due = 0
            table.first = start // group.tokens_per_page if shares else first
        begin = table.end
        if group.keep is None:
            table.pages.extend(self._take(group) for _ in range(begin, last + 1))
            return
        # Pages between those read and those written are never touched.
        wanted = set(range(max(begin, first), last + 1))
        if shares:
            wanted |= _at_block_ends(group, begin, end)
        table.pages.extend(
            self._take(group) if number in wanted else 0 for number in range(begin, last + 1)
        )

    def _take(self, group: PageGroup) -> int:
        pool = self.pools[group.name]
        if not pool.num_free and self.reclaimer is not None:
            self.reclaimer.reclaim(group)
        return pool.take()

    def trim(self, tables: BlockTables, num_tokens: int) -> int:
        """Take back the pages whose rows no token at position num_tokens or later needs.

        Returns:
            The number of tokens at which there is something to take back again.
        """
        again = sys.maxsize
        for group in self.forgetting:
            table = tables[group.name]
            if table.due <= num_tokens:
                gone = group.first_needed(num_tokens) // group.tokens_per_page - table.first
                if gone > 0:
                    self._give(group.name, table.pages[:gone])
                    del table.pages[:gone]
                    table.first += gone
                    table.version = tables.version = object()
                table.due = group.forgets_at(table.first)
            if table.due < again:
                again = table.due
        return again

    def release(self, tables: BlockTables) -> None:
        """Take everything back."""
        for name, table in tables.items():
            self._give(name, table.pages)
            table.pages.clear()

    def _give(self, name: str, pages: Sequence[int]) -> None:
        give = self.pools[name].give
        for page in pages:
            if page:
                give(page)

    def check_integrity(
        self, live: Sequence[BlockTables], kept: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        """Assert that every page is free, or held as often as `live` tables and `kept` say."""
        for group in self.groups:
            held = [page for tables in live for page in tables[group.name].pages if page]
            held += (kept or {}).get(group.name, ())
            self.pools[group.name].check_integrity(held, group.name)


def _at_block_ends(group: PageGroup, first: int, end: int) -> set[int]:
    """Pages number `first` and later of blocks that end by token `end`: those that a sequence needs
    that goes on at the end of their block.
    """
    size, rows = group.block_tokens, group.tokens_per_page
    found: set[int] = set()
    for block in range(first * rows // size, end // size):
        block_end = (block + 1) * size
        needed = max(group.first_needed(block_end), block * size)
        found.update(range(max(first, needed // rows), block_end // rows))
    return found


def pages_at_block_end(group: PageGroup) -> int:
    """Pages of a group that forgets which a sequence needs to go on at the end of a block."""
    assert group.keep is not None
    end = group.block_tokens * (1 + sum(group.keep) // group.block_tokens)
    return end // group.tokens_per_page - group.first_needed(end) // group.tokens_per_page


def windowed_pages(
    group: PageGroup,
    max_num_seqs: int,
    max_step_tokens: int,
    shares: bool = False,
    drafts: bool = False,
) -> int:
    """Pages that let max_num_seqs sequences and one step always run, for a group that forgets.

    Args:
        shares: steps also keep what is needed at the ends of blocks.
        drafts: sequences also have pages for a few tokens after those of a step.
    """
    assert group.keep is not None
    align, before = group.keep
    more = max_num_seqs if drafts else 0
    size = group.tokens_per_page
    # Between two steps a sequence keeps at most align + before - 1 rows, which begin anywhere that
    # `unit` divides.
    unit = math.gcd(align, before, size)
    kept = (size - unit + align + before - 2) // size + 1
    if not group.tail_only:
        return 1 + max_num_seqs * (kept + 1) + -(-max_step_tokens // size) + more
    num_pages = 1 + max_num_seqs * 2 * kept + more
    if shares:
        num_blocks = max_num_seqs + max_step_tokens // group.block_tokens
        num_pages += num_blocks * pages_at_block_end(group)
    return num_pages
