"""Runs the batches of a server after its other requests, and continues them after a restart."""

import asyncio
import contextlib
import logging
import time
from typing import Any

from starlette.applications import Starlette

from finwhale.errors import EngineDeadError, FinwhaleError
from finwhale.server.batch.lines import ENVELOPE_BYTES, Scan, scan
from finwhale.server.batch.results import ResultFile
from finwhale.server.batch.runner import MAX_HELD_BYTES, BatchJob, run, run_expired
from finwhale.server.batch.store import (
    Owner,
    Store,
    StoredBatch,
    StoredFile,
    new_id,
    no_space,
    owner_name,
)
from finwhale.server.edge.bodies import max_items
from finwhale.server.edge.room import Room
from finwhale.server.errors import ApiError, StoppingError
from finwhale.server.keys import ApiKey
from finwhale.server.state import BATCH_WINDOW_S, ServerState

logger = logging.getLogger(__name__)


class Batches:
    """The batches of all owners. Each owner has one batch at a time that runs."""

    def __init__(self, app: Starlette, state: ServerState, store: Store) -> None:
        self.store = store
        self._app, self._state = app, state
        self._held = Room(lambda: MAX_HELD_BYTES)
        self._alone = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # The batches that run, each with the task of its lines.
        self._running: dict[str, asyncio.Task[None] | None] = {}
        self._closed = False
        # One scan at a time, which pauses half of the time, leaves time to serve requests.
        self._scanning = asyncio.Semaphore(1)

    def start(self) -> None:
        """Continues the batches that an earlier server has not finished."""
        keys: list[ApiKey | None] = [*self._state.keys] or [None]
        for name, key in {owner_name(key): key for key in keys}.items():
            if name in self.store.owners:
                self._work(key)

    async def close(self) -> None:
        """Stops all batches; the next server continues them."""
        self._closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def create(
        self, key: ApiKey | None, file_id: str, endpoint: str, metadata: dict[str, str] | None
    ) -> StoredBatch:
        """Raises ApiError (404, 429, 503: the model is loading)."""
        _ = self._state.ready
        owner = self.store.owner(key)
        owner.find_file(file_id)
        owner.make_room(self._state.config.max_files)
        expires_at = int(time.time() + BATCH_WINDOW_S)
        batch = StoredBatch(new_id("batch_"), endpoint, file_id, expires_at, metadata)
        try:
            owner.save(batch)
        except OSError as error:
            raise no_space(error) from error
        self._work(key)
        return batch

    def cancel(self, key: ApiKey | None, batch_id: str) -> StoredBatch:
        """Stops a batch, and keeps its results so far, even if this cannot be saved. Raises
        ApiError: 404, 409."""
        owner = self.store.owner(key)
        batch = owner.find_batch(batch_id)
        if batch.ended:
            raise ApiError(409, f"the batch has ended: {batch.status}", code="batch_ended")
        batch.enter("cancelling")
        if batch_id in self._running:
            if (running := self._running[batch_id]) is not None:
                running.cancel()
        elif "in_progress_at" not in batch.times:
            batch.enter("cancelled")
        _save_if_possible(owner, batch)
        return batch

    def _work(self, key: ApiKey | None) -> None:
        """Runs an owner's batches in a task, unless they run already."""
        name = owner_name(key)
        if not self._closed and (name not in self._tasks or self._tasks[name].done()):
            self._tasks[name] = asyncio.ensure_future(self._run_all(key, self.store.owner(key)))

    async def _run_all(self, key: ApiKey | None, owner: Owner) -> None:
        while waiting := [batch for batch in owner.batches.values() if not batch.ended]:
            batch = waiting[0]
            self._running[batch.id] = None
            try:
                await self._run(key, owner, batch)
            except (EngineDeadError, StoppingError):
                return  # the next server continues
            except (FinwhaleError, OSError) as error:
                logger.error("a batch failed", extra={"batch": batch.id, "reason": str(error)})
                self._fail(owner, batch, "server_error", "the server could not run the batch")
            finally:
                del self._running[batch.id]
            logger.info("batch", extra={"batch": batch.id, "status": batch.status,
                                        "lines": batch.total, "failed": batch.failed})  # fmt: skip

    async def _run(self, key: ApiKey | None, owner: Owner, batch: StoredBatch) -> None:
        state = self._state
        max_bytes = state.max_body_bytes + ENVELOPE_BYTES
        items = max_items(state.max_model_len)
        source = owner.content(batch.input_file_id)
        async with self._scanning:
            found = await asyncio.to_thread(scan, source, max_bytes, items, shares_cpu=True)
        if self._is_wrong(owner, batch, found):
            return
        batch.total = found.num_lines
        with contextlib.ExitStack() as opened:
            good, bad = (
                opened.enter_context(contextlib.closing(ResultFile(owner.content(file_id))))
                for file_id in (batch.good_file_id, batch.bad_file_id)
            )
            at_once = state.max_batch_sequences + 1
            if key is not None and key.concurrent is not None:
                at_once = min(at_once, key.concurrent)
            url, begun = batch.endpoint, owner.begun(batch)
            job = BatchJob(
                source, found, max_bytes, items, url, good, bad, begun, at_once, key, self._alone
            )
            await asyncio.to_thread(job.recover)
            ended = await self._run_job(owner, batch, job)
        self._finish(owner, batch, ended)

    def _is_wrong(self, owner: Owner, batch: StoredBatch, found: Scan) -> bool:
        """Whether the whole input is refused."""
        if found.duplicate is not None:
            first, second = found.duplicate
            message = f"lines {first} and {second} have the same custom_id"
            self._fail(owner, batch, "duplicate_custom_id", message, second)
        elif not found.num_lines:
            self._fail(owner, batch, "empty_file", "the input file has no line")
        return batch.ended

    async def _run_job(self, owner: Owner, batch: StoredBatch, job: BatchJob) -> str:
        """Runs lines until the batch has ended. Returns its last status."""

        def count() -> None:
            batch.completed, batch.failed = job.counts["completed"], job.counts["failed"]

        count()
        job.on_result = count
        if batch.status == "cancelling":
            return "cancelled"
        batch.enter("in_progress")
        owner.save(batch)
        running = self._running[batch.id] = asyncio.create_task(run(self._app, job, self._held))
        try:
            await asyncio.wait((running,), timeout=max(0.0, batch.expires_at - time.time()))
            if running.done() and not running.cancelled():
                running.result()
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(running, return_exceptions=True)
        if batch.status == "cancelling":
            return "cancelled"
        if running.cancelled():
            message = "the request could not run before the completion window ended"
            await asyncio.to_thread(run_expired, job, "batch_expired", message)
            return "expired"
        return "completed"

    def _finish(self, owner: Owner, batch: StoredBatch, ended: str) -> None:
        """Makes files of the results, and ends the batch."""
        if ended == "completed":
            batch.enter("finalizing")
            owner.save(batch)
        names = {batch.good_file_id: "output", batch.bad_file_id: "error"}
        for file_id, name in names.items():
            size = owner.content(file_id).stat().st_size
            if size:
                filename = f"{batch.id}_{name}.jsonl"
                owner.add(StoredFile(file_id, size, filename, "batch_output"))
            else:
                owner.content(file_id).unlink()
        batch.files = [file_id for file_id in names if file_id in owner.files]
        batch.enter(ended)
        owner.save(batch)

    def _fail(
        self, owner: Owner, batch: StoredBatch, code: str, message: str, line: int | None = None
    ) -> None:
        """Ends a batch with an error, and removes its results unless they are files already.

        If the disk is full, this makes room. If the batch still cannot be saved, it has failed for
        this server, and the next server runs it again.
        """
        error: dict[str, Any] = {"code": code, "message": message, "line": line, "param": None}
        batch.errors = [error]
        batch.enter("failed")
        results = (batch.good_file_id, batch.bad_file_id)
        batch.files = [file_id for file_id in results if file_id in owner.files]
        for file_id in results:
            if file_id not in owner.files:
                with contextlib.suppress(OSError):
                    owner.content(file_id).unlink(missing_ok=True)
        _save_if_possible(owner, batch)


def _save_if_possible(owner: Owner, batch: StoredBatch) -> None:
    """Saves a batch that has stopped. If that fails, it has stopped for this server alone."""
    try:
        owner.save(batch)
    except OSError as error:
        extra = {"batch": batch.id, "reason": str(error)}
        logger.error("cannot save a batch that has stopped", extra=extra)
