"""/v1/chat/completions: OpenAI's chat protocol."""

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from finwhale.server.conversation import Answers, Turn
from finwhale.server.logs import RequestLog
from finwhale.server.sse import event
from finwhale.server.state import ServerState


def new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


async def complete(state: ServerState, turn: Turn, log: RequestLog) -> dict[str, Any]:
    """The whole answer at once."""
    answers = Answers(state, turn, log)
    async for _ in answers.run():
        pass
    whole: dict[str, Any] = {}
    usages = []
    for index, stream in enumerate(answers.streams):
        assert stream is not None
        response = json.loads(stream.response())
        usages.append(response.pop("usage"))
        choice = _numbered(response["choices"][0], index)
        _name_reasoning(choice["message"])
        whole = whole or response | {"choices": []}
        whole["choices"].append(choice)
    return whole | {"usage": _sum(usages)}


async def stream(
    state: ServerState, turn: Turn, log: RequestLog, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """The answer's events; the first item, empty, says that the engine has taken the request."""
    usages = []
    head: dict[str, Any] = {}
    async for index, events in Answers(state, turn, log).run():
        if index < 0:
            yield b""
        for _, text in events:
            chunk = json.loads(text)
            chunk["created"] = turn.created
            usage = chunk.pop("usage", None)
            if usage is not None:
                usages.append(usage)
            for choice in chunk["choices"]:
                _numbered(choice, index)
                _name_reasoning(choice["delta"])
            head = head or {k: v for k, v in chunk.items() if k != "choices"}
            if include_usage:
                chunk["usage"] = None
            yield event(json.dumps(chunk))
    if include_usage:
        yield event(json.dumps({**head, "choices": [], "usage": _sum(usages)}))
    yield event("[DONE]")


def _numbered(choice: dict[str, Any], index: int) -> dict[str, Any]:
    choice["index"] = index
    for call in choice.get("message", {}).get("tool_calls") or ():
        call.pop("index", None)  # the streaming form's
    return choice


def _name_reasoning(message: dict[str, Any]) -> None:
    """Clients read `reasoning_content` (DeepSeek's) or `reasoning`."""
    if "reasoning_content" in message:
        message["reasoning"] = message["reasoning_content"]


def _sum(usages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The usage of n answers to one prompt, which is counted once."""
    if not usages:
        return None
    total = dict(usages[0])
    total["completion_tokens"] = sum(u["completion_tokens"] for u in usages)
    total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
    details = [u.get("completion_tokens_details") for u in usages]
    reasoning = [d["reasoning_tokens"] for d in details if d]
    if reasoning:
        total["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return total
