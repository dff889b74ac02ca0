"""Opens an engine on the device of this process, warmed up."""

import time

from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import EngineConfig
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.warmup import warm_up
from finwhale.engine.rank.startup import open_rank
from finwhale.models.protocol import ModelConfig, WeightStream


def start_engine(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: WeightStream,
    tokenizer: Tokenizer | None,
) -> Engine:
    """Open a rank, make its engine and warm it up, so that no request waits for a compilation.

    Raises:
        ResourceError: the device does not exist or has too little memory.
        CheckpointError: the weights do not match the configuration.
    """
    executor = open_rank(config, model_config, weights)
    engine = Engine(config, model_config, executor, tokenizer)
    if executor.description.needs_warm_up:
        began = time.monotonic()
        warm_up(engine)
        engine.start_seconds["warm-up"] = time.monotonic() - began
    executor.ready()
    return engine
