"""Declares the cache state of a DeepSeek-V4.1 sequence for the engine.

Every layer and DSpark stage has window rows. Only the KV sources have entries with index keys: one
for each token (group c1) or for two tokens (c2). A source of the second kind also keeps the
projections of a token whose pair is not complete. Engram keeps the compressed ids of the last
tokens, once for all its layers. At the end of a block no pair is open, so a cached prefix needs
entries and keys alone, unless `exact_prefill` keeps windows and ids, too.
"""

from collections.abc import Mapping
from typing import Any

from finwhale.models.cache import CacheField, CacheGroup, Record, State
from finwhale.models.deepseek_v41.config import DeepseekV41Config
from finwhale.ops.compressor import STATE_KEPT
from finwhale.ops.deepseek_v41.layout import entry, index_key, window_row
from finwhale.ops.paging import BLOCK_TOKENS


def cache_spec(config: DeepseekV41Config) -> tuple[CacheGroup, ...]:
    """The cache groups for a model of this configuration, including its draft head.

    A DSpark stage's block begins at the next token, and each row of the block sees a whole window
    before it. So the window keeps one row more than the model's own layers need.
    """
    C, ratios, engram = config.head_dim, config.compress_ratios, config.engram
    every = tuple(range(len(ratios)))
    c1, c2 = (tuple(i for i in config.kv_source_layer_ids if ratios[i] == r) for r in (1, 2))
    row, key = entry(C), index_key(config.index_head_dim)
    kept = config.sliding_window - (config.dspark is None)
    replay = config.replay_tokens
    groups = [
        _group({"window": window_row(C)}, every, keep=(1, kept), rebuilt=replay),
        # A page is a whole block, so admission counts pages exactly.
        _group({"c1": row, "c1_keys": key}, c1, rows_per_page=BLOCK_TOKENS),
        _group({"c2": row, "c2_keys": key}, c2, tokens_per_row=2, rows_per_page=BLOCK_TOKENS // 2),
        _group(
            {"c2_state": State(2 * C)},
            c2,
            rows_per_page=8,
            keep=STATE_KEPT[2],
            tail_only=True,
            max_verify_tokens=config.max_verify_tokens,
        ),
    ]
    if engram is not None:
        kept, first = engram.max_ngram_size - 1, engram.layer_ids[:1]
        groups.append(_group({"engram_ids": State(1)}, first, keep=(1, kept), rebuilt=replay))
    return tuple(group for group in groups if group.fields[0].layers)


def _group(records: Mapping[str, Record], layers: tuple[int, ...], **options: Any) -> CacheGroup:
    """Each of `layers` has a row in every field. The group has the name of the first field."""
    fields = tuple(CacheField(name=n, record=r, layers=layers) for n, r in records.items())
    options = {"tokens_per_row": 1, "rows_per_page": 64} | options
    return CacheGroup(name=fields[0].name, fields=fields, **options)
