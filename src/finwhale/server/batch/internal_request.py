"""Calls the HTTP application from inside its process, so that batches get the answers of HTTP."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from finwhale.server.keys import ApiKey


@dataclass(slots=True)
class InternalAnswer:
    """The status, headers and whole body of an answer."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


async def post(app: ASGIApp, path: str, body: bytes, key: ApiKey | None) -> InternalAnswer:
    """Posts a JSON body. Host, key and the number of requests at once are not checked again.

    The state of the scope, where no client can put anything, has the API key of the batch (None:
    the server needs none), and whose shares the request takes: without keys, all batches are one
    user.
    """
    answer, parts = InternalAnswer(), [body]
    gone = asyncio.Event()  # never set: this client stays

    async def receive() -> Message:
        if not parts:
            await gone.wait()
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode(): v.decode("latin-1") for k, v in message["headers"]}
        else:
            answer.body += message.get("body", b"")

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
        "state": {"key": key, "user": "batches" if key is None else key.identity},
    }
    await app(scope, receive, send)
    return answer
