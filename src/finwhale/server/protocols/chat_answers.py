"""Answers in the three chat protocols: tokens from the engine become responses and events."""

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import asdict
from typing import Any

import deepseek_recipe as recipe

from finwhale.chat.output import new_gate
from finwhale.request import ExpertIds, Logprob, PromptProgress
from finwhale.server.link.wire import Delta, LogprobTables
from finwhale.server.observe.logs import RequestLog
from finwhale.server.protocols.answer_stream import AnswerStream, Events
from finwhale.server.protocols.chat_requests import ChatRequest
from finwhale.server.protocols.schemas import ChatBody, MessagesBody
from finwhale.server.sse import event
from finwhale.server.state import ServerState

NO_EDITS: dict[str, Any] = {"applied_edits": []}  # Anthropic's answer about context management
THINKING_END = recipe.SpecialToken.ThinkingEnd.default_str()


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
    """The events of an answer. The first item is empty: the engine has accepted the request."""
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
        """Changes a whole choice, or that of a chunk. Returns whether the chunk must be sent."""
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
        entries = enumerate((table or {}).items())
        yield {
            str(i): asdict(entry) for n, (i, entry) in entries if n == 0 or entry.rank <= num_top
        } or None


def usage_of(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The usage of an answer in OpenAI's form."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def progress_of(progress: PromptProgress) -> dict[str, Any]:
    """How far a prompt is read, in llama.cpp's form."""
    counts = {"total": progress.total, "cache": progress.cached, "processed": progress.processed}
    return {"prompt_progress": {**counts, "time_ms": round(1000 * progress.seconds)}}


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


class RoutedExpertFields:
    """The routed experts of one prompt's continuations, as fields of an answer. `prompt` is the
    field of the prompt; empty: the request wants none."""

    def __init__(self) -> None:
        self.prompt: dict[str, Any] = {}
        self._outputs: dict[int, ExpertIds] = {}

    def add(self, delta: Delta) -> None:
        """Take the experts that a continuation's delta has, if any."""
        if delta.milestone is None:
            return
        if delta.milestone.prompt_routed_experts is not None:
            self.prompt = {"prompt_routed_experts": encoded(delta.milestone.prompt_routed_experts)}
        if delta.milestone.routed_experts is not None:
            self._outputs[delta.index] = delta.milestone.routed_experts

    def choice(self, index: int, num_tokens: int) -> dict[str, Any]:
        """The field `routed_experts` of a choice; empty: the request wants none.

        Args:
            num_tokens: number of tokens of the answer. The last one has no experts.
        """
        if index not in self._outputs:
            return {}
        return {"routed_experts": encoded(self._outputs[index][: max(0, num_tokens - 1)])}


def encoded(ids: ExpertIds) -> dict[str, Any]:
    """An array as JSON: its bytes in C order (`json_pieces` writes base64), shape and dtype."""
    return {"data": ids.tobytes(), "shape": list(ids.shape), "dtype": ids.dtype.name}


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
        body, prompts = request.body, [request.token_ids]
        progress = isinstance(body, ChatBody) and body.wants_progress
        async with state.generating(
            prompts, request.params, self._log, request.stop_after, body.priority, progress
        ) as generation:
            yield -1, []
            if self._log.stream:  # it opens now: the first token may come much later
                for index in range(request.params.n):
                    yield index, self._new_stream(cached_tokens=0).begin()
            async for delta in generation:
                if delta.progress is not None:
                    yield delta.index, [(None, self._progress_chunk(delta.progress))]
                    continue
                state.count(self._log, delta)
                self.routed_experts.add(delta)
                yield delta.index, self._feed(delta)
                # The parser may have met a stop string before the engine has ended the answer,
                # whose routed experts come at its end.
                if not request.params.return_routed_experts and all(
                    stream is not None and stream.finished for stream in self.streams
                ):
                    return

    def _progress_chunk(self, progress: PromptProgress) -> str:
        """A chunk of chat that tells how far the prompt is read."""
        head = {"id": self._request.answer_id, "object": "chat.completion.chunk"}
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}
        more = {"model": self._state.model_name, "choices": [choice], **progress_of(progress)}
        return json.dumps({**head, **more})

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
        request, tokenizer = self._request, self._state.need_tokenizer()
        return AnswerStream(
            request.converted,
            tokenizer,
            answer_id=request.answer_id,
            model=self._state.model_name,
            created=request.created,
            prompt_tokens=len(request.token_ids),
            cached_tokens=cached_tokens,
            special_tokens=getattr(request.body, "skip_special_tokens", None) is False,
            gate=new_gate(tokenizer, request.params, request.stop, request.stop_after),
        )


def _pair(
    token_id: int, table: dict[int, Logprob] | None, num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    assert table is not None
    top = sorted(table.items(), key=lambda item: item[1].rank)[:num_top]
    return table[token_id].logprob, [(i, entry.logprob) for i, entry in top]
