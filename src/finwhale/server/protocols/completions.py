"""/v1/completions: continues texts or token ids."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from finwhale.chat.answer_grammar import AnswerForm
from finwhale.chat.detokenizer import Detokenizer
from finwhale.errors import RequestError
from finwhale.request import MAX_PROMPT_LOGPROBS, Logprob, SamplingParams
from finwhale.server.link.client import Generation
from finwhale.server.link.wire import Delta, LogprobTables
from finwhale.server.observe.logs import RequestLog
from finwhale.server.protocols.answer_formats import completion_format, held_grammar
from finwhale.server.protocols.chat_answers import (
    RoutedExpertFields,
    progress_of,
    prompt_logprobs,
    usage_of,
)
from finwhale.server.protocols.json_answer import in_turns, json_pieces
from finwhale.server.protocols.schemas import CompletionBody
from finwhale.server.sse import event
from finwhale.server.state import ServerState

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's protocol
MAX_VALUES = 4 * MAX_PROMPT_LOGPROBS  # of all prompts and choices of an answer


@dataclass
class CompletionJob:
    """A request that is ready to run.

    Attributes:
        prompts: the token ids of each prompt.
        body: the request.
        echoes: the text with which the answers to each prompt begin; "" without echo.
        params: None: the engine has nothing to do (max_tokens 0 with echo, without logprobs).
        ignored: what of a schema the answers need not hold.
    """

    prompts: list[list[int]]
    body: CompletionBody
    echoes: list[str]
    params: SamplingParams | None
    n: int
    ignored: tuple[str, ...] = ()

    @cached_property
    def answer_id(self) -> str:
        return f"cmpl-{self.body.request_id or uuid.uuid4().hex}"

    def generating(
        self, state: ServerState, log: RequestLog
    ) -> AbstractAsyncContextManager[Generation]:
        assert self.params is not None
        body = self.body
        return state.generating(
            self.prompts, self.params, log, priority=body.priority, progress=body.wants_progress
        )

    @property
    def generates(self) -> bool:
        """Whether the answer has generated tokens. Otherwise one is generated and left out."""
        return self.body.max_tokens != 0

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the table of log-probabilities begins with the prompt's."""
        return bool(self.body.echo) and self.body.logprobs is not None

    def same_prompt(self, index: int) -> range:
        """The indices of all continuations of the prompt that continuation `index` has."""
        first = index - index % self.n
        return range(first, first + self.n)


async def prepare(state: ServerState, body: CompletionBody, log: RequestLog) -> CompletionJob:
    """Checks a body and encodes its prompts. Raises RequestError, ApiError."""
    state.check_model(body.model)
    job = await state.in_thread(log.body_bytes, lambda: _prepare(state, body))
    if job.params is not None:
        form = AnswerForm(None, completion_format(body))
        made = await state.in_thread(log.body_bytes, form.grammar)
        guide, job.ignored = await held_grammar(state, made, log)
        job.params = replace(job.params, guide=guide)
    return job


def _prepare(state: ServerState, body: CompletionBody) -> CompletionJob:
    n = body.n or 1
    if body.suffix:
        raise RequestError("suffix is not supported")
    if body.best_of is not None and body.best_of != n:
        raise RequestError("best_of is not supported unless it equals n")
    body.check_stream()
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 (0 only with echo)")
    one = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
    given: Any = [body.prompt] if one else body.prompt
    if not given:
        raise RequestError("prompt must not be an empty list")
    state.check_choices(len(given) * n)
    with_bos = body.add_special_tokens is not False
    prompts = [_encode(state, prompt, with_bos) for prompt in given]
    skip = body.skip_special_tokens is not False
    echoes = [state.need_tokenizer().decode(p, skip) if body.echo else "" for p in prompts]
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    num_top = max((one for one in wanted if one is not None), default=None)
    values = n * sum(map(len, prompts)) * (1 + (num_top or 0))
    if num_top is not None and values > MAX_VALUES:
        raise RequestError(
            f"the answer would have {values} log-probabilities of prompts; it may have {MAX_VALUES}"
        )
    params = None
    if max_tokens or num_top is not None or body.return_routed_experts:
        params = body.sampling_params(
            max_tokens=max(1, max_tokens),
            stop=body.stop_strings(),
            logprobs=body.logprobs,
            defaults=state.sampling_defaults,
        )
        params = replace(params, prompt_logprobs=num_top)
    return CompletionJob(prompts, body, echoes, params, n)


def _encode(state: ServerState, prompt: str | list[int], with_bos: bool) -> list[int]:
    if isinstance(prompt, list):
        state.check_ids(prompt)
        ids = prompt
    elif not prompt:
        raise RequestError("the prompt is empty: give at least one character")
    else:
        ids = state.encode(prompt, with_bos=with_bos)
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    state.check_prompt(ids)
    return ids


async def complete(state: ServerState, job: CompletionJob, log: RequestLog) -> dict[str, Any]:
    """The response to a request that does not stream."""
    choices = _choices(state, job)
    experts = [RoutedExpertFields() for _ in job.prompts]
    if job.params is not None:
        async with job.generating(state, log) as generation:
            async for delta in generation:
                state.count(log, delta)
                if delta.prompt_logprobs is not None:
                    for i in job.same_prompt(delta.index):
                        choices[i].add_prompt(delta.prompt_logprobs)
                experts[delta.index // job.n].add(delta)
                choices[delta.index].add(delta)
    found = []
    for i, choice in enumerate(choices):
        routed = experts[i // job.n]
        more = {**routed.prompt, **routed.choice(i, choice.num_tokens)}
        found.append({"index": i, **choice.whole(), **more})
    return {**_head(state, job), "choices": found, "usage": _usage(job, log)}


async def stream(
    state: ServerState, job: CompletionJob, log: RequestLog
) -> AsyncGenerator[bytes, None]:
    """The events of an answer. The first item is empty: the engine has accepted the request."""
    head = _head(state, job)
    choices = _choices(state, job)

    def usage(choice: _Choice) -> dict[str, Any]:
        if job.body.wants_continuous_usage:
            return {"usage": usage_of(len(choice.prompt), choice.num_tokens)}
        return {"usage": None} if job.body.wants_usage else {}

    def chunk(index: int) -> Iterator[bytes]:
        choice = choices[index]
        found = {**head, "choices": [{"index": index, **choice.new()}], **usage(choice)}
        if job.body.logprobs is None:
            yield event(json.dumps(found))
        else:
            yield from json_pieces(found, "data: ", "\n\n")

    async def chunks(indices: Iterable[int]) -> AsyncGenerator[bytes, None]:
        for index in indices:
            async for piece in in_turns(chunk(index), state.turn):
                yield piece

    if job.params is None:
        yield b""
        async for piece in chunks(range(len(choices))):
            yield piece
    else:
        async with job.generating(state, log) as generation:
            yield b""
            if job.body.echo and not job.echoes_logprobs:
                async for piece in chunks(range(len(choices))):
                    yield piece
            async for delta in generation:
                if delta.progress is not None:
                    empty = {"text": "", "logprobs": None, "finish_reason": None}
                    found = {**head, "choices": [{"index": delta.index, **empty}]}
                    more = {**usage(choices[delta.index]), **progress_of(delta.progress)}
                    yield event(json.dumps({**found, **more}))
                    continue
                state.count(log, delta)
                due = []
                if delta.prompt_logprobs is not None:
                    for i in job.same_prompt(delta.index):
                        choices[i].add_prompt(delta.prompt_logprobs)
                        due += [i] if choices[i].started and i != delta.index else []
                choices[delta.index].add(delta)
                due += [delta.index] if choices[delta.index].complete_prompt else []
                async for piece in chunks(due):
                    yield piece
    if job.body.wants_usage:
        yield event(json.dumps({**head, "choices": [], "usage": _usage(job, log)}))
    yield event("[DONE]")


def _head(state: ServerState, job: CompletionJob) -> dict[str, Any]:
    found = {"id": job.answer_id, "object": "text_completion", "created": int(time.time())}
    return {**found, "model": state.model_name}


def _usage(job: CompletionJob, log: RequestLog) -> dict[str, Any]:
    output_tokens = log.output_tokens if job.generates else 0
    details = {"prompt_tokens_details": {"cached_tokens": log.cached_tokens}}
    return usage_of(sum(map(len, job.prompts)), output_tokens) | details


def _choices(state: ServerState, job: CompletionJob) -> "list[_Choice]":
    return [_Choice(state, job, prompt) for prompt in range(len(job.prompts)) for _ in range(job.n)]


class _Choice:
    """One continuation of a prompt in the protocol's form, whole or in pieces.

    Attributes:
        prompt: the token ids of the prompt.
        num_tokens: number of generated tokens that the answer has.
        started: whether it has output that `new` has not returned.
        complete_prompt: whether everything about the prompt is known.
    """

    def __init__(self, state: ServerState, job: CompletionJob, prompt: int) -> None:
        self._state, self._job = state, job
        self.prompt = job.prompts[prompt]
        self.num_tokens = 0
        self.complete_prompt = not job.echoes_logprobs
        self.started = False
        self._first = True
        self._text = job.echoes[prompt]
        self._ids: list[int] = []
        # Runs of tokens, each with their tables.
        self._runs: list[tuple[list[int], LogprobTables]] = []
        self._offset = 0
        self._detokenizer: Detokenizer | None = None
        if state.tokenizer is not None:
            skips = job.body.skip_special_tokens is not False
            self._detokenizer = Detokenizer(state.tokenizer, skips)
        self._prompt_logprobs: LogprobTables = []
        self._reason: str | None = None if job.generates else "length"

    def add_prompt(self, tables: LogprobTables) -> None:
        """Adds the log-probabilities of the prompt."""
        self._prompt_logprobs = tables
        self.complete_prompt = True
        if self._job.echoes_logprobs:
            self._runs.insert(0, (self.prompt, tables))

    def add(self, delta: Delta) -> None:
        self.started = True
        if not self._job.generates:
            return
        self._text += delta.text
        self._ids += delta.token_ids
        self.num_tokens += len(delta.token_ids)
        self._runs.append((delta.token_ids, delta.logprobs or []))
        self._reason = delta.finish_reason

    def new(self) -> dict[str, Any]:
        """The choice with the output that has been added since the last call."""
        body = self._job.body
        found: dict[str, Any] = {"text": self._text, "logprobs": self._table()}
        found["finish_reason"] = self._reason
        if body.return_token_ids:
            found["token_ids"] = self._ids
            if self._first:
                found["prompt_token_ids"] = self.prompt
        self._text, self._ids, self._first, self.started = "", [], False, False
        return found

    def whole(self) -> dict[str, Any]:
        """The choice of an answer that does not stream."""
        found = self.new()
        if self._job.body.prompt_logprobs is not None:
            num_top = self._job.body.prompt_logprobs
            found["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs, num_top)
        return found

    def _table(self) -> dict[str, Any] | None:
        """The new log-probabilities, made as they are written; None if the request wants none."""
        num_top = self._job.body.logprobs
        if num_top is None:
            return None
        runs, self._runs = self._runs, []

        def entries() -> Iterator[tuple[int, dict[int, Logprob] | None]]:
            for ids, tables in runs:
                yield from zip(ids, tables, strict=False)

        return {
            "tokens": (self._spelling(i) for i, _ in entries()),
            "token_logprobs": (table and table[i].logprob for i, table in entries()),
            "top_logprobs": (table and self._top(i, table, num_top) for i, table in entries()),
            "text_offset": (self._next_offset(i) for i, _ in entries()),
        }

    def _top(self, token_id: int, table: dict[int, Logprob], num_top: int) -> dict[str, float]:
        top: dict[str, float] = {}
        ranked = sorted(table.items(), key=lambda item: item[1].rank)
        for index, (i, entry) in enumerate(ranked):
            # As in OpenAI's API, the token itself is there, too.
            if index < num_top or i == token_id:
                # Several tokens may have the same text. Keep the most likely one.
                top.setdefault(self._spelling(i), entry.logprob)
        return top

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.next(token_id))
        return offset

    def _spelling(self, token_id: int) -> str:
        """A token's text; as in OpenAI's API, its bytes if they are not whole characters."""
        tokenizer = self._state.tokenizer
        if tokenizer is None:
            return ""
        data = tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
