"""What the model writes, split into reasoning, content and tool calls as it streams."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe

from finwhale.chat.tokenizer import Tokenizer

_FINISH = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}
_MARKUP = ("ThinkingStart", "ThinkingEnd", "Dsml")


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """A piece of the answer.

    Attributes:
        kind: what it belongs to.
        text: more reasoning or content; for a tool call, more of its arguments (JSON text).
        tool_index: which tool call of the answer, from 0; None for other kinds.
        tool_id, tool_name: set in the first event of a tool call.
    """

    kind: Literal["reasoning", "content", "tool_call"]
    text: str
    tool_index: int | None = None
    tool_id: str | None = None
    tool_name: str | None = None


class OutputParser:
    """Parses one answer, fed in pieces that may be split anywhere.

    Feed token ids where possible: then a control token counts and text that merely spells one
    does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: recipe.ConversationRequest,
        stop: Sequence[str] = (),
    ) -> None:
        """Parses an answer to `request`, generated with `tokenizer`.

        As in DeepSeek's protocol, `stop` strings end the content; in reasoning and in tool calls
        they mean nothing.
        """
        options = request.parsing_options
        options.stop_sequences = list(stop)
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
        self._stream = recipe.StreamProcessor(generator, options, tokenizer.recipe)
        self._dropped = dropped_ids(tokenizer)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._tool_calls: list[dict[str, Any]] = []
        self._push(recipe.InferenceChunk.ready())

    @property
    def finished(self) -> bool:
        """A stop string was met, or `finish` was called: nothing more is parsed."""
        return self._stream.finished

    def feed(self, piece: str | Sequence[int]) -> list[OutputEvent]:
        """The events that more output (text or token ids) brings; may be none.

        Tokens flagged special, such as the end of sequence, are no part of an answer and are
        passed over.
        """
        if isinstance(piece, str):
            return self._push(recipe.InferenceChunk.text(piece))
        # One by one: of a piece that ends inside a character, deepseek-recipe keeps all to itself.
        return [
            event
            for token_id in piece
            if token_id not in self._dropped
            for event in self._push(recipe.InferenceChunk.tokens([token_id]))
        ]

    def finish(self, reason: Literal["stop", "length"] = "stop") -> list[OutputEvent]:
        """Ends the answer and returns what was held back; `reason` is why generation ended."""
        events = self._push(recipe.InferenceChunk.finish(_FINISH[reason]))
        return events + self._take(self._stream.finish())

    def message(self) -> dict[str, Any]:
        """The answer so far as an assistant message, fit to be added to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._tool_calls:
            message["tool_calls"] = [
                {**call, "function": dict(call["function"])} for call in self._tool_calls
            ]
        return message

    def _push(self, chunk: recipe.InferenceChunk) -> list[OutputEvent]:
        return [] if self._stream.finished else self._take(self._stream.push(chunk))

    def _take(self, chunks: Iterable[Any]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                events += _events(choice["delta"])
        for event in events:
            self._add(event)
        return events

    def _add(self, event: OutputEvent) -> None:
        if event.kind == "reasoning":
            self._reasoning.append(event.text)
        elif event.kind == "content":
            self._content.append(event.text)
        else:
            if event.tool_id is not None:
                function = {"name": event.tool_name, "arguments": ""}
                self._tool_calls.append(
                    {"id": event.tool_id, "type": "function", "function": function}
                )
            assert event.tool_index is not None
            self._tool_calls[event.tool_index]["function"]["arguments"] += event.text


def dropped_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Special tokens that are no part of an answer, such as the end of sequence."""
    markup = {
        tokenizer.added_ids.get(getattr(recipe.SpecialToken, name).default_str())
        for name in _MARKUP
    }
    return tokenizer.special_ids - markup


def _events(delta: dict[str, Any]) -> list[OutputEvent]:
    events: list[OutputEvent] = []
    if delta.get("reasoning_content"):
        events.append(OutputEvent("reasoning", delta["reasoning_content"]))
    if delta.get("content"):
        events.append(OutputEvent("content", delta["content"]))
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        events.append(
            OutputEvent(
                "tool_call",
                function.get("arguments", ""),
                tool_index=call["index"],
                tool_id=call.get("id"),
                tool_name=function.get("name"),
            )
        )
    return events
