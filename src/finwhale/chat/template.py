"""OpenAI-style messages to the model's prompt, through DeepSeek's own converter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from finwhale.chat.effort import EffortLadder, worded
from finwhale.chat.output import OutputParser
from finwhale.chat.protocols import convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import RequestError

ChatMessages = Sequence[Mapping[str, Any]]

ROLES = ("system", "developer", "user", "latest_reminder", "assistant", "tool")
_STRUCTURE = ("Bos", "Eos", "User", "Assistant", "ThinkingStart", "ThinkingEnd")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is put to the model.

    Attributes:
        thinking: let the model reason before it answers.
        reasoning_effort: "low", "high", "xhigh" or "max"; None: DeepSeek's default ("high").
            Only with thinking. What each writes depends on the checkpoint: chat/effort.py.
        tools: function tools that the model may call, as in OpenAI's Chat Completions.
        tool_choice: "auto", "none", "required" or a named tool, as in Chat Completions.
        continue_final: the last message, an assistant's, is the start of the answer, which the
            model continues.
    """

    thinking: bool = True
    reasoning_effort: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    continue_final: bool = False

    def __post_init__(self) -> None:
        if self.reasoning_effort is not None and not self.thinking:
            raise RequestError("reasoning_effort needs thinking, which is off")
        tools: object = self.tools
        if not isinstance(tools, list | tuple) or not all(isinstance(t, Mapping) for t in tools):
            raise RequestError(f"tools must be a list of dicts, got {tools!r}")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model reads it.

    Attributes:
        token_ids: what the model reads.
        text: the same as text; control tokens are spelled out, so it must not be encoded again.
        request: deepseek-recipe's view of the conversation, from which output is parsed.
    """

    token_ids: list[int]
    text: str
    request: recipe.ConversationRequest


class ChatTemplate:
    """Renders conversations for one checkpoint.

    Only what the format itself puts into a prompt becomes control tokens; messages that spell a
    control token remain text.
    """

    def __init__(self, tokenizer: Tokenizer, ladder: EffortLadder) -> None:
        """A template of one tokenizer and one ladder of reasoning effort (`effort_ladder`).

        Raises:
            CheckpointError: the vocabulary lacks a control token of the format.
        """
        for name in _STRUCTURE:
            tokenizer.added_id(getattr(recipe.SpecialToken, name).default_str())
        self._tokenizer = tokenizer
        self._ladder = ladder
        self._encoding = recipe.DeepseekV4Encoding()

    @property
    def end_of_thinking(self) -> int:
        """The token that ends the reasoning."""
        return self._tokenizer.added_id(recipe.SpecialToken.ThinkingEnd.default_str())

    def render(self, messages: ChatMessages, options: ChatOptions | None = None) -> ChatPrompt:
        """The prompt that asks for the next assistant message.

        Args:
            messages: dicts with "role" (see ROLES) and "content" (a string or parts of type
                "text"; a latest_reminder's is a string); an assistant's may have
                "reasoning_content" and "tool_calls", a tool's has "tool_call_id".
            options: how to ask; None: the defaults.

        Raises:
            RequestError: the messages or the options are not valid.
            CheckpointError: the vocabulary lacks a control token that this prompt needs.
        """
        return self.encode(_convert(messages, options or ChatOptions()))

    def encode(self, request: recipe.ConversationRequest) -> ChatPrompt:
        """The prompt of a converted conversation (see `chat.protocols`).

        Raises:
            CheckpointError: the vocabulary lacks a control token that this prompt needs.
        """
        rendered = self._encoding.render_conversation(worded(request.conversation, self._ladder))
        token_ids = self._encode(rendered.prompt, rendered.special_ranges)
        return ChatPrompt(token_ids, rendered.prompt, request)

    def parser(self, prompt: ChatPrompt, stop: Sequence[str] = ()) -> OutputParser:
        """A parser of one answer to `prompt`, whose content ends before a `stop` string."""
        return OutputParser(self._tokenizer, prompt.request, stop)

    def _encode(self, text: str, special_ranges: Sequence[tuple[int, int]]) -> list[int]:
        token_ids: list[int] = []
        done = 0
        for start, end in special_ranges:
            if done < start:
                token_ids += self._tokenizer.encode(text[done:start])
            token_ids.append(self._tokenizer.added_id(text[start:end]))
            done = end
        return token_ids + self._tokenizer.encode(text[done:])


def _convert(messages: ChatMessages, options: ChatOptions) -> recipe.ConversationRequest:
    _check(messages)
    body: dict[str, Any] = {
        "messages": [dict(message) for message in messages],
        "thinking": {"type": "enabled" if options.thinking else "disabled"},
        "stream": True,
    }
    if options.continue_final:
        if body["messages"][-1]["role"] != "assistant":
            raise RequestError("continue_final needs an assistant message at the end")
        body["messages"][-1]["prefix"] = True
    if options.tools:
        body["tools"] = [dict(tool) for tool in options.tools]
    if options.tool_choice is not None:
        body["tool_choice"] = options.tool_choice
    if options.reasoning_effort is not None:
        body["reasoning_effort"] = options.reasoning_effort
    return convert("chat", body, default_thinking=options.thinking).request


def _check(messages: ChatMessages) -> None:
    """Raises RequestError with the index of the message that is wrong."""
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
