"""The three chat protocols: their requests to prompts, tokens to their answers and events."""

import codecs
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe

from finwhale.chat.output import dropped_ids
from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import RequestError

ProtocolName = Literal["chat", "responses", "messages"]

_MODEL = "DeepSeek-V4-Pro"  # deepseek-recipe's name for the V4 format, Flash and Pro alike
_REQUESTS: dict[ProtocolName, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
_RESPONSES: dict[ProtocolName, Any] = {
    "chat": recipe.ChatCompletionResponse,
    "responses": recipe.ResponsesResponse,
    "messages": recipe.MessagesResponse,
}
_FINISH = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}

TokenLogprobs = tuple[float, Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class ProtocolRequest:
    """A request of one protocol, converted.

    Attributes:
        protocol: which.
        request: deepseek-recipe's view of it.
        echo: the settings that a Responses answer repeats; None for the others.
        namespaces: a Responses request's namespace tools: function name to (namespace, name).
    """

    protocol: ProtocolName
    request: recipe.ConversationRequest
    echo: recipe.ResponsesEcho | None = None
    namespaces: dict[str, tuple[str, str]] | None = None


def convert(
    protocol: ProtocolName,
    body: Mapping[str, Any],
    *,
    default_thinking: bool,
    echo_body: Mapping[str, Any] | None = None,
) -> ProtocolRequest:
    """A request body (parsed JSON) of `protocol` as a conversation.

    Args:
        body: what the client sent; its "model" is not looked at.
        default_thinking: whether a request that does not say thinks.
        echo_body: what a Responses answer repeats, where it is not `body`.

    Raises:
        RequestError: it is not a valid request of the protocol.
    """
    options = recipe.ConversionOptions(default_thinking_mode=default_thinking)
    try:
        request = _parsed(protocol, body)
        if protocol == "responses":
            namespaces = request.namespace_tool_map(options)
            echo = _parsed(protocol, echo_body or body).echo()
            return ProtocolRequest(protocol, request.convert(options), echo, namespaces)
        return ProtocolRequest(protocol, request.convert(options))
    except recipe.ConversionError as error:
        raise RequestError(str(error)) from error
    # Not JSON (TypeError), nested too deeply, lone surrogates (a ValueError), or not the protocol.
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"not a valid request: {error}") from error


def _parsed(protocol: ProtocolName, body: Mapping[str, Any]) -> Any:
    if protocol == "chat" and isinstance(body.get("messages"), list):
        body = {**body, "messages": [_with_known_role(message) for message in body["messages"]]}
    text = json.dumps({**body, "model": _MODEL}, ensure_ascii=False, allow_nan=False)
    return _REQUESTS[protocol](text)


def _with_known_role(message: Any) -> Any:
    """A developer's message as a user's.

    DeepSeek's encoder writes a developer's message as a turn of the user, and deepseek-recipe does
    so in Responses, but does not know the role in Chat Completions.
    """
    if isinstance(message, Mapping) and message.get("role") == "developer":
        return {**message, "role": "user"}
    return message


class AnswerStream:
    """One answer: token ids in, the protocol's events out, and the whole response at the end.

    Feed it in any pieces: the events differ in where they are cut, their contents do not.
    """

    def __init__(
        self,
        converted: ProtocolRequest,
        tokenizer: Tokenizer,
        *,
        answer_id: str,
        model: str,
        created: int,
        prompt_tokens: int,
        cached_tokens: int,
        stop: Sequence[str] = (),
    ) -> None:
        """`stop`: strings that end the content, besides those of the request."""
        kind = _REQUESTS[converted.protocol]
        generator = kind.chunk_generator(converted.request, answer_id, model)
        if converted.echo is not None:
            generator = generator.with_echo(converted.echo)
        if converted.namespaces:
            generator = generator.with_namespace_tool_map(converted.namespaces)
        options = converted.request.parsing_options
        if stop:
            options.stop_sequences = list(dict.fromkeys([*options.stop_sequences, *stop]))
        self._stream = recipe.StreamProcessor(generator, options, tokenizer.recipe)
        self._kind = _RESPONSES[converted.protocol]
        self._response = self._kind(answer_id, model, created, prompt_tokens, cached_tokens)
        self._tokenizer = tokenizer
        self._dropped = dropped_ids(tokenizer)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._unfinished = 0  # tokens of a character that is not complete
        self._usage = recipe.PromptUsage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens
        )

    @property
    def finished(self) -> bool:
        """A stop string was met, or `finish` was called: nothing more is parsed."""
        return self._stream.finished

    def begin(self) -> list[tuple[str | None, str]]:
        """The events that open an answer, as (event name or None, JSON text)."""
        return self._push(recipe.InferenceChunk.ready(prompt_usage=self._usage))

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        unseen_last: bool = False,
    ) -> list[tuple[str | None, str]]:
        """The events that more output brings; may be none.

        Args:
            logprobs: for each token its log-probability and the most likely tokens with theirs.
            unseen_last: the last token is counted, but is no part of the answer.
        """
        events: list[tuple[str | None, str]] = []
        last = len(token_ids) - 1
        # One by one: of a piece that ends inside a character, deepseek-recipe keeps all to itself.
        for position, token_id in enumerate(token_ids):
            if token_id in self._dropped or (unseen_last and position == last):
                events += self._count(1)
                continue
            wanted = None if logprobs is None else [logprobs[position]]
            events += self._push(recipe.InferenceChunk.tokens([token_id], wanted))
            self._decoder.decode(self._tokenizer.token_bytes(token_id))
            self._unfinished = self._unfinished + 1 if self._decoder.getstate()[0] else 0
        return events

    def _count(self, num_tokens: int) -> list[tuple[str | None, str]]:
        """Counts tokens that are no part of the answer; the empty delta that this may bring keeps
        events numbered."""
        return self._push(recipe.InferenceChunk.text("", token_count=num_tokens))

    def finish(self, reason: Literal["stop", "length"]) -> list[tuple[str | None, str]]:
        """Ends the answer; `reason` is why generation ended."""
        # An answer may be cut off inside a character.
        events = self._count(self._unfinished) if self._unfinished else []
        events += self._push(recipe.InferenceChunk.finish(_FINISH[reason]))
        return events + self._take(self._stream.finish())

    def response(self) -> str:
        """The whole answer so far as the protocol's response object, JSON text."""
        return str(self._response.to_json())

    def _push(self, chunk: recipe.InferenceChunk) -> list[tuple[str | None, str]]:
        return [] if self._stream.finished else self._take(self._stream.push(chunk))

    def _take(self, chunks: Sequence[Any]) -> list[tuple[str | None, str]]:
        events = []
        for chunk in chunks:
            events.append((self._kind.sse_event_name(chunk), chunk.to_json()))
            self._response.accumulate(chunk)
        return events
