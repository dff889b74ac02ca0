"""One answer in a chat protocol: token ids become events and, at the end, the whole response."""

import asyncio
import codecs
import json
import re
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import deepseek_recipe as recipe

from finwhale.chat.history import pack_reasoning
from finwhale.chat.output import TokenLogprobs, TokenParser
from finwhale.chat.stop_gate import StopGate
from finwhale.chat.template import REQUEST_KINDS, ProtocolName, ProtocolRequest
from finwhale.chat.tokenizer import Tokenizer

# Each event is its name, or None if the protocol has no names, and its data in JSON.
Event = tuple[str | None, str]
Events = list[Event]
_LOGPROBS = '"logprobs":{"content":['  # no string of JSON contains such quotes
# deepseek-recipe takes the time at which it makes an event. Quotes inside strings are escaped.
_CREATED_AT = re.compile('"created_at":[0-9]+')
# Events of Responses that are not sent as deepseek-recipe writes them.
_OWN = {f"response.{name}" for name in ("created", "in_progress", "completed", "incomplete")} | {
    f"response.output_item.{name}" for name in ("added", "done")
}
_DECODER = json.JSONDecoder()
ENTRIES = 16  # log-probabilities of tokens that are parsed at once

_RESPONSE_KINDS: dict[ProtocolName, Any] = {
    "chat": recipe.ChatCompletionResponse,
    "responses": recipe.ResponsesResponse,
    "messages": recipe.MessagesResponse,
}


class AnswerStream(TokenParser[Event]):
    """One answer: turns token ids into the protocol's events and, at the end, the whole response.

    Token ids may come in any pieces: the cuts between events differ, their contents do not.
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
        special_tokens: bool = False,
        gate: StopGate | None = None,
    ) -> None:
        """
        Args:
            special_tokens: whether the content contains the text of special tokens.
            gate: looks for stop strings instead of deepseek-recipe.
        """
        kind = REQUEST_KINDS[converted.protocol]
        generator = kind.chunk_generator(converted.request, answer_id, model)
        stage = converted.parsing_options.thinking_initial_stage
        if converted.protocol == "messages" and stage and not stage.starts_in_reasoning():
            # The reasoning is over: no block of it begins the answer.
            generator = recipe.MessagesChunkGenerator(answer_id, model, False)
        if converted.echo is not None:
            generator = generator.with_echo(converted.echo)
        if converted.namespaces:
            generator = generator.with_namespace_tool_map(converted.namespaces)
        options = converted.parsing_options
        super().__init__(tokenizer, generator, options, gate, converted.dialect)
        self._last_logprobs: list[Any] = []  # entries that deepseek-recipe's response lacks
        self._owed: deque[tuple[int, TokenLogprobs]] = deque()  # whose entries no event has yet
        self._owes_logprobs = converted.protocol == "chat" and options.parse_tool_calls
        self._in_calls = False
        self._request = converted.request
        self._kind = _RESPONSE_KINDS[converted.protocol]
        self._response = self._kind(answer_id, model, created, prompt_tokens, cached_tokens)
        self._created = created
        self._packed: dict[str, str] = {}  # the reasoning of each item of Responses
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._usage = recipe.PromptUsage(
            prompt_tokens=prompt_tokens, prompt_cache_hit_tokens=cached_tokens
        )

    def begin(self) -> Events:
        """The events that open an answer."""
        return self._push(recipe.InferenceChunk.ready(prompt_usage=self._usage))

    def feed(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        unseen_last: bool = False,
    ) -> Events:
        """The events of more output; there may be none.

        Args:
            logprobs: for each token, its log-probability, and the most likely tokens with theirs.
            unseen_last: whether the last token is no part of the answer; it counts in the usage.
        """
        events: Events = []
        last = len(token_ids) - 1
        # deepseek-recipe holds back a piece that ends inside a character, so pieces are tokens.
        for position, token_id in enumerate(token_ids):
            if unseen_last and position == last:
                events += self._count(1)
                continue
            more, _, end = self._add(token_id, None if logprobs is None else logprobs[position])
            events += more
            if end is not None:
                return events + self._end(end)
        return events

    def _end(self, end: str) -> Events:
        """The last events of an answer that the gate ends with `end`, text of withheld tokens."""
        tokens, rest = [], len(end.encode())
        for token_id, logprobs in self._withheld:
            if rest > 0 and logprobs is not None and token_id not in self._dropped:
                tokens.append((token_id, logprobs))
            rest -= len(self._tokenizer.token_bytes(token_id))
        chunk = recipe.InferenceChunk.text(end, token_count=len(self._withheld))
        self._withheld.clear()
        events = self._push(chunk) + self.finish("stop")
        if tokens:
            # A chunk of text cannot have log-probabilities.
            entries = self._logprob_entries(tokens)
            self._last_logprobs += entries
            name, text = events[0]
            chunk = json.loads(text)
            (choice,) = chunk["choices"]
            before = (choice["logprobs"] or {}).get("content") or []
            choice["logprobs"] = {"content": before + entries}
            events[0] = name, json.dumps(chunk)
        return events

    def _logprob_entries(self, tokens: Sequence[tuple[int, TokenLogprobs]]) -> list[Any]:
        """Log-probabilities as deepseek-recipe writes them in chat completions."""
        generator = recipe.ChatCompletionRequest.chunk_generator(self._request, "", "")
        options = recipe.ParsingOptions(parse_tool_calls=False)
        stream = recipe.StreamProcessor(generator, options, self._tokenizer.recipe)
        token_ids, logprobs = zip(*tokens, strict=True)
        chunks = stream.push(recipe.InferenceChunk.ready())
        chunks += stream.push(recipe.InferenceChunk.tokens(token_ids, logprobs))
        chunks += stream.finish()
        found = [json.loads(chunk.to_json())["choices"][0]["logprobs"] for chunk in chunks]
        return [entry for one in found if one for entry in one["content"]]

    def _parse(self, token_id: int, logprobs: TokenLogprobs | None) -> Events:
        if token_id in self._dropped:
            if not self._special_tokens:
                return self._count(1)
            # Push it as text, so that the parser does not take it for markup.
            text = self._tokenizer.token_text(token_id)
            return self._push_token(token_id, recipe.InferenceChunk.text(text, token_count=1))
        wanted = None if logprobs is None else [logprobs]
        if logprobs is not None and self._owes_logprobs:
            self._owed.append((token_id, logprobs))
        events = self._push_token(token_id, recipe.InferenceChunk.tokens([token_id], wanted))
        self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._unfinished = self._unfinished + 1 if self._decoder.getstate()[0] else 0
        return events

    async def response(self, turn: asyncio.Lock) -> dict[str, Any]:
        """The answer so far as the protocol's response object. Log-probabilities, of which there
        may be many, are parsed in parts, as `in_turns` makes pieces."""
        whole = self._with_reasoning(str(self._response.to_json()))
        head, mark, rest = whole.partition(_LOGPROBS)
        entries, end = [], 0
        while mark and rest[end] != "]":
            entry, end = _DECODER.raw_decode(rest, end + (rest[end] == ","))
            entries.append(entry)
            if len(entries) % ENTRIES == 0:
                async with turn:
                    await asyncio.sleep(0)
        found: dict[str, Any] = json.loads(head + mark + rest[end:])
        entries += self._last_logprobs
        if entries:
            (choice,) = found["choices"]
            choice["logprobs"] = (choice["logprobs"] or {}) | {"content": entries}
        return found

    def _own(self, name: str, text: str) -> str:
        """An event of Responses, with the answer's time and with reasoning that can be read."""
        if "output_item" not in name:
            text = _CREATED_AT.sub(f'"created_at":{self._created}', text, count=1)
        elif (item := json.loads(text)["item"])["type"] == "reasoning":
            reasoning = "".join(part["text"] for part in item["content"])
            self._packed[item["encrypted_content"]] = pack_reasoning(reasoning)
        return self._with_reasoning(text)

    def _with_logprobs(self, text: str) -> str:
        """A chunk of chat with the log-probabilities of tokens that became a tool call, which
        deepseek-recipe leaves out."""
        chunk = json.loads(text)
        (choice,) = chunk["choices"]
        given = choice["logprobs"] or {}
        entries = [*(given.get("reasoning_content") or ()), *(given.get("content") or ())]
        for entry in entries:
            data = bytes(entry["bytes"])
            while self._owed and self._tokenizer.token_bytes(self._owed.popleft()[0]) != data:
                pass  # a token without an entry, such as the end of the reasoning
        self._in_calls = self._in_calls or bool(choice["delta"].get("tool_calls"))
        if entries or not self._in_calls or not self._owed:
            return text
        choice["logprobs"] = {"content": self._logprob_entries(self._owed)}
        self._last_logprobs += choice["logprobs"]["content"]
        self._owed.clear()
        return json.dumps(chunk)

    def _with_reasoning(self, text: str) -> str:
        """Replaces `encrypted_content`, which is a reasoning's number."""
        for number, packed in self._packed.items():
            text = text.replace(
                f'"encrypted_content":"{number}"', f'"encrypted_content":"{packed}"'
            )
        return text

    def _take(self, chunks: Iterable[Any]) -> Events:
        events = []
        for chunk in chunks:
            name, text = self._kind.sse_event_name(chunk), chunk.to_json()
            text = self._with_logprobs(text) if self._owed else text
            events.append((name, self._own(name, text) if name in _OWN else text))
            self._response.accumulate(chunk)
        return events
