"""Declares the cache state of a DeepSeek-V4 sequence for the engine.

There are five groups: the window's rows, C4 entries with their indexer keys, C128 entries, and the
states of both compressors.
"""

from collections.abc import Iterable

from finwhale.models.cache import CacheField, CacheGroup, Record, State
from finwhale.models.deepseek_v4.config import DeepseekV4Config
from finwhale.ops.attention.layout import RopeRow
from finwhale.ops.compressor import STATE_KEPT
from finwhale.ops.indexer.layout import IndexKey


def cache_spec(config: DeepseekV4Config) -> tuple[CacheGroup, ...]:
    """The cache groups for a model of this configuration, including its draft head.

    A DSpark stage keeps its context rows in the window's pages, like any other layer. Its block
    begins at the next token, and each row of the block sees a whole window before it. So the window
    keeps one row more than the model's own layers need.
    """
    by_ratio: dict[int, list[int]] = {0: [], 4: [], 128: []}
    for layer, ratio in enumerate(config.compress_ratios):
        by_ratio[ratio].append(layer)
    every, c4, c128 = range(len(config.compress_ratios)), by_ratio[4], by_ratio[128]

    def field(name: str, record: Record, layers: Iterable[int]) -> CacheField:
        return CacheField(name=name, record=record, layers=tuple(layers))

    head, index, verified = config.head_dim, config.index_head_dim, config.max_verify_tokens
    row = RopeRow(head, config.qk_rope_head_dim)
    groups = [
        CacheGroup(
            name="window",
            tokens_per_row=1,
            rows_per_page=64,
            keep=(1, config.sliding_window - (config.dspark is None)),
            fields=(field("window", row, every),),
        )
    ]
    if c4:
        entries = field("c4", row, c4), field("index_keys", IndexKey(index), c4)
        states = (
            field("c4_state", State(4 * head), c4),
            field("index_state", State(4 * index), c4),
        )
        groups += [_entries("c4", 4, 64, *entries), _states("c4_state", 4, 8, verified, *states)]
    if c128:
        state = field("c128_state", State(2 * head), c128)
        groups += [
            _entries("c128", 128, 2, field("c128", row, c128)),
            _states("c128_state", 128, 128, verified, state),
        ]
    return tuple(groups)


def _entries(name: str, ratio: int, rows_per_page: int, *fields: CacheField) -> CacheGroup:
    """Compressed entries, which are all kept."""
    return CacheGroup(name=name, tokens_per_row=ratio, rows_per_page=rows_per_page, fields=fields)


def _states(
    name: str, ratio: int, rows_per_page: int, max_verify_tokens: int, *fields: CacheField
) -> CacheGroup:
    """The states of a compressor."""
    return CacheGroup(
        name=name,
        tokens_per_row=1,
        rows_per_page=rows_per_page,
        keep=STATE_KEPT[ratio],
        tail_only=True,
        max_verify_tokens=max_verify_tokens,
        fields=fields,
    )
