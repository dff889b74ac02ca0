"""Splits the model's output into reasoning, content and tool calls while it streams."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe

from finwhale.chat.tokenizer import Tokenizer

FINISH_REASONS = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}
_MARKUP = ("ThinkingStart", "ThinkingEnd", "Dsml")


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """A piece of the answer.

    Attributes:
        kind: the part of the answer that it continues.
        text: more reasoning or content; for a tool call, more of its arguments in JSON.
        tool_index: the index of the tool call in the answer; None for other kinds.
        tool_id, tool_name: the tool call's id and name, in its first event.
    """

    kind: Literal["reasoning", "content", "tool_call"]
    text: str
    tool_index: int | None = None
    tool_id: str | None = None
    tool_name: str | None = None


class OutputParser:
    """Parses one answer, which may arrive in pieces of any size.

    Feed token ids if possible: then text that spells a control token remains text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: recipe.ConversationRequest,
        stop: Sequence[str] = (),
    ) -> None:
        """A parser of one answer to `request`.

        As in DeepSeek's protocol, `stop` strings end the content. They mean nothing in reasoning
        and in tool calls.
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
        """Whether the answer has ended: it met a stop string, or `finish` was called."""
        return self._stream.finished

    def feed(self, piece: str | Sequence[int]) -> list[OutputEvent]:
        """The events of more output, text or token ids; there may be none.

        Special tokens such as the end of sequence are no part of an answer and are skipped.
        """
        if isinstance(piece, str):
            return self._push(recipe.InferenceChunk.text(piece))
        # deepseek-recipe holds back a piece that ends inside a character, so pieces are tokens.
        return [
            event
            for token_id in piece
            if token_id not in self._dropped
            for event in self._push(recipe.InferenceChunk.tokens([token_id]))
        ]

    def finish(self, reason: Literal["stop", "length"] = "stop") -> list[OutputEvent]:
        """Ends the answer and returns its last events; `reason` says why generation ended."""
        events = self._push(recipe.InferenceChunk.finish(FINISH_REASONS[reason]))
        return events + self._take(self._stream.finish())

    def message(self) -> dict[str, Any]:
        """The answer so far as an assistant message, which may be added to the conversation."""
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
