"""Server-sent events; work that ends when the client disconnects."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")


def event(data: str, name: str | None = None) -> bytes:
    """One event. `data` must have no line breaks; JSON has none."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data}\n\n".encode()


COMMENT = b": waiting\n\n"  # an event without a meaning
NO_BUFFER = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Stream(Response):
    """A response that streams pieces. It closes its source when the client disconnects."""

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        media_type: str,
        headers: Mapping[str, str] | None = None,
        *,
        ping: bytes = COMMENT,
        ping_interval_s: float = 0.0,
    ) -> None:
        """
        Args:
            source: the pieces; those of events may end inside one.
            ping: an event that the client receives after a silence of `ping_interval_s`, so that
                no proxy takes the connection for a dead one. 0: never.
        """
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._source = source
        self._ping, self._interval_s = ping, ping_interval_s
        self._sending = asyncio.Lock()
        self._last_piece = (time.monotonic(), b"\n\n")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        try:
            if not await _or_disconnect(sending, receive):
                scope["state"]["client_gone"] = True
        finally:
            await end(sending)
            await self._source.aclose()

    async def _send(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": self.status_code}
        await send({**head, "headers": self.raw_headers})
        pinging = asyncio.ensure_future(self._ping_when_silent(send))
        try:
            async for piece in self._source:
                async with self._sending:
                    await self._send_piece(send, piece)
        finally:
            await end(pinging)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, send: Send, piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        self._last_piece = (time.monotonic(), piece)

    async def _ping_when_silent(self, send: Send) -> None:
        wait_s = self._interval_s
        while self._interval_s:
            await asyncio.sleep(wait_s)
            async with self._sending:
                sent, piece = self._last_piece
                wait_s = sent + self._interval_s - time.monotonic()
                if wait_s <= 0:
                    if piece.endswith(b"\n\n"):  # not inside an event
                        await self._send_piece(send, self._ping)
                    wait_s = self._interval_s


class ClientGone(Exception):
    """The client has closed its connection."""


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work`. When the client disconnects, cancels it and raises ClientGone."""
    working = asyncio.ensure_future(work)
    try:
        if not await _or_disconnect(working, request.receive):
            raise ClientGone
        return working.result()
    finally:
        if not working.done():
            await end(working)


async def _or_disconnect(working: asyncio.Future[Any], receive: Receive) -> bool:
    """Waits until `working` is done (returns True) or the client disconnects (False)."""
    watching = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        await end(watching)


async def end(task: asyncio.Future[Any]) -> None:
    """Cancels a task, and waits for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await task


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
