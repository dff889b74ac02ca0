"""What state a sequence keeps, as a declaration that the engine allocates pages from.

Five kinds of one description: window kv, C4 entries, C128 entries, indexer keys, and the state of
the compressors. Rows of one group share their pages and their block table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from finwhale.models.deepseek_v4.config import ModelConfig
from finwhale.ops.attention import layout as row_layout
from finwhale.ops.compressor import STATE_KEPT
from finwhale.ops.indexer import layout as key_layout
from finwhale.ops.paging import BLOCK_TOKENS

GroupName = Literal["window", "c4", "c128", "c4_state", "c128_state"]
FieldKind = Literal["row", "key", "state"]
FieldName = Literal["window", "c4", "index_keys", "c128", "c4_state", "index_state", "c128_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheField:
    """One kind of row, kept by some layers.

    Attributes:
        width: values a row.
        kind: "row" of attention, indexer "key", or "state" of a compressor: float32 whatever the
            dtype of the activations.
        rope: the last values of a row that are never rounded.
        layers: the layers that keep it; the MTP layer's number follows the last layer's.
    """

    name: FieldName
    width: int
    kind: FieldKind
    rope: int
    layers: tuple[int, ...]

    @property
    def full_precision(self) -> bool:
        return self.kind == "state"

    def page_bytes(self, rows_per_page: int, itemsize: int, packed: bool) -> int:
        """Bytes of one page of one layer.

        Args:
            itemsize: of the activations' dtype.
            packed: rows and keys are bytes as the kernels read them, not values: an index key of
                128 values is 68 bytes of FP4.
        """
        if self.kind == "state":
            return rows_per_page * self.width * 4
        if not packed:
            return rows_per_page * self.width * itemsize
        if self.kind == "row":
            return row_layout.page_bytes(rows_per_page, self.width, self.rope)
        return key_layout.page_bytes(rows_per_page, self.width)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Rows that live and die together.

    A sequence may go on from the end of any block of another one with the same beginning: from the
    rows of the groups that keep every row, and the rows of tokens first_needed(end) .. end-1 of the
    others. Pages hold whole parts of blocks, so nobody writes into a page that others read.

    Attributes:
        tokens_per_row: 1, or the compression ratio: row r exists once tokens_per_row * (r + 1)
            tokens have been read.
        rows_per_page: rows of one page.
        keep: None keeps every row; (align, before) keeps the rows of the tokens from
            floor(n / align) * align - before on, where n tokens have been read.
        tail_only: a step writes only the rows that later steps need. These are the rows for any
            number of its tokens that may stay, if it has at most max_verify_tokens, and the rows
            needed at the ends of blocks within it.
        max_verify_tokens: the most tokens of a sequence in a step that verifies drafts: only the
            first is certain to stay.
    """

    name: GroupName
    tokens_per_row: int
    rows_per_page: int
    keep: tuple[int, int] | None
    tail_only: bool
    max_verify_tokens: int = 1
    fields: tuple[CacheField, ...]

    def __post_init__(self) -> None:
        assert self.block_tokens % self.tokens_per_page == 0

    @property
    def tokens_per_page(self) -> int:
        return self.tokens_per_row * self.rows_per_page

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    def first_needed(self, num_tokens: int) -> int:
        """The first token whose row a token at position num_tokens or later can need."""
        if self.keep is None:
            return 0
        align, before = self.keep
        return max(0, num_tokens // align * align - before)

    def forgets_at(self, first_page: int) -> int:
        """The number of tokens from which on the page of this number is not needed."""
        assert self.keep is not None
        align, before = self.keep
        return -(-((first_page + 1) * self.tokens_per_page + before) // align) * align

    def first_written(self, start: int, end: int) -> int:
        """The first token whose row a step over tokens start..end-1 leaves to later steps."""
        if not self.tail_only:
            return start
        settled = end if end - start > self.max_verify_tokens else start + 1
        return max(start, self.first_needed(settled))

    def page_bytes(self, itemsize: int, packed: bool = False) -> int:
        """Bytes of one page over all fields and layers; arguments as CacheField's."""
        return sum(
            f.page_bytes(self.rows_per_page, itemsize, packed) * len(f.layers) for f in self.fields
        )


def cache_spec(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The groups that a model of this configuration needs; the MTP layer included."""
    by_ratio: dict[int, list[int]] = {0: [], 4: [], 128: []}
    for layer, ratio in enumerate(config.compress_ratios):
        by_ratio[ratio].append(layer)
    every, c4, c128 = range(len(config.compress_ratios)), by_ratio[4], by_ratio[128]

    def field(name: FieldName, kind: FieldKind, width: int, layers: Iterable[int]) -> CacheField:
        return CacheField(
            name=name, kind=kind, width=width, rope=config.qk_rope_head_dim, layers=tuple(layers)
        )

    head, index = config.head_dim, config.index_head_dim
    groups = [
        CacheGroup(
            name="window",
            tokens_per_row=1,
            rows_per_page=64,
            keep=(1, config.sliding_window - 1),
            tail_only=False,
            fields=(field("window", "row", head, every),),
        )
    ]
    if c4:
        groups += [
            CacheGroup(
                name="c4",
                tokens_per_row=4,
                rows_per_page=64,
                keep=None,
                tail_only=False,
                fields=(field("c4", "row", head, c4), field("index_keys", "key", index, c4)),
            ),
            CacheGroup(
                name="c4_state",
                tokens_per_row=1,
                rows_per_page=8,
                keep=STATE_KEPT[4],
                tail_only=True,
                max_verify_tokens=config.max_verify_tokens,
                fields=(
                    field("c4_state", "state", 4 * head, c4),
                    field("index_state", "state", 4 * index, c4),
                ),
            ),
        ]
    if c128:
        groups += [
            CacheGroup(
                name="c128",
                tokens_per_row=128,
                rows_per_page=2,
                keep=None,
                tail_only=False,
                fields=(field("c128", "row", head, c128),),
            ),
            CacheGroup(
                name="c128_state",
                tokens_per_row=1,
                rows_per_page=128,
                keep=STATE_KEPT[128],
                tail_only=True,
                max_verify_tokens=config.max_verify_tokens,
                fields=(field("c128_state", "state", 2 * head, c128),),
            ),
        ]
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The pools: field -> layer -> [rows, width], page p's rows from p * rows_per_page on; or, of
    packed rows and keys, uint8 [pages, bytes of a page].
    """

    pools: Mapping[FieldName, Mapping[int, Tensor]]

    def pool(self, field: FieldName, layer: int) -> Tensor:
        return self.pools[field][layer]
