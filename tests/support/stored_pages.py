"""Requests of an engine with a prefix store, and digests of the pages that it holds."""

import hashlib
import time
from functools import partial

from finwhale import SamplingParams
from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.prefix_index import State
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.store.transfers import StoreTransfers
from finwhale.request import RequestOutput


def run(engine: Engine, prompt: list[int], params: SamplingParams) -> RequestOutput:
    """Run one request alone."""
    result = engine.add_request(f"run-{time.monotonic_ns()}", prompt, params)
    while not result.finished:
        engine.step()
    return result


def saved(engine: Engine) -> None:
    """Wait until the store has written all that it was given."""
    stored = engine.scheduler.admission.stored
    assert stored is not None
    assert isinstance(stored._transfers, StoreTransfers)
    while stored.busy or stored._transfers._files:
        engine.step()


def digests(engine: Engine, prompt: list[int]) -> list[str]:
    """Digests of the cached blocks that a request with this prompt would reuse, and of the state
    from which it would resume. Fails if two ranks have different digests.
    """
    prefix = engine.scheduler.prefix
    assert prefix is not None
    keys: list[bytes] = []
    prefix.extend_keys(keys, prompt)
    blocks, resumable = prefix.match(keys)
    state = blocks[resumable - 1].state
    assert state is not None
    parts = [block.pages for block in blocks[:resumable]] + [state]
    first, *others = engine.call_ranks(partial(_digests, parts))
    assert all(other == first for other in others)
    return first


def _digests(parts: list[State], executor: LocalExecutor) -> list[str]:
    rows, found = executor.runner.cache.pages, []
    for pages in parts:
        content = hashlib.blake2b(digest_size=16)
        for group, numbers in sorted(pages.items()):
            for number in numbers:
                content.update(rows[group][number].cpu().numpy().tobytes())
        found.append(content.hexdigest())
    return found
