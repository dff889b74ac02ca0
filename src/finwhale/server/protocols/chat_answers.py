"""Answers in the three chat protocols: tokens from the engine become responses and events."""

import asyncio
import codecs
import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import deepseek_recipe as recipe

from finwhale.chat.history import pack_reasoning
from finwhale.chat.output import TokenLogprobs, TokenParser, new_gate
from finwhale.chat.stop_gate import StopGate
from finwhale.chat.template import REQUEST_KINDS, ProtocolName, ProtocolRequest
from finwhale.chat.tokenizer import Tokenizer
from finwhale.request import Logprob
from finwhale.server.link.wire import Delta, LogprobTables
from finwhale.server.observe.logs import RequestLog
from finwhale.server.protocols.chat_requests import ChatRequest
from finwhale.server.protocols.routed_experts import RoutedExpertFields
from finwhale.server.protocols.schemas import ChatBody, MessagesBody
from finwhale.server.sse import event
from finwhale.server.state import ServerState

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
NO_EDITS: dict[str, Any] = {"applied_edits": []}  # Anthropic's answer about context management
THINKING_END = recipe.SpecialToken.ThinkingEnd.default_str()

_RESPONSE_KINDS: dict[ProtocolName, Any] = {
    "chat": recipe.ChatCompletionResponse,
    "responses": recipe.ResponsesResponse,
    "messages": recipe.MessagesResponse,
}


async def complete(state: ServerState, request: ChatRequest, log: RequestLog) -> dict[str, Any]:
    """The response to a request that does not stream."""
    answers = _Answers(state, request, log)
    async for _ in answers.run():
        pass
    responses = [await one.response(state.turn) for one in answers.streams if one is not None]
    assert len(responses) == request.params.n
    body = request.body
    if not isinstance(body, ChatBody):
        whole: dict[str, Any] = responses[0]
        if _has_no_edits(request):
            whole["context_management"] = NO_EDITS
        return whole
    usages = [response.pop("usage") for response in responses]
    choices = [response["choices"][0] for response in responses]
    for index, choice in enumerate(choices):
        _ChoiceForm(body, index).apply(choice)
        if body.return_token_ids:
            choice["token_ids"] = answers.token_ids[index]
        choice |= answers.routed_experts.choice(index, len(answers.token_ids[index]))
    more: dict[str, Any] = {**answers.routed_experts.prompt}
    if body.return_token_ids:
        more["prompt_token_ids"] = request.token_ids
    if request.params.prompt_logprobs is not None:
        assert answers.prompt_logprobs is not None
        more["prompt_logprobs"] = prompt_logprobs(
            answers.prompt_logprobs, request.params.prompt_logprobs
        )
    return {**responses[0], "choices": choices, "usage": _sum(usages), **more}


def stream(
    state: ServerState, request: ChatRequest, log: RequestLog
) -> AsyncGenerator[bytes, None]:
    """The events of an answer. The first item, empty, says that the engine has accepted the
    request."""
    events = _chat_events if isinstance(request.body, ChatBody) else _named_events
    return events(state, request, log)


def _has_no_edits(request: ChatRequest) -> bool:
    """Whether the answer says that context management has made no edits."""
    return isinstance(request.body, MessagesBody) and request.body.context_management is not None


async def _named_events(
    state: ServerState, request: ChatRequest, log: RequestLog
) -> AsyncGenerator[bytes, None]:
    async for index, events in _Answers(state, request, log).run():
        if index < 0:
            yield b""
        for name, text in events:
            if name == "message_delta" and _has_no_edits(request):
                text = json.dumps({**json.loads(text), "context_management": NO_EDITS})
            yield event(text, name)


async def _chat_events(
    state: ServerState, request: ChatRequest, log: RequestLog
) -> AsyncGenerator[bytes, None]:
    usages = []
    head: dict[str, Any] = {}
    body, answers = request.body, _Answers(state, request, log)
    assert isinstance(body, ChatBody)
    forms = [_ChoiceForm(body, index) for index in range(request.params.n)]
    sent = [0] * request.params.n  # number of token ids
    async for index, events in answers.run():
        if index < 0:
            yield b""
        for _, text in events:
            chunk = json.loads(text)
            chunk["created"] = request.created
            usage = chunk.pop("usage", None)
            if usage is not None:
                usages.append(usage)
            (choice,) = chunk["choices"]
            if not forms[index].apply(choice):
                continue
            if body.return_token_ids:
                choice["token_ids"] = answers.token_ids[index][sent[index] :]
                sent[index] = len(answers.token_ids[index])
                if not head:
                    chunk["prompt_token_ids"] = request.token_ids
            head = head or {k: chunk[k] for k in chunk if k not in ("choices", "prompt_token_ids")}
            if body.wants_usage:
                chunk["usage"] = None
            if body.wants_continuous_usage:
                num_tokens = len(answers.token_ids[index])
                chunk["usage"] = usage_of(len(request.token_ids), num_tokens)
            yield event(json.dumps(chunk))
    if body.wants_usage:
        yield event(json.dumps({**head, "choices": [], "usage": _sum(usages)}))
    yield event("[DONE]")


class _ChoiceForm:
    """Gives one choice its index, and moves its reasoning into the field that the request asks for.

    The reasoning precedes everything else. In the content, its end is marked as in the prompt.
    """

    def __init__(self, body: ChatBody, index: int) -> None:
        self._index = index
        self._included = body.include_reasoning is not False
        self._separate = body.separate_reasoning is not False
        self._streams = body.stream_reasoning is not False  # otherwise it comes in one piece
        self._open = False  # whether the content has reasoning whose end is not marked yet
        self._held = ""

    def apply(self, choice: dict[str, Any]) -> bool:
        """Changes a whole choice, or that of a stream's chunk. Returns whether the chunk must be
        sent."""
        choice["index"] = self._index
        for call in choice.get("message", {}).get("tool_calls") or ():
            call.pop("index", None)  # only chunks of a stream have it
        message = choice["message"] if "message" in choice else choice["delta"]
        sent = self._move_reasoning(choice, message)
        # Some clients read `reasoning_content` (DeepSeek's name), others `reasoning`.
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]
        return sent

    def _move_reasoning(self, choice: dict[str, Any], message: dict[str, Any]) -> bool:
        if self._separate and self._included and self._streams:
            return True
        text = message.pop("reasoning_content", None) or ""
        others = bool(message.get("content") or message.get("tool_calls"))
        if self._included and not self._separate:
            self._open = self._open or bool(text)
            mark = THINKING_END if self._open and others else ""
            self._open = self._open and not others
            if text or mark:
                message["content"] = text + mark + (message.get("content") or "")
        elif self._included:
            self._held += text
            if self._held and (others or choice.get("finish_reason")):
                message["reasoning_content"], self._held = self._held, ""
        return not text or bool(message or choice.get("finish_reason") or choice.get("logprobs"))


def prompt_logprobs(tables: LogprobTables, num_top: int) -> Iterator[dict[str, Any] | None]:
    """The log-probabilities of a prompt in vLLM's form, with the own token's and `num_top` more."""
    for table in tables:
        yield (
            None
            if table is None
            else {
                str(token_id): asdict(entry)
                for index, (token_id, entry) in enumerate(table.items())
                if index == 0 or entry.rank <= num_top
            }
        )


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The usage of an answer in OpenAI's form."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _sum(usages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The usage of n answers to one prompt; the prompt is counted once."""
    if not usages:
        return None
    completion_tokens = sum(usage["completion_tokens"] for usage in usages)
    total = usages[0] | usage_of(usages[0]["prompt_tokens"], completion_tokens)
    details = [u.get("completion_tokens_details") for u in usages]
    reasoning = [d["reasoning_tokens"] for d in details if d]
    if reasoning:
        total["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return total


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
        super().__init__(tokenizer, generator, options, gate)
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


class _Answers:
    """The n answers to one request, which are parsed as they are generated."""

    def __init__(self, state: ServerState, request: ChatRequest, log: RequestLog) -> None:
        self._state = state
        self._request = request
        self._log = log
        self.streams: list[AnswerStream | None] = [None] * request.params.n
        self.token_ids: list[list[int]] = [[] for _ in range(request.params.n)]
        self.prompt_logprobs: LogprobTables | None = None
        self.routed_experts = RoutedExpertFields()

    async def run(self) -> AsyncGenerator[tuple[int, Events], None]:
        """Yields the index of an answer and its next events.

        The first item, (-1, []), says that the engine has accepted the request.

        Raises:
            ApiError: the engine failed on the request.
            Also what `ServerState.generating` raises.
        """
        request, state = self._request, self._state
        async with state.generating(
            [request.token_ids],
            request.params,
            self._log,
            request.stop_after,
            request.body.priority,
        ) as generation:
            yield -1, []
            if self._log.stream:  # it opens now: the first token may come much later
                for index in range(request.params.n):
                    yield index, self._new_stream(cached_tokens=0).begin()
            async for delta in generation:
                state.count(self._log, delta)
                self.routed_experts.add(delta)
                yield delta.index, self._feed(delta)
                # The parser may have met a stop string before the engine has ended the answer,
                # whose routed experts come at its end.
                if not request.params.return_routed_experts and all(
                    stream is not None and stream.finished for stream in self.streams
                ):
                    return

    def _feed(self, delta: Delta) -> Events:
        stream = self.streams[delta.index]
        events: Events = []
        if stream is None:
            stream = self.streams[delta.index] = self._new_stream(delta.cached_tokens)
            stream.begin()  # `run` has sent these events
        if stream.finished:
            return events
        ids = delta.token_ids
        self.token_ids[delta.index] += ids
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        # The end of sequence and a stop token are no part of the answer.
        stopped = delta.finish_reason == "stop" and not isinstance(delta.stop_reason, str)
        if isinstance(delta.stop_reason, int) and self._request.params.include_stop_str_in_output:
            stopped = False
        logprobs = None
        if delta.logprobs is not None:
            num_top = self._request.params.logprobs or 0
            logprobs = [_pair(i, t, num_top) for i, t in zip(ids, delta.logprobs, strict=True)]
        events += stream.feed(ids, logprobs, unseen_last=stopped)
        if delta.finish_reason is not None:
            # The protocols have no word for an aborted answer, which is incomplete.
            events += stream.finish("stop" if delta.finish_reason == "stop" else "length")
        return events

    def _new_stream(self, cached_tokens: int) -> AnswerStream:
        return AnswerStream(
            self._request.converted,
            self._state.need_tokenizer(),
            answer_id=self._request.answer_id,
            model=self._state.model_name,
            created=self._request.created,
            prompt_tokens=len(self._request.token_ids),
            cached_tokens=cached_tokens,
            special_tokens=getattr(self._request.body, "skip_special_tokens", None) is False,
            gate=new_gate(
                self._state.need_tokenizer(),
                self._request.params,
                self._request.stop,
                self._request.stop_after,
            ),
        )


def _pair(
    token_id: int, table: dict[int, Logprob] | None, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    assert table is not None
    top = sorted(table.items(), key=lambda item: item[1].rank)[:num_top]
    return table[token_id].logprob, [(i, entry.logprob) for i, entry in top]
