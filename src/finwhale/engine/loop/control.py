"""Pauses an engine, lets it sleep and wake, and changes its weights, between two steps."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

from finwhale.engine.loop.engine import Engine, Stop
from finwhale.engine.ranks.sleep import allocate_memory, check_can_save, free_memory
from finwhale.errors import RequestError
from finwhale.request import Requests

MemoryTag = Literal["weights", "cache"]
"""The memory that `sleep` can free."""

# The stops that only `resume` or `wake` ends.
NEEDS_CALL: frozenset[Stop] = frozenset({"paused", "weights", "cache"})


def pause(engine: Engine, mode: Literal["keep", "abort"] = "keep") -> None:
    """Run no more steps until `resume`. New requests are accepted, and wait.

    Args:
        mode: "keep" lets the running requests wait too; "abort" ends all requests.
    """
    if mode not in ("keep", "abort"):
        raise RequestError(f'mode must be "keep" or "abort", got {mode!r}')
    with engine.lock:
        engine.drain(mode)
        engine.stop("paused")


def resume(engine: Engine) -> None:
    """Continue after `pause`."""
    with engine.lock:
        engine.allow("paused")


def sleep(
    engine: Engine,
    tags: Sequence[MemoryTag] = get_args(MemoryTag),
    *,
    drop_weights: bool = False,
    requests: Literal["recompute", "abort"] = "recompute",
) -> None:
    """Free memory until `wake` (LLM.sleep).

    Raises:
        RequestError: a tag is unknown or asleep, or the engine has no sleep mode.
        ResourceError: the host has too little memory to save a GPU's weights. Nothing changes.
    """
    chosen = _checked_tags(tags)
    if not engine.config.enable_sleep_mode:
        raise RequestError("this engine cannot sleep: it needs the option enable_sleep_mode")
    if requests not in ("recompute", "abort"):
        raise RequestError(f'requests must be "recompute" or "abort", got {requests!r}')
    with engine.lock:
        engine.check_usable()
        if both := engine.stops & set(chosen):
            raise RequestError(f"{min(both)} is already asleep")
        saves = not (drop_weights or "no weights" in engine.stops)
        if saves and "weights" in chosen:
            engine.call_ranks(check_can_save)
        engine.drain(requests)
        engine.reset_prefix_cache()
        _change_ranks(engine, partial(free_memory, tags=chosen, save_weights=saves))
        engine.stop(*chosen)
        if drop_weights and "weights" in chosen:
            engine.stop("no weights")


def wake(engine: Engine, tags: Sequence[MemoryTag] = get_args(MemoryTag)) -> None:
    """Allocate memory again. The engine continues once all memory and all weights are there.

    Raises:
        RequestError: a tag is unknown.
    """
    chosen = _checked_tags(tags)
    with engine.lock:
        engine.check_usable()
        asleep = tuple(tag for tag in chosen if tag in engine.stops)
        _change_ranks(engine, partial(allocate_memory, tags=asleep))
        engine.allow(*asleep)


@contextmanager
def no_steps(engine: Engine) -> Iterator[None]:
    """Run no steps within the context, in which other calls have their turn."""
    with engine.lock:
        engine.drain("keep")
        engine.stop("held")
    try:
        yield
    finally:
        with engine.lock:
            engine.allow("held")


def check_weights_can_change(
    engine: Engine, *, partial: bool = False, requests: Requests = "recompute"
) -> None:
    """Raise RequestError if weights cannot be written now, or `requests` is unknown."""
    if requests not in get_args(Requests):
        raise RequestError(f"requests must be one of {get_args(Requests)}, got {requests!r}")
    if "weights" in engine.stops:
        raise RequestError('the weights are asleep: call wake(["weights"]) before update_weights')
    if partial and "no weights" in engine.stops:
        raise RequestError("the weights were dropped, so an update must have all of them")


def change_weights(
    engine: Engine, work: Callable[[Any], None], requests: Requests, *, partial: bool
) -> None:
    """Call `work`, which replaces the weights or some of them (`partial`), on every rank.

    No step is in flight during the call, and the prefix cache is empty afterwards. An error of
    `work` ends the engine.
    """
    with engine.lock:
        engine.check_usable()
        check_weights_can_change(engine, partial=partial, requests=requests)
        engine.drain(requests)
        _change_ranks(engine, work)
        engine.reset_prefix_cache()
        salt = secrets.token_hex()
        for lane in engine.lanes:
            if lane.scheduler.prefix is not None and lane.scheduler.admission.stored is not None:
                # The store's fingerprint is that of the first weights: share nothing with them.
                lane.scheduler.prefix.set_salt(salt)
        engine.allow("no weights")


def _change_ranks(engine: Engine, work: Callable[[Any], None]) -> None:
    """Call `work` on every rank. An error ends the engine, because it leaves ranks unequal."""
    try:
        engine.executor.call_ranks(work)
    except Exception as error:
        raise engine.die(error) from error


def _checked_tags(tags: Sequence[MemoryTag]) -> tuple[MemoryTag, ...]:
    known: tuple[MemoryTag, ...] = get_args(MemoryTag)
    if isinstance(tags, str) or not tags or not set(tags) <= set(known):
        raise RequestError(f"tags must be some of {known}, got {tags!r}")
    return tuple(tag for tag in known if tag in tags)
