"""Declares the cache state of a DeepSeek-V4.1 sequence for the engine.

Every layer and DSpark stage has window rows. Only the KV sources have entries with index keys: one
for each token (group c1) or for two tokens (c2). A source of the second kind also keeps the
projections of a token whose pair is not complete.
"""

from finwhale.models.cache import CacheField, CacheGroup, Record, State
from finwhale.models.deepseek_v41.config import GROUP, DeepseekV41Config
from finwhale.ops.attention.layout import ScaledRow
from finwhale.ops.indexer.layout import IndexKey

ENTRY_GROUP = 16
ROWS_PER_PAGE = 64


def cache_spec(config: DeepseekV41Config) -> tuple[CacheGroup, ...]:
    """The cache groups for a model of this configuration, including its draft head.

    A DSpark stage's block begins at the next token, and each row of the block sees a whole window
    before it. So the window keeps one row more than the model's own layers need.
    """
    C, J = config.head_dim, config.index_head_dim
    row, entry = ScaledRow(C, 8, GROUP), ScaledRow(C, 4, ENTRY_GROUP)
    every = tuple(range(len(config.compress_ratios)))
    groups = [
        CacheGroup(
            name="window",
            tokens_per_row=1,
            rows_per_page=ROWS_PER_PAGE,
            keep=(1, config.sliding_window - (config.dspark is None)),
            fields=(CacheField(name="window", record=row, layers=every),),
        )
    ]
    for ratio in (1, 2):
        ids = config.kv_source_layer_ids
        sources = tuple(i for i in ids if config.compress_ratios[i] == ratio)
        if sources:
            records: dict[str, Record] = {f"c{ratio}": entry, f"c{ratio}_keys": IndexKey(J)}
            groups.append(
                CacheGroup(
                    name=f"c{ratio}",
                    tokens_per_row=ratio,
                    rows_per_page=ROWS_PER_PAGE,
                    fields=_fields(records, sources),
                )
            )
        if sources and ratio == 2:
            groups.append(
                CacheGroup(
                    name="c2_state",
                    tokens_per_row=1,
                    rows_per_page=8,
                    keep=(2, 0),
                    tail_only=True,
                    max_verify_tokens=config.max_verify_tokens,
                    fields=_fields({"c2_state": State(2 * C)}, sources),
                )
            )
    return tuple(groups)


def _fields(records: dict[str, Record], layers: tuple[int, ...]) -> tuple[CacheField, ...]:
    return tuple(CacheField(name=n, record=r, layers=layers) for n, r in records.items())
