"""/v1/responses and /v1/messages: protocols whose events have names and one answer."""

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from finwhale.server.conversation import Answers, Turn
from finwhale.server.logs import RequestLog
from finwhale.server.sse import event
from finwhale.server.state import ServerState


def new_id(kind: str) -> str:
    """`kind`: "resp" or "msg"."""
    return f"{kind}_{uuid.uuid4().hex}"


async def complete(state: ServerState, turn: Turn, log: RequestLog) -> dict[str, Any]:
    """The whole answer at once."""
    answers = Answers(state, turn, log)
    async for _ in answers.run():
        pass
    (stream,) = answers.streams
    assert stream is not None
    response: dict[str, Any] = json.loads(stream.response())
    return response


async def stream(state: ServerState, turn: Turn, log: RequestLog) -> AsyncGenerator[bytes, None]:
    """The answer's events; the first item, empty, says that the engine has taken the request."""
    async for index, events in Answers(state, turn, log).run():
        if index < 0:
            yield b""
        for name, text in events:
            yield event(text, name)
