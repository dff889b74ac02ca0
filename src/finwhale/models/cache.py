"""The layout of the cache in pages, which a model declares and the engine allocates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import lcm
from typing import Protocol

from torch import Tensor

from finwhale.ops.paging import BLOCK_TOKENS, CacheRows, PageTable

# Bytes. Kernels load 16 bytes at once, so every part of a page begins at a multiple of 16. A page
# of packed parts begins at a multiple of a cache line.
PART_ALIGN, PAGE_ALIGN = 16, 128
# Triton compiles a kernel anew for a row stride that is no multiple of 16 float32 values.
STATE_ALIGN = 64


class Record(Protocol):
    """The form in which a row is stored. The layouts of operators define the records that kernels
    read as bytes (ops/attention/layout.py, ops/indexer/layout.py).
    """

    @property
    def width(self) -> int:
        """Values in a row."""

    def page_bytes(self, rows_per_page: int) -> int:
        """Bytes of one layer's part of a packed page."""


@dataclass(frozen=True, slots=True)
class State:
    """A row of `width` float32 values, whatever the dtype of the activations."""

    width: int

    def page_bytes(self, rows_per_page: int) -> int:
        return 4 * rows_per_page * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheField:
    """One kind of row that some layers store in the cache.

    Attributes:
        layers: the layers that store it. The draft layers' numbers follow the model's.
    """

    name: str
    record: Record
    layers: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.record.width

    @property
    def full_precision(self) -> bool:
        return isinstance(self.record, State)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """The layout of a group's rows in its pages.

    A page of a packed group has one part for each field and layer. A page of another group has
    rows_per_page rows, each with the values of every field and layer. So row r of page p lies
    row_bytes * (p * rows_per_page + r) bytes after row 0 of page 0, and a layer's rows form a
    strided tensor [rows, width].

    Attributes:
        page_bytes: size of a page.
        row_bytes: bytes from one row to the next; 0: the group is packed.
        offsets: byte offset in a page of each part, by field name and layer.
    """

    page_bytes: int
    row_bytes: int
    offsets: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Fields whose rows share their pages and their page table.

    A sequence can resume at the end of any block of another sequence with the same prefix. It needs
    all rows of the groups that keep every row, and the rows of tokens first_needed(end) .. end-1 of
    the other groups, unless it computes these again (`rebuilt`). No page spans two blocks, so no
    sequence writes into a page that another one reads.

    Attributes:
        tokens_per_row: 1, or the compression ratio: row r exists once tokens_per_row * (r + 1)
            tokens have been computed.
        keep: None: the group keeps every row. (align, before): after n tokens, it keeps the rows of
            the tokens from floor(n / align) * align - before on.
        tail_only: a step writes only the rows that later steps need to resume at the ends of its
            blocks and to continue after it. They can continue after any token of a step that has at
            most max_verify_tokens.
        max_verify_tokens: the most tokens of a sequence in a step that verifies drafts. Only the
            first token is certain to be accepted.
        rebuilt: the prefix cache keeps no rows of the group. A sequence that resumes at the end of
            a cached prefix first computes this many of its last tokens again. 0: it keeps them.
    """

    name: str
    tokens_per_row: int
    rows_per_page: int
    keep: tuple[int, int] | None = None
    tail_only: bool = False
    max_verify_tokens: int = 1
    # Not in the text of a group, from which stores of DeepSeek-V4 have their fingerprint.
    rebuilt: int = field(default=0, repr=False)
    fields: tuple[CacheField, ...]

    def __post_init__(self) -> None:
        assert self.block_tokens % self.tokens_per_page == 0

    @property
    def tokens_per_page(self) -> int:
        return self.tokens_per_row * self.rows_per_page

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    @property
    def pages_of_block(self) -> int:
        return self.block_tokens // self.tokens_per_page

    def state_pages(self, end: int) -> range:
        """The numbers of the pages that a sequence needs to resume after token end-1, the last of a
        block, if the group drops old rows.
        """
        size = self.tokens_per_page
        first = end if self.rebuilt else self.first_needed(end)
        return range(first // size, end // size)

    def first_needed(self, num_tokens: int) -> int:
        """The first token whose row a token at position num_tokens or later can need."""
        if self.keep is None:
            return 0
        align, before = self.keep
        return max(0, num_tokens // align * align - before)

    def unneeded_at(self, first_page: int) -> int:
        """The smallest number of tokens after which no token needs page number first_page."""
        assert self.keep is not None
        align, before = self.keep
        return -(-((first_page + 1) * self.tokens_per_page + before) // align) * align

    def first_written(self, start: int, end: int) -> int:
        """The first token whose row a step over tokens start..end-1 writes."""
        if not self.tail_only:
            return start
        settled = end if end - start > self.max_verify_tokens else start + 1
        return max(start, self.first_needed(settled))

    def layout(self, itemsize: int, packed: bool = False) -> PageLayout:
        """The layout of a page.

        Args:
            itemsize: bytes of one activation.
            packed: rows and keys are stored as the bytes that the kernels read, not as values.
        """
        states = {f.full_precision for f in self.fields}
        assert len(states) == 1, f"{self.name}: states have groups of their own"
        packed = packed and states == {False}
        offsets: dict[tuple[str, int], int] = {}
        end = 0
        for f in self.fields:
            size = f.width * (4 if f.full_precision else itemsize)
            if packed:
                size = f.record.page_bytes(self.rows_per_page)
            for layer in f.layers:
                offsets[f.name, layer] = end
                end += _aligned(size, PART_ALIGN)
        if packed:
            return PageLayout(page_bytes=_aligned(end, PAGE_ALIGN), row_bytes=0, offsets=offsets)
        # A row has a multiple of each field's bytes: k times a field's. So the CPU's operators see
        # a field as a contiguous array, in which row r is row k * r (ops/cpu_math.py).
        widths = [f.width * itemsize for f in self.fields]
        row_bytes = _aligned(end, STATE_ALIGN if states == {True} else lcm(PART_ALIGN, *widths))
        return PageLayout(
            page_bytes=self.rows_per_page * row_bytes, row_bytes=row_bytes, offsets=offsets
        )

    def page_bytes(self, itemsize: int, packed: bool = False) -> int:
        """Bytes of one page with all fields and layers. The arguments are those of `layout`."""
        return self.layout(itemsize, packed).page_bytes


def _aligned(size: int, align: int) -> int:
    return -(-size // align) * align


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The memory of the cache.

    Attributes:
        pools: field -> layer -> the layer's rows in all pages, a strided view of `pages`: [rows,
            width], where row r of page p is row p * rows_per_page + r; for packed rows and keys,
            uint8 [num_pages, bytes of the layer's part].
        groups: field -> the group whose pages have its rows.
        pages: group -> uint8 [num_pages, page_bytes]. A page is contiguous and has the rows of all
            layers, so copying it saves or restores all of them. Empty while a graph is traced,
            which needs only some pools.
    """

    pools: Mapping[str, Mapping[int, Tensor]]
    groups: Mapping[str, str]
    pages: Mapping[str, Tensor] = field(default_factory=dict)

    def rows(self, field: str, layer: int, tables: Mapping[str, PageTable]) -> CacheRows:
        """A layer's rows of a field in a step. tables: the step's page tables, by group."""
        return CacheRows(self.pools[field][layer], tables[self.groups[field]])
