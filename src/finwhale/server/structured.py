"""Structured output: what a request wants its answer to match."""

from dataclasses import dataclass
from typing import Any

from finwhale.chat.protocols import ProtocolName, ProtocolRequest, convert
from finwhale.errors import RequestError
from finwhale.request import Guide
from finwhale.server.state import ServerState


def completion_guide(state: ServerState, response_format: dict[str, Any] | None) -> Guide | None:
    """The guide of a completion, from the format that a chat request would have."""
    if response_format is None or response_format.get("type") == "text":
        return None
    raise RequestError("response_format is not supported yet")


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request converted, and what its answer must match.

    Attributes:
        has_tools: the answer may call tools.
        guide: None: anything goes.
    """

    converted: ProtocolRequest
    has_tools: bool
    guide: Guide | None


def plan_chat(
    state: ServerState, protocol: ProtocolName, body: object, fields: dict[str, Any]
) -> ChatPlan:
    """Converts a request. Raises RequestError."""
    converted = convert(protocol, fields, default_thinking=state.config.default_thinking)
    return ChatPlan(converted, bool(converted.request.conversation.tools), None)
