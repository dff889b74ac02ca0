"""Converts conversations to prompts of the model, with DeepSeek's own converter.

A conversation is a request of one of three chat protocols, or a list of OpenAI-style messages.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe

from finwhale.chat.dialect import V4, Dialect
from finwhale.chat.effort import changed
from finwhale.chat.history import readable, replaced
from finwhale.chat.known_fields import CHAT_FIELDS, MAX_NAMED, check_fields
from finwhale.chat.output import OutputParser
from finwhale.chat.stop_gate import StopGate
from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import RequestError

logger = logging.getLogger(__name__)

ProtocolName = Literal["chat", "responses", "messages"]

REQUEST_KINDS: dict[ProtocolName, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
ChatMessages = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "latest_reminder", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ProtocolRequest:
    """A converted request of one protocol.

    Attributes:
        request: the request as deepseek-recipe reads it.
        conversation: its conversation, which may continue the last message.
        parsing_options: how to parse the answer.
        effort: the reasoning effort, if the request has it as a number.
        echo: the settings that a Responses answer repeats; None for the other protocols.
        namespaces: the namespace tools of a Responses request, from function name to (namespace,
            name); None for the other protocols.
    """

    protocol: ProtocolName
    request: recipe.ConversationRequest
    conversation: recipe.Conversation
    parsing_options: recipe.ParsingOptions
    dialect: Dialect
    effort: int | None = None
    echo: recipe.ResponsesEcho | None = None
    namespaces: dict[str, tuple[str, str]] | None = None


def convert(
    protocol: ProtocolName,
    body: Mapping[str, Any],
    *,
    default_thinking: bool,
    echo_body: Mapping[str, Any] | None = None,
    response_schema: Any = None,
    dialect: Dialect = V4,
) -> ProtocolRequest:
    """Converts the body of a request (parsed JSON) to a conversation.

    Args:
        body: the body as the client sent it; its "model" is ignored.
        default_thinking: whether the model thinks if the request does not say.
        echo_body: the body whose settings a Responses answer repeats; None: `body`.
        response_schema: the schema of a Messages answer, for the prompt. deepseek-recipe reads
            those of the other protocols itself.

    Raises:
        RequestError: the body is not a valid request of the protocol.
    """
    options = recipe.ConversionOptions(default_thinking_mode=default_thinking)
    schemas = dialect.schemas()
    body, effort = dialect.take_effort(protocol, body)
    try:
        request = _parse(protocol, schemas.take_from(body), dialect)
        echo = names = None
        if protocol == "responses":
            names = request.namespace_tool_map(options)
            echo_body, _ = dialect.take_effort(protocol, echo_body or body)
            echo = _parse(protocol, echo_body, dialect).echo()
        asked = request.convert(options)
        parsing = asked.parsing_options
        conversation = schemas.put_back(_continuing(protocol, asked.conversation, parsing))
        if response_schema is not None:
            conversation = changed(conversation, response_schema=response_schema)
        return ProtocolRequest(protocol, asked, conversation, parsing, dialect, effort, echo, names)
    except recipe.ConversionError as error:
        raise RequestError(str(error)) from error
    # The body is not JSON (TypeError), is nested too deeply, has lone surrogates (a ValueError) or
    # too large numbers, or is not of the protocol.
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise RequestError(f"not a valid request: {error}") from error


def _continuing(
    protocol: ProtocolName, conversation: recipe.Conversation, parsing: recipe.ParsingOptions
) -> recipe.Conversation:
    """The conversation of a request. In Anthropic's protocol, the answer continues a final turn of
    the assistant: this sets the initial stage of its `parsing`."""
    last = conversation.messages[-1] if conversation.messages else None
    if protocol != "messages" or not last or last.role != "assistant" or last.tool_calls:
        return conversation
    if conversation.thinking_mode:
        stages = recipe.ThinkingInitialStage
        parsing.thinking_initial_stage = (
            stages.ReasoningContinuation
            if last.reasoning_content and not last.content
            else stages.ContentContinuation
        )
    prefix = recipe.AssistantMessage(last.content, last.reasoning_content, prefix=True)
    return changed(conversation, messages=[*conversation.messages[:-1], prefix])


def _parse(protocol: ProtocolName, body: Mapping[str, Any], dialect: Dialect) -> Any:
    def known(one: dict[str, Any], _: str) -> dict[str, Any]:
        # deepseek-recipe knows developers in Responses alone, and no type of client tools.
        if protocol == "chat" and one.get("role") == "developer":
            one["role"] = dialect.developer
        if protocol == "messages" and one.get("type") == "custom":
            del one["type"]
        return one

    own = {**replaced(body, "messages", "", known), **replaced(body, "tools", "", known)}
    text = json.dumps({**body, **own, "model": dialect.model}, ensure_ascii=False, allow_nan=False)
    return REQUEST_KINDS[protocol](text)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The prompt of a conversation.

    Attributes:
        token_ids: the prompt.
        text: the prompt as text. It spells out control tokens and must not be encoded again.
        request: the conversation as deepseek-recipe reads it; the output parser needs it.
    """

    token_ids: list[int]
    text: str
    request: recipe.ConversationRequest


class ChatTemplate:
    """Renders conversations for one checkpoint.

    Only the format itself writes control tokens into a prompt. A message that spells a control
    token remains text.
    """

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        """A template of a checkpoint. Raises CheckpointError: the vocabulary lacks a control token
        of the format."""
        self.dialect = dialect
        tokens = [getattr(recipe.SpecialToken, name) for name in dialect.tokens]
        for token in tokens:
            tokenizer.added_id(token.default_str())
        self._tokenizer = tokenizer
        # deepseek-recipe also marks Ref, Box, Point and Polygon where an assistant's text spells
        # them. They are not part of the format, so here they remain text.
        tokens += [recipe.SpecialToken.LatestReminder, recipe.SpecialToken.Dsml]
        self._format_tokens = frozenset(token.default_str() for token in tokens)

    @property
    def end_of_thinking(self) -> int:
        """The token that ends the reasoning."""
        return self._tokenizer.added_id(recipe.SpecialToken.ThinkingEnd.default_str())

    def render(
        self,
        messages: ChatMessages,
        *,
        thinking: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> ChatPrompt:
        """The prompt that asks for the next assistant message.

        Args:
            messages: dicts with "role" (see ROLES) and "content": a string, or parts of type
                "text" except in a latest_reminder. An assistant's message may have
                "reasoning_content" and "tool_calls"; a tool's message has "tool_call_id". Messages
                may have the fields of Chat Completions (chat/known_fields.py), and no others. The
                answer continues an assistant's last message that has "prefix".
            thinking: let the model think before it answers.
            tools: function tools that the model may call, as in OpenAI's Chat Completions.

        Raises:
            RequestError: the messages or the tools are not valid, or have unknown fields.
            CheckpointError: the vocabulary lacks a control token that this prompt needs.
        """
        return self.encode(_convert(messages, thinking, tools, self.dialect))

    def encode(
        self, converted: ProtocolRequest, check_text: Callable[[str], None] | None = None
    ) -> ChatPrompt:
        """The prompt of a converted conversation.

        Args:
            check_text: is called with the prompt's text before it is encoded, and may raise.

        Raises:
            CheckpointError: the vocabulary lacks a control token that this prompt needs.
        """
        assert converted.dialect.model == self.dialect.model
        rendered = self.dialect.render(converted.conversation, converted.effort)
        if check_text is not None:
            check_text(rendered.prompt)
        token_ids = self._encode(rendered.prompt, rendered.special_ranges)
        return ChatPrompt(token_ids, rendered.prompt, converted.request)

    def parser(
        self, prompt: ChatPrompt, stop: Sequence[str] = (), gate: StopGate | None = None
    ) -> OutputParser:
        """A parser of one answer to `prompt`. A `stop` string, or the gate, ends the content."""
        return OutputParser(self._tokenizer, prompt.request, stop, gate, self.dialect)

    def _encode(self, text: str, special_ranges: Sequence[tuple[int, int]]) -> list[int]:
        token_ids: list[int] = []
        done = 0
        for start, end in special_ranges:
            if text[start:end] not in self._format_tokens:
                continue
            if done < start:
                token_ids += self._tokenizer.encode(text[done:start])
            token_ids.append(self._tokenizer.added_id(text[start:end]))
            done = end
        return token_ids + self._tokenizer.encode(text[done:])


def check_tools(tools: object) -> None:
    """Raises RequestError if tools are not a list of dicts."""
    if not isinstance(tools, list | tuple) or not all(isinstance(one, Mapping) for one in tools):
        raise RequestError(f"tools must be a list of dicts, got {tools!r}")


def _convert(
    messages: ChatMessages, thinking: bool, tools: Sequence[Any], dialect: Dialect = V4
) -> ProtocolRequest:
    check_tools(tools)
    body, left_out = readable("chat", {"messages": messages})
    _check(body["messages"])
    if left_out:
        logger.warning("parts of messages were left out", extra={"fields": left_out[:MAX_NAMED]})
    body |= {"thinking": {"type": "enabled" if thinking else "disabled"}, "stream": True}
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    check_fields(CHAT_FIELDS, {name: body.get(name) for name in CHAT_FIELDS})
    return convert("chat", body, default_thinking=thinking, dialect=dialect)


def _check(messages: ChatMessages) -> None:
    """Raises RequestError with the index of the wrong message."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list of dicts, got {type(messages).__name__}")
    if not messages:
        raise RequestError("messages must not be empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}] must be a dict, got {type(message).__name__}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(
                f"messages[{i}]: role must be one of {', '.join(ROLES)}, got {role!r}"
            )
        if isinstance(content, list | tuple):
            for part in content:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                if kind != "text" or not isinstance(part.get("text"), str):
                    raise RequestError(
                        f'messages[{i}]: content parts must be {{"type": "text", "text": "..."}}, '
                        f"got one of type {kind!r}"
                    )
        elif not isinstance(content, str) and not (content is None and role == "assistant"):
            raise RequestError(
                f"messages[{i}]: content must be a string or a list of text parts, "
                f"got {type(content).__name__}"
            )
