"""What the three chat protocols share: a request prepared, run, and turned into their events."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from finwhale.chat.protocols import AnswerStream, ProtocolName, ProtocolRequest
from finwhale.request import Logprob, SamplingParams
from finwhale.server.errors import ApiError
from finwhale.server.logs import RequestLog
from finwhale.server.sampling import sampling_params
from finwhale.server.schemas import ChatBody, MessagesBody, ResponsesBody, _Sampling
from finwhale.server.state import ServerState
from finwhale.server.structured import plan_chat
from finwhale.server.wire import Delta

ConversationBody = ChatBody | ResponsesBody | MessagesBody
Events = list[tuple[str | None, str]]

# Fields that deepseek-recipe does not know, or reads more narrowly than this server.
_OWN_FIELDS = frozenset(_Sampling.model_fields) - {"stream", "temperature", "top_p"} | {
    "n",
    "seed",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
    "previous_response_id",
    "background",
    "client_metadata",
    "modalities",
}


@dataclass(slots=True)
class Turn:
    """A conversation ready for its next message.

    Attributes:
        converted: deepseek-recipe's view.
        token_ids: the prompt.
        stop: strings that end the content.
        stop_after: the token after which the engine looks for them; None: from the beginning.
    """

    converted: ProtocolRequest
    token_ids: list[int]
    params: SamplingParams
    stop: tuple[str, ...]
    stop_after: int | None
    answer_id: str
    priority: int = 0
    created: int = field(default_factory=lambda: int(time.time()))


async def prepare(
    state: ServerState, protocol: ProtocolName, body: ConversationBody, answer_id: str
) -> Turn:
    """Checks and renders a request. Raises RequestError, ApiError."""
    state.check_model(body.model)
    turn = await asyncio.to_thread(_prepare, state, protocol, body, answer_id)
    await state.grammars.check(turn.params.guide)
    return turn


def _prepare(
    state: ServerState, protocol: ProtocolName, body: ConversationBody, answer_id: str
) -> Turn:
    template = state.need_template()
    plan = plan_chat(
        state.need_tokenizer(),
        protocol,
        plain_fields(body),
        default_thinking=state.config.default_thinking,
    )
    converted = plan.converted
    options = converted.request.inference_options
    prompt = template.encode(converted.request)
    state.check_prompt(prompt.token_ids)
    max_tokens = options.max_tokens
    if max_tokens is None:
        # The format's default for the way of thinking, within the context.
        max_tokens = converted.request.resolve_max_tokens(
            len(prompt.token_ids), state.ready.max_model_len
        )
    stop = tuple(converted.request.parsing_options.stop_sequences)
    thinking = converted.request.conversation.thinking_mode
    params = sampling_params(
        body,
        max_tokens=max_tokens,
        # Inside tool calls stop strings mean nothing, and only the parser knows where those are.
        stop=() if plan.has_tools else stop,
        logprobs=_wanted_logprobs(body, options),
        guide=plan.guide,
        defaults={"temperature": options.temperature, "top_p": options.top_p},
    )
    return Turn(
        converted,
        prompt.token_ids,
        params,
        stop,
        template.end_of_thinking if thinking else None,
        answer_id,
        body.priority or 0,
    )


def plain_fields(body: ConversationBody) -> dict[str, Any]:
    """What the client sent, less what deepseek-recipe is not to see."""
    sent = body.model_dump(exclude_unset=True)
    return {k: v for k, v in sent.items() if k not in _OWN_FIELDS and v is not None}


def _wanted_logprobs(body: ConversationBody, options: Any) -> int | None:
    if isinstance(body, MessagesBody) or not options.logprobs:
        return None
    return int(options.top_logprobs or 0)


class Answers:
    """The n answers of one turn, each parsed as it comes."""

    def __init__(self, state: ServerState, turn: Turn, log: RequestLog) -> None:
        self._state = state
        self._turn = turn
        self._log = log
        self.streams: list[AnswerStream | None] = [None] * turn.params.n

    async def run(self) -> AsyncGenerator[tuple[int, Events], None]:
        """Yields which answer goes on, and its events; the first item, (-1, []), says that the
        engine has taken the request.

        Raises:
            what `ServerState.generating` does; ApiError: the engine could not finish it.
        """
        turn, state = self._turn, self._state
        async with state.generating(
            [turn.token_ids], turn.params, self._log, turn.stop_after, turn.priority
        ) as generation:
            yield -1, []
            async for delta in generation:
                state.metrics.delta(self._log, delta)
                if delta.error is not None:
                    raise ApiError(500, delta.error, code="generation_failed")
                yield delta.index, self._feed(delta)
                # The parser may have met a stop string before the engine's end.
                if all(stream is not None and stream.finished for stream in self.streams):
                    return

    def _feed(self, delta: Delta) -> Events:
        stream = self.streams[delta.index]
        events: Events = []
        if stream is None:
            stream = self.streams[delta.index] = self._new_stream(delta)
            events += stream.begin()
        if stream.finished:
            return events
        ids = delta.token_ids
        # A stop token is no part of the answer.
        stopped = delta.finish_reason == "stop" and isinstance(delta.stop_reason, int)
        logprobs = None
        if delta.logprobs is not None:
            num_top = self._turn.params.logprobs or 0
            logprobs = [_pair(i, t, num_top) for i, t in zip(ids, delta.logprobs, strict=True)]
        events += stream.feed(ids, logprobs, unseen_last=stopped)
        if delta.finish_reason is not None:
            events += stream.finish("length" if delta.finish_reason == "length" else "stop")
        return events

    def _new_stream(self, delta: Delta) -> AnswerStream:
        return AnswerStream(
            self._turn.converted,
            self._state.need_tokenizer(),
            answer_id=self._turn.answer_id,
            model=self._state.model_name,
            created=self._turn.created,
            prompt_tokens=len(self._turn.token_ids),
            cached_tokens=delta.cached_tokens,
        )


def _pair(
    token_id: int, table: dict[int, Logprob], num_top: int
) -> tuple[float, list[tuple[int, float]]]:
    top = sorted(table.items(), key=lambda item: item[1].rank)[:num_top]
    return table[token_id].logprob, [(i, entry.logprob) for i, entry in top]
