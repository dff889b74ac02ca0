"""Splits the model's output into reasoning, content and tool calls while it streams."""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import deepseek_recipe as recipe

from finwhale.chat.call_guard import CallGuard
from finwhale.chat.dialect import V4, Dialect
from finwhale.chat.stop_gate import StopGate
from finwhale.chat.tokenizer import Tokenizer
from finwhale.request import SamplingParams

FINISH_REASONS = {
    "stop": recipe.InferenceFinishReason.Stop,
    "length": recipe.InferenceFinishReason.Length,
}
EventKind = Literal["reasoning", "content", "tool_call"]
TokenLogprobs = tuple[float, Sequence[tuple[int, float]]]
Event = TypeVar("Event")
_MARKUP = ("ThinkingStart", "ThinkingEnd", "Dsml")


@dataclass(frozen=True, slots=True)
class OutputEvent:
    """A piece of the answer.

    Attributes:
        kind: the part of the answer that it continues.
        text: more reasoning or content; for a tool call, more of its arguments in JSON.
    """

    kind: EventKind
    text: str


class TokenParser(Generic[Event]):
    """Gives deepseek-recipe the tokens of one answer that the gate and the guard let pass."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        generator: Any,
        options: recipe.ParsingOptions,
        gate: StopGate | None,
        dialect: Dialect,
    ) -> None:
        """
        Args:
            generator: deepseek-recipe's, which makes the chunks of the answer.
            options: have the stop strings, unless the gate looks for them.
        """
        # Of the stop strings that are complete at the same character, deepseek-recipe finds the
        # first of its list, and StopChecker the longest.
        stop = sorted(options.stop_sequences, key=len, reverse=True)
        options.stop_sequences = [] if gate else stop
        self._stream = recipe.StreamProcessor(generator, options, tokenizer.recipe)
        self._guard = CallGuard(tokenizer, dialect, enabled=options.parse_tool_calls)
        # Special tokens that are no part of an answer, such as the end of sequence.
        self._dropped, self._gate = tokenizer.special_ids - _ids(tokenizer, _MARKUP), gate
        self._withheld: deque[tuple[int, TokenLogprobs | None]] = deque()
        self._unfinished = 0  # number of tokens of a character that is not complete

    @property
    def finished(self) -> bool:
        """Whether the answer has ended: by a stop string, a broken tool call, or `finish`."""
        return self._stream.finished

    @property
    def broken(self) -> bool:
        """Whether a tool call is broken or does not end; the answer is then incomplete."""
        return self._guard.broken

    def finish(self, reason: Literal["stop", "length"] = "stop") -> list[Event]:
        """Ends the answer and returns its last events; `reason` says why generation ended."""
        events = self._release(len(self._withheld))
        for chunk in self._guard.flush():
            events += self._push(chunk)
        if self.finished:
            return events
        # No protocol has a word for a broken call, but each has one for an incomplete answer.
        reason = "length" if self.broken else reason
        # The answer may end inside a character.
        events += self._count(self._unfinished) if self._unfinished else []
        events += self._push(recipe.InferenceChunk.finish(FINISH_REASONS[reason]))
        return events + self._take(self._stream.finish())

    def _add(
        self, token_id: int, logprobs: TokenLogprobs | None = None
    ) -> tuple[list[Event], int, str | None]:
        """Adds a token.

        Returns:
            The events of tokens that were withheld; their number; and the text that follows them
            if the gate ends the answer here, else None.
        """
        self._withheld.append((token_id, logprobs))
        released, end = (1, None) if self._gate is None else self._gate.feed(token_id)
        return self._release(released), released, end

    def _release(self, count: int) -> list[Event]:
        """The events of the oldest tokens that the gate withheld."""
        return [event for _ in range(count) for event in self._parse(*self._withheld.popleft())]

    def _parse(self, token_id: int, logprobs: TokenLogprobs | None) -> list[Event]:
        """The events of a token of the answer."""
        raise NotImplementedError

    def _take(self, chunks: Iterable[Any]) -> list[Event]:
        """The events of deepseek-recipe's chunks."""
        raise NotImplementedError

    def _push_token(self, token_id: int, chunk: recipe.InferenceChunk) -> list[Event]:
        chunks = self._guard.feed(token_id, chunk)
        events = [event for one in chunks for event in self._push(one)]
        return events + self.finish() if self.broken and not self.finished else events

    def _push(self, chunk: recipe.InferenceChunk) -> list[Event]:
        return [] if self.finished else self._take(self._stream.push(chunk))

    def _count(self, num_tokens: int) -> list[Event]:
        """Counts tokens that are no part of the answer. This may give an empty delta, so that the
        numbers of events stay consecutive."""
        return self._push(recipe.InferenceChunk.text("", token_count=num_tokens))


class OutputParser(TokenParser[OutputEvent]):
    """Parses one answer, which may arrive in pieces of any size.

    Feed token ids if possible: then text that spells a control token remains text.

    Attributes:
        num_tokens: number of token ids that were fed before the answer ended.
        num_before_stop: number of those that certainly precede the end of the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: recipe.ConversationRequest,
        stop: Sequence[str] = (),
        gate: StopGate | None = None,
        dialect: Dialect = V4,
    ) -> None:
        """A parser of one answer to `request`.

        As in DeepSeek's protocol, `stop` strings end the content. They mean nothing in reasoning
        and in tool calls.

        Args:
            gate: looks for stop strings instead, in token ids.
        """
        options = request.parsing_options
        options.stop_sequences = list(stop)
        generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
        super().__init__(tokenizer, generator, options, gate, dialect)
        self.num_tokens = self.num_before_stop = 0
        self._response = recipe.ChatCompletionResponse("", "", 0, 0, 0)
        self._push(recipe.InferenceChunk.ready())

    def feed(self, piece: str | Sequence[int]) -> list[OutputEvent]:
        """The events of more output, text or token ids; there may be none.

        Special tokens such as the end of sequence are no part of an answer and are skipped.
        """
        if isinstance(piece, str):
            return self._push(recipe.InferenceChunk.text(piece))
        # deepseek-recipe holds back a piece that ends inside a character, so pieces are tokens.
        events: list[OutputEvent] = []
        for token_id in piece:
            if self.finished:
                break
            self.num_tokens += 1
            more, released, end = self._add(token_id)
            events += more
            if end is not None:
                self._withheld.clear()
                events += self._push(recipe.InferenceChunk.text(end)) + self.finish("stop")
            elif not self.finished:
                self.num_before_stop += released
        return events

    def message(self) -> dict[str, Any]:
        """The answer so far as an assistant message, which may be added to the conversation."""
        (choice,) = json.loads(str(self._response.to_json()))["choices"]
        message = {k: v for k, v in choice["message"].items() if v}
        for call in message.get("tool_calls", ()):
            del call["index"]  # only chunks of a stream have it
        return {"content": "", **message}

    def _parse(self, token_id: int, logprobs: TokenLogprobs | None) -> list[OutputEvent]:
        if token_id in self._dropped:
            return []
        return self._push_token(token_id, recipe.InferenceChunk.tokens([token_id]))

    def _take(self, chunks: Iterable[Any]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                events += _events(choice["delta"])
            self._response.accumulate(chunk)
        return events


def new_gate(
    tokenizer: Tokenizer, params: SamplingParams, stop: Sequence[str], end_of_thinking: int | None
) -> StopGate | None:
    """The gate that finds an answer's stop strings; None: the parser finds them.

    Args:
        stop: the answer's stop strings, which params lack if there are tools.
        end_of_thinking: the token after which the answer begins; None: it begins at once.
    """
    if not stop or not (params.min_tokens or params.include_stop_str_in_output):
        return None
    return StopGate(
        tokenizer,
        stop,
        end_of_thinking=end_of_thinking,
        markup=_ids(tokenizer, ("Dsml",)),
        min_tokens=params.min_tokens,
        keep=params.include_stop_str_in_output,
        has_tools=not params.stop,
    )


def _ids(tokenizer: Tokenizer, names: Iterable[str]) -> set[int | None]:
    """The ids of special tokens by deepseek-recipe's names; None: the tokenizer lacks one."""
    texts = (getattr(recipe.SpecialToken, name).default_str() for name in names)
    return {tokenizer.added_ids.get(text) for text in texts}


def _events(delta: dict[str, Any]) -> list[OutputEvent]:
    calls = (call["function"].get("arguments") for call in delta.get("tool_calls") or ())
    pieces: list[tuple[EventKind, str | None]] = [
        ("reasoning", delta.get("reasoning_content")),
        ("content", delta.get("content")),
        *(("tool_call", arguments) for arguments in calls),
    ]
    return [OutputEvent(kind, text) for kind, text in pieces if text]
