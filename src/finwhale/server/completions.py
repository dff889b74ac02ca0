"""/v1/completions: continues texts or token ids."""

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from finwhale.errors import RequestError
from finwhale.request import SamplingParams
from finwhale.server.chat_requests import format_guide
from finwhale.server.client import Generation
from finwhale.server.errors import ApiError
from finwhale.server.logs import RequestLog
from finwhale.server.schemas import CompletionBody
from finwhale.server.sse import event
from finwhale.server.state import ServerState
from finwhale.server.wire import Delta

DEFAULT_MAX_TOKENS = 16  # as in OpenAI's protocol


@dataclass(slots=True)
class CompletionJob:
    """A request that is ready to run.

    Attributes:
        prompts: the token ids of each prompt.
        echoes: the text with which the answers to each prompt begin; "" without echo.
        params: None: generate nothing (max_tokens 0 with echo).
        include_usage: whether a stream ends with a chunk of usage.
    """

    prompts: list[list[int]]
    echoes: list[str]
    params: SamplingParams | None
    n: int
    priority: int
    include_usage: bool
    answer_id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")

    def generating(
        self, state: ServerState, log: RequestLog
    ) -> AbstractAsyncContextManager[Generation]:
        assert self.params is not None
        return state.generating(self.prompts, self.params, log, priority=self.priority)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


async def prepare(state: ServerState, body: CompletionBody, body_bytes: int) -> CompletionJob:
    """Checks a body and encodes its prompts. Raises RequestError, ApiError."""
    state.check_model(body.model)
    job = await state.in_thread(body_bytes, lambda: _prepare(state, body))
    if job.params is not None:
        await state.grammars.check(job.params.guide)
    return job


def _prepare(state: ServerState, body: CompletionBody) -> CompletionJob:
    n = body.n or 1
    if body.suffix:
        raise RequestError("suffix is not supported")
    if body.best_of is not None and body.best_of != n:
        raise RequestError("best_of is not supported unless it equals n")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs is not supported: only generated tokens have them")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise RequestError("max_tokens must be at least 1 (0 only with echo)")
    given = _prompts(body.prompt)
    if not given:
        raise RequestError("prompt must not be an empty list")
    state.check_choices(len(given) * n)
    prompts = [_encode(state, prompt) for prompt in given]
    echoes = [state.need_tokenizer().decode(p) if body.echo else "" for p in prompts]
    params = None
    if max_tokens:
        params = body.sampling_params(
            max_tokens=max_tokens,
            stop=body.stop_strings(),
            logprobs=body.logprobs,
            guide=format_guide(body.response_format),
        )
    return CompletionJob(prompts, echoes, params, n, body.priority or 0, body.wants_usage)


def _prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return list(prompt)


def _encode(state: ServerState, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        wrong = next((i for i in prompt if i >= state.ready.vocab_size), None)
        if wrong is not None:
            raise RequestError(f"prompt token id {wrong} is not in 0..{state.ready.vocab_size - 1}")
        ids = prompt
    elif not prompt:
        raise RequestError("the prompt is empty: give at least one character")
    else:
        state.check_text(prompt)
        ids = [state.ready.bos_token_id, *state.need_tokenizer().encode(prompt)]
    if not ids:
        raise RequestError("the prompt is empty: give at least one token")
    state.check_prompt(ids)
    return ids


async def complete(state: ServerState, job: CompletionJob, log: RequestLog) -> dict[str, Any]:
    """The response to a request that does not stream."""
    texts = [[job.echoes[i // job.n]] for i in range(len(job.prompts) * job.n)]
    reasons: list[str] = ["length"] * len(texts)
    tables = [_Logprobs() for _ in texts]
    if job.params is not None:
        async with job.generating(state, log) as generation:
            async for delta in generation:
                _check(state, log, delta)
                texts[delta.index].append(delta.text)
                tables[delta.index].add(delta)
                if delta.finish_reason is not None:
                    reasons[delta.index] = delta.finish_reason
    with_logprobs = job.params is not None and job.params.logprobs is not None
    choices = [
        {
            "index": i,
            "text": "".join(text),
            "logprobs": tables[i].take(job.params) if with_logprobs else None,
            "finish_reason": reasons[i],
        }
        for i, text in enumerate(texts)
    ]
    return {**_head(state, job), "choices": choices, "usage": _usage(job, log)}


async def stream(
    state: ServerState, job: CompletionJob, log: RequestLog
) -> AsyncGenerator[bytes, None]:
    """The events of an answer. The first item, empty, says that the engine has accepted the
    request."""
    head = _head(state, job)
    tables = [_Logprobs() for _ in range(len(job.prompts) * job.n)]

    def chunk(index: int, text: str, reason: str | None, logprobs: Any = None) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if job.include_usage else {}
        return event(json.dumps({**head, "choices": [choice], **usage}))

    if job.params is None:
        yield b""
        for i in range(len(tables)):
            yield chunk(i, job.echoes[i // job.n], "length")
    else:
        async with job.generating(state, log) as generation:
            yield b""
            for i in range(len(tables)):
                if job.echoes[i // job.n]:
                    yield chunk(i, job.echoes[i // job.n], None)
            async for delta in generation:
                _check(state, log, delta)
                tables[delta.index].add(delta)
                logprobs = tables[delta.index].take(job.params)
                yield chunk(delta.index, delta.text, delta.finish_reason, logprobs)
    if job.include_usage:
        yield event(json.dumps({**head, "choices": [], "usage": _usage(job, log)}))
    yield event("[DONE]")


def _check(state: ServerState, log: RequestLog, delta: Delta) -> None:
    state.metrics.delta(log, delta)
    if delta.error is not None:
        raise ApiError(500, delta.error, code="generation_failed")


def _head(state: ServerState, job: CompletionJob) -> dict[str, Any]:
    return {
        "id": job.answer_id,
        "object": "text_completion",
        "created": state.now(),
        "model": state.model_name,
    }


def _usage(job: CompletionJob, log: RequestLog) -> dict[str, Any]:
    return {
        "prompt_tokens": job.num_prompt_tokens,
        "completion_tokens": log.output_tokens,
        "total_tokens": job.num_prompt_tokens + log.output_tokens,
        "prompt_tokens_details": {"cached_tokens": log.cached_tokens},
    }


class _Logprobs:
    """The protocol's table of log-probabilities for one choice."""

    def __init__(self) -> None:
        self._offset = 0
        self._new: list[Any] = []

    def add(self, delta: Delta) -> None:
        self._new += zip(delta.token_ids, delta.logprobs or (), strict=False)

    def take(self, params: SamplingParams | None) -> dict[str, Any] | None:
        """The entries since the last call; None if the request wants no log-probabilities."""
        if params is None or params.logprobs is None:
            return None
        found: dict[str, Any] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, table in self._new:
            own = table[token_id]
            top = sorted(table.values(), key=lambda entry: entry.rank)[: params.logprobs]
            found["tokens"].append(own.decoded_token)
            found["token_logprobs"].append(own.logprob)
            found["top_logprobs"].append({e.decoded_token: e.logprob for e in top})
            found["text_offset"].append(self._offset)
            self._offset += len(own.decoded_token)
        self._new = []
        return found
