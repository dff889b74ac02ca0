"""The engine's state as the server reports it: the one place that reads it from the engine."""

from finwhale.engine.engine import Engine
from finwhale.server.wire import EngineStats


def engine_stats(engine: Engine) -> EngineStats:
    scheduler = engine.scheduler
    counts = scheduler.counts
    found = engine.metrics()
    return EngineStats(
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        pages={
            name: (pool.num_pages - 1 - pool.num_free, pool.num_pages - 1)
            for name, pool in scheduler.pages.pools.items()
        },
        counters={
            "prompt_tokens": counts.prompt_tokens,
            "prefix_hit_tokens": counts.cached_tokens,
            "preemptions": counts.preemptions,
            "verifications": found.verifications,
        },
        drafts=list(zip(found.drafts_proposed, found.drafts_accepted, strict=True)),
        draft_tokens=found.draft_tokens,
    )
