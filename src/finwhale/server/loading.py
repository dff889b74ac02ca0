"""The engine's process: what it loads."""

import logging
from collections.abc import Mapping
from typing import Any

from finwhale.chat.tokenizer import Tokenizer
from finwhale.engine.loop.engine import Engine
from finwhale.llm import LLM
from finwhale.server import logs


def load_engine(path: str | None, log_level: str, options: Mapping[str, Any]) -> Engine:
    """A model's engine, in the process that will run it.

    Args:
        path: a checkpoint's directory; None: the demo model.
        options: keyword arguments of `LLM`.

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

    engine = LLM(path, progress=progress, **options).engine
    if engine.tokenizer is not None:
        warm(engine.tokenizer)
    return engine


def warm(tokenizer: Tokenizer) -> None:
    """Makes what the first request would otherwise wait for."""
    _ = tokenizer.guidance, tokenizer.recipe, tokenizer.words_but_end
