"""Opens the prefix store of an engine."""

import logging
import mmap
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from finwhale.checkpoint.reader import Checkpoint
from finwhale.config import EngineConfig
from finwhale.engine.plan.executor import Executor
from finwhale.engine.plan.pages import PageManager, pages_at_block_end
from finwhale.engine.plan.prefix_store import PrefixStore, RecordKind, StoreCounts, StoreName
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.stored_prefixes import MOVING_STATES, StoredPrefixes
from finwhale.engine.ranks.lane_ranks import LaneExecutor, lane_executors
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import first_rank
from finwhale.engine.steps.page_copies import HEADER_BYTES, MARK_BYTES
from finwhale.engine.store.directory import DirectoryStore
from finwhale.engine.store.fingerprint import describe, fingerprint
from finwhale.engine.store.peers import open_peers
from finwhale.engine.store.transfers import StoreTransfers
from finwhale.errors import FinwhaleError
from finwhale.models.protocol import ModelConfig

UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
SIZE = re.compile(r":([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?b?)$", re.IGNORECASE)
# The staging buffer holds blocks of this many bytes together, but at least FEWEST_BLOCKS.
STAGING_BYTES, FEWEST_BLOCKS = 2**29, 16
CPU_STAGING_BYTES = 2**25
ALIGN = 4096
EXAMPLE_RATE = 10_000  # tokens per second, of which the log says what they write

logger = logging.getLogger(__name__)


def parse(option: str) -> tuple[Path, int | None]:
    """The directory of `DIR[:SIZE]`, and its limit in bytes; None: no limit.

    Raises:
        FinwhaleError: the option is empty, or its size is 0.
    """
    found = SIZE.search(option)
    name = option[: found.start()] if found else option
    if not name:
        raise FinwhaleError(
            f"prefix_store must be DIR or DIR:SIZE (/data/kv:500GB), got {option!r}"
        )
    path = Path(name).expanduser()
    if found is None:
        return path, None
    unit = found[2].lower()
    limit = int(float(found[1]) * UNITS[unit if unit in UNITS else unit + "b"])
    if not limit:
        raise FinwhaleError(f"the size of a prefix store must be more than 0, got {option!r}")
    return path, limit


def attach_store(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint | None,
    executor: Executor,
    schedulers: Sequence[Scheduler],
) -> None:
    """Let the lanes' schedulers save and load prefixes, if the options name a store.

    Args:
        checkpoint: that of the engine's weights; None: they are random.

    Raises:
        FinwhaleError: ranks are on several hosts.
        ResourceError: the directory cannot be used, or the host lacks memory.
    """
    if config.prefix_store is None or schedulers[0].prefix is None:
        return
    path, limit = parse(config.prefix_store)
    runner = first_rank(executor).runner
    page_bytes = {name: pages.shape[1] for name, pages in runner.cache.pages.items()}
    about = describe(
        *(config, model_config, checkpoint, executor.description, page_bytes),
        *(runner.model.dtype, runner.ops.capabilities.packages),
    )
    name = StoreName(str(path), fingerprint(about), about)
    sizes = record_bytes(schedulers[0].pages, page_bytes)
    counts = [StoreCounts() for _ in schedulers]
    own = DirectoryStore(path, name.fingerprint, about, limit, counts[0])
    store = open_peers(config, own, about, sizes)
    for number, lane in enumerate(lane_executors(executor)):
        scheduler = schedulers[number]
        assert scheduler.prefix is not None
        # The first lane is the last one to close.
        shared = _Shared(store) if number else store
        scheduler.admission.stored = StoredPrefixes(
            scheduler.pages,
            scheduler.prefix,
            open_transfers(shared, lane, sizes, page_bytes, counts[number]),
            saves_all=config.prefix_store_saves == "all",
            name=name,
        )
    token_bytes = sizes["block"] / schedulers[0].prefix.block_tokens
    logger.info(
        "prefixes are kept in %s (%s): %s bytes a token, so prompts of %s new tokens per second "
        "write %.1f TB a day",
        *(path, f"at most {limit:,} bytes" if limit else "without a limit"),
        *(f"{token_bytes:,.0f}", f"{EXAMPLE_RATE:,}", token_bytes * EXAMPLE_RATE * 86400 / 1e12),
    )


def record_bytes(pages: PageManager, page_bytes: Mapping[str, int]) -> dict[RecordKind, int]:
    """Bytes of a record, by kind."""
    return {
        "block": sum(group.pages_of_block * page_bytes[group.name] for group in pages.full_groups),
        "state": sum(pages_at_block_end(g) * page_bytes[g.name] for g in pages.windowed_groups),
    }


def open_transfers(
    store: PrefixStore,
    executor: Executor | LaneExecutor,
    sizes: Mapping[RecordKind, int],
    page_bytes: Mapping[str, int],
    counts: StoreCounts,
) -> StoreTransfers:
    """Give all ranks of a lane a staging buffer, and move the store's records through it."""
    block, state = _aligned(sizes["block"]), _aligned(sizes["state"])
    on_gpu = executor.description.device != "cpu"
    blocks = max(FEWEST_BLOCKS, (STAGING_BYTES if on_gpu else CPU_STAGING_BYTES) // block)
    first = HEADER_BYTES + blocks * block
    slots: dict[RecordKind, range] = {
        "block": range(HEADER_BYTES, first, block),
        "state": range(first, first + 2 * MOVING_STATES * state, state or 1),
    }
    # The memory has no name, so it is freed with the last process that maps it.
    file = os.memfd_create("finwhale-prefixes")
    try:
        os.ftruncate(file, first + 2 * MOVING_STATES * state)
        buffer = mmap.mmap(file, 0)
        mark = secrets.token_bytes(MARK_BYTES)
        buffer[HEADER_BYTES - MARK_BYTES : HEADER_BYTES] = mark
        name = f"/proc/{os.getpid()}/fd/{file}"
        if isinstance(executor, LaneExecutor):
            executor.attach_staging(name, mark, memoryview(buffer))
        else:
            executor.call_ranks(partial(LocalExecutor.attach_staging, file=name, mark=mark))
    finally:
        os.close(file)
    return StoreTransfers(store, executor.copy_pages, memoryview(buffer), page_bytes, slots, counts)


class _Shared:
    """A store that another lane closes."""

    def __init__(self, store: PrefixStore) -> None:
        self.contains, self.read, self.write = store.contains, store.read, store.write

    def close(self) -> None:
        pass


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
