"""Loads the engine in its own process, and shows the progress."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from finwhale.config import EngineConfig
from finwhale.distributed.rank import Placement
from finwhale.progress_bars import loading_bar
from finwhale.server.observe import logs

if TYPE_CHECKING:
    from finwhale.engine.loop.engine import Engine

logger = logging.getLogger(__name__)


def load_engine(
    directory: Path,
    log_level: str,
    log_format: str,
    config: EngineConfig,
    placement: Placement | None,
    open_engine: "Callable[..., Engine]",
    loaded: Callable[[int, int], None],
) -> "Engine":
    """Opens an engine in the process that will run it, and shows the progress. `open_engine` is
    that of loaded_model.py, and `loaded` takes the numbers of bytes read and of all bytes: the
    server passes the rest, and imports no torch.
    """
    logs.configure(log_level, log_format, waits=False)
    with loading_bar() if logs.is_text(log_format) else nullcontext(_log_tenths()) as shown:

        def progress(done: int, total: int) -> None:
            shown(done, total)
            loaded(done, total)

        engine = open_engine(config, directory, progress, placement)
    if engine.tokenizer is not None:
        # Build what the tokenizer builds lazily, so that the first request does not wait for it.
        _ = engine.tokenizer.guidance, engine.tokenizer.recipe, engine.tokenizer.words_but_end
    return engine


def _log_tenths() -> Callable[[int, int], None]:
    """Logs each tenth of the weights."""
    tenth = 0

    def progress(done: int, total: int) -> None:
        nonlocal tenth
        if total and done * 10 // total > tenth:
            tenth = done * 10 // total
            logger.info("loading", extra={"bytes": done, "total_bytes": total})

    return progress
