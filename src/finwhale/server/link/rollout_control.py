"""Carries out the calls of the rollout endpoints in the engine's process, beside its step loop."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from finwhale.distributed.cuda_ipc import IpcHandle
from finwhale.engine.loop import control, weight_updates
from finwhale.engine.loop.control import MemoryTag
from finwhale.engine.loop.engine import Engine
from finwhale.errors import FinwhaleError
from finwhale.request import Requests
from finwhale.server.link.wire import Answered, Call

logger = logging.getLogger(__name__)


class RolloutControl:
    """Carries out the calls of one server, one at a time, on a thread of its own.

    So steps go on while weights are staged.

    Attributes:
        updates: the engine's updates. An update that begins while the engine is paused or sleeps
            takes the weights of several calls, and ends when the engine goes on, or before.
    """

    def __init__(self, engine: Engine, send: Callable[[Answered], None]) -> None:
        self.engine = engine
        self.updates = updates = weight_updates.WeightUpdates(engine)
        self.join, self.leave, self.finish = updates.join, updates.leave, updates.finish
        self._send = send
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._running = ""
        self._cancelled: set[str] = set()

    def submit(self, call: Call) -> None:
        """Carry out a call, and then answer it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()
        self._calls.put(call)

    def cancel(self, call_id: str) -> None:
        """End a call that waits for a trainer, or drop one that has not begun."""
        self._cancelled.add(call_id)
        if self._running == call_id:
            self.updates.cancelled.set()

    def close(self) -> None:
        """End the thread after its present call, which does not wait for a trainer any more."""
        self._calls.put(None)
        self.cancel(self._running)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            self.updates.cancelled.clear()
            self._running = call.call_id
            if call.call_id in self._cancelled:
                self._cancelled.discard(call.call_id)
                continue
            try:
                answer = Answered(call.call_id, call.work(self))
            except FinwhaleError as error:
                answer = Answered(call.call_id, error=error)
            except Exception as error:
                logger.exception("a rollout call failed")
                answer = Answered(call.call_id, error=RuntimeError(type(error).__name__))
            self._send(answer)

    def status(self) -> dict[str, Any]:
        return {
            "is_paused": bool(self.engine.stops),
            "is_sleeping": bool(self.engine.stops & {"weights", "cache", "no weights"}),
            "weight_version": self.updates.version,
            "world_size": self.engine.executor.description.num_ranks,
        }

    def pause(self, *, abort: bool) -> None:
        control.pause(self.engine, "abort" if abort else "keep")

    def resume(self) -> None:
        """Continue; first, finish an update that has begun. If that fails, stay paused."""
        if self.updates.begun:
            self.updates.finish()
        control.resume(self.engine)

    def sleep(self, tags: tuple[MemoryTag, ...], *, drop_weights: bool, abort: bool) -> None:
        requests: Any = "abort" if abort else "recompute"
        control.sleep(self.engine, tags, drop_weights=drop_weights, requests=requests)

    def wake(self, tags: tuple[MemoryTag, ...]) -> None:
        """Allocate memory again. Finish an update that has begun, unless the engine is paused or
        still sleeps.
        """
        control.wake(self.engine, tags)
        if self.updates.begun and not self.engine.stops & control.NEEDS_CALL:
            self.updates.finish()

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def begin(self, *, partial: bool) -> None:
        """Begin an update, and drop one that has begun: its trainer may be gone."""
        self.updates.discard()
        self.updates.begin(partial=partial)

    def update(
        self, handles: Mapping[str, Any] | None, version: str | None, group: str, **tensors: Any
    ) -> None:
        """Add weights to the update that has begun, or make an update of them. They are in buffers
        with these handles (as JSON objects); None: a trainer broadcasts them in a group.
        """
        source: weight_updates.WeightsSource
        if handles is None:
            source = weight_updates.BroadcastTensors(**tensors, group_name=group)
        else:
            found = {gpu: IpcHandle.from_json(one) for gpu, one in handles.items()}
            source = weight_updates.SharedTensors(**tensors, handles=found)
        if not self.updates.begun:
            if not self.engine.stops & control.NEEDS_CALL:
                self.updates.update(source, version=version)
                return
            self.updates.begin()
        self.updates.add(source, version=version)

    def update_from_directory(self, path: str, *, version: str | None, abort: bool) -> None:
        requests: Requests = "abort" if abort else "recompute"
        self.updates.discard()
        self.updates.update(path, version=version, requests=requests)
