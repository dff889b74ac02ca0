"""What state a sequence keeps, as a declaration that the engine allocates pages from.

Five kinds of one description: window kv, C4 entries, C128 entries, indexer keys, and the state of
the compressors. Rows of one group share their pages and their block table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from finwhale.models.deepseek_v4.config import ModelConfig

GroupName = Literal["window", "c4", "c128", "c4_state", "c128_state"]
FieldName = Literal["window", "c4", "index_keys", "c128", "c4_state", "index_state", "c128_state"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheField:
    """One kind of row, kept by some layers.

    Attributes:
        width: values a row.
        full_precision: float32 rows whatever the dtype of the activations.
        layers: the layers that keep it; the MTP layer's number follows the last layer's.
    """

    name: FieldName
    width: int
    full_precision: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Rows that live and die together.

    Attributes:
        tokens_per_row: 1, or the compression ratio: row r exists once tokens_per_row * (r + 1)
            tokens have been read.
        rows_per_page: rows of one page.
        keep: None keeps every row; (align, before) keeps the rows of the tokens from
            floor(n / align) * align - before on, where n tokens have been read.
        tail_only: a step writes only the rows that it leaves to later steps.
    """

    name: GroupName
    tokens_per_row: int
    rows_per_page: int
    keep: tuple[int, int] | None
    tail_only: bool
    fields: tuple[CacheField, ...]

    @property
    def tokens_per_page(self) -> int:
        return self.tokens_per_row * self.rows_per_page

    def first_needed(self, num_tokens: int) -> int:
        """The first token whose row a token at position num_tokens or later can need."""
        if self.keep is None:
            return 0
        align, before = self.keep
        return max(0, num_tokens // align * align - before)

    def first_written(self, start: int, end: int) -> int:
        """The first token whose row a step over tokens start..end-1 writes."""
        return max(start, self.first_needed(end)) if self.tail_only else start

    def page_bytes(self, itemsize: int) -> int:
        """Bytes of one page over all fields and layers; itemsize of the activations' dtype."""
        row = sum(
            f.width * (4 if f.full_precision else itemsize) * len(f.layers) for f in self.fields
        )
        return row * self.rows_per_page


def cache_spec(config: ModelConfig) -> tuple[CacheGroup, ...]:
    """The groups that a model of this configuration needs; the MTP layer included."""
    by_ratio: dict[int, list[int]] = {0: [], 4: [], 128: []}
    for layer, ratio in enumerate(config.compress_ratios):
        by_ratio[ratio].append(layer)
    every, c4, c128 = range(len(config.compress_ratios)), by_ratio[4], by_ratio[128]

    def field(
        name: FieldName, width: int, layers: Iterable[int], full_precision: bool = False
    ) -> CacheField:
        return CacheField(
            name=name, width=width, full_precision=full_precision, layers=tuple(layers)
        )

    head, index = config.head_dim, config.index_head_dim
    groups = [
        CacheGroup(
            name="window",
            tokens_per_row=1,
            rows_per_page=64,
            keep=(1, config.sliding_window - 1),
            tail_only=False,
            fields=(field("window", head, every),),
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
                fields=(field("c4", head, c4), field("index_keys", index, c4)),
            ),
            CacheGroup(
                name="c4_state",
                tokens_per_row=1,
                rows_per_page=8,
                keep=(4, 4),
                tail_only=True,
                fields=(
                    field("c4_state", 4 * head, c4, True),
                    field("index_state", 4 * index, c4, True),
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
                fields=(field("c128", head, c128),),
            ),
            CacheGroup(
                name="c128_state",
                tokens_per_row=1,
                rows_per_page=128,
                keep=(128, 0),
                tail_only=True,
                fields=(field("c128_state", 2 * head, c128, True),),
            ),
        ]
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The pools of rows: field -> layer -> [rows, width]. Page p holds rows p*rows_per_page on."""

    pools: Mapping[FieldName, Mapping[int, Tensor]]

    def pool(self, field: FieldName, layer: int) -> Tensor:
        return self.pools[field][layer]
