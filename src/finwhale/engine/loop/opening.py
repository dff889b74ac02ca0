"""Opens an engine on one or several devices, warmed up."""

import time
from contextlib import ExitStack
from dataclasses import replace

from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import EngineConfig
from finwhale.distributed.rank import Placement
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.warmup import warm_up
from finwhale.engine.start.startup import open_executor
from finwhale.engine.store.directory import salt_of
from finwhale.engine.store.opening import attach_store, parse
from finwhale.extras import import_extra
from finwhale.models.protocol import ModelConfig
from finwhale.models.weight_sources import Weights


def start_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: Weights,
    tokenizer: Tokenizer | None,
    placement: Placement | None = None,
) -> Engine:
    """Open an engine with its prefix store and its events, and warm it up, so that no request waits
    for a compilation.

    Args:
        model_config: the checkpoint's. An engine that does not draft drops a DSpark head.
        placement: that of this process, which has rank 0; None: no launcher has placed ranks.

    Raises:
        ResourceError: a device does not exist or has too little memory.
        CheckpointError: the weights do not match the configuration.
    """
    if config.prefix_store is not None:
        directory, _ = parse(config.prefix_store)
        config = replace(config, prefix_salt=config.prefix_salt or salt_of(directory))
    if config.exact_prefill:
        model_config = model_config.with_exact_prefill()
    unused_head = model_config.draft_head if config.draft_tokens == 0 else None
    if unused_head == "dspark":
        # The head has three whole layers, and every forward would compute its context.
        model_config = model_config.without_draft_head()
        weights = replace(weights, config=model_config)
    with ExitStack() as failed:
        if config.kv_events is not None:
            events = import_extra("finwhale.engine.loop.kv_events").KvEvents(config.kv_events)
            failed.callback(events.close)
        executor = open_executor(config, model_config, weights, placement)
        engine = Engine(config, model_config, executor, tokenizer)
        failed.callback(engine.close)
        engine.unused_draft_head = unused_head
        if executor.description.needs_warm_up:
            began = time.monotonic()
            warm_up(engine)
            engine.start_seconds["warm-up"] = time.monotonic() - began
        # After the warm-up, whose requests are not worth saving.
        schedulers = [lane.scheduler for lane in engine.lanes]
        attach_store(config, model_config, weights.checkpoint, executor, schedulers)
        executor.mark_ready()
        failed.pop_all()
    if config.kv_events is not None:
        assert engine.scheduler.prefix is not None
        engine.scheduler.prefix.events = events
    return engine
