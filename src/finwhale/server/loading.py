"""What the engine's process loads."""

import logging

from finwhale.chat.tokenizer import Tokenizer
from finwhale.config import EngineConfig
from finwhale.distributed.hosts import Place
from finwhale.engine.loop.engine import Engine
from finwhale.llm import open_engine
from finwhale.server import logs


def load_engine(
    path: str | None, log_level: str, config: EngineConfig, place: Place | None = None
) -> Engine:
    """Opens an engine in the process that will run it, and logs the progress.

    Args:
        path: directory of a checkpoint; None: the demo model.
        place: of this process, which has rank 0; None: no launcher has placed ranks.

    Raises:
        CheckpointError, ResourceError, FinwhaleError: as `LLM` does.
    """
    logs.configure(log_level)
    logger = logging.getLogger(__name__)
    tenth = 0

    def progress(done: int, total: int) -> None:
        nonlocal tenth
        if total and done * 10 // total > tenth:
            tenth = done * 10 // total
            logger.info("loading", extra={"bytes": done, "total_bytes": total})

    engine = open_engine(config, path, progress, place)
    if engine.tokenizer is not None:
        warm(engine.tokenizer)
    return engine


def warm(tokenizer: Tokenizer) -> None:
    """Builds what the tokenizer builds lazily, so that the first request does not wait for it."""
    _ = tokenizer.guidance, tokenizer.recipe, tokenizer.words_but_end
