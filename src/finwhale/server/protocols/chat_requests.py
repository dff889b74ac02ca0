"""Requests of the three chat protocols: a checked body becomes a `ChatRequest`."""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import deepseek_recipe as recipe

from finwhale.chat.answer_grammar import AnswerForm, AnswerGrammar, ToolChoice, WantedFormat
from finwhale.chat.template import ProtocolName, ProtocolRequest, convert
from finwhale.errors import RequestError
from finwhale.request import SamplingParams
from finwhale.server.errors import ApiError
from finwhale.server.observe.logs import RequestLog
from finwhale.server.protocols import answer_formats, schemas
from finwhale.server.state import ServerState

ChatProtocolBody = schemas.ChatBody | schemas.ResponsesBody | schemas.MessagesBody

_ID_PREFIXES: dict[ProtocolName, str] = {
    "chat": "chatcmpl-",
    "responses": "resp_",
    "messages": "msg_",
}
# deepseek-recipe reads these fields as this server does.
_SHARED_FIELDS = {"stream", "temperature", "top_p", "stop", "stream_options", "user"}
# deepseek-recipe does not know these fields, or accepts fewer values than this server.
_OWN_FIELDS = frozenset(schemas.OpenAIBody.model_fields) - _SHARED_FIELDS | {
    "previous_response_id",
    "background",
    "client_metadata",
    "modalities",
    "verbosity",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "separate_reasoning",
    "stream_reasoning",
    "include_reasoning",
    "context_management",
    "cache_control",
}


@dataclass(slots=True)
class ChatRequest:
    """A conversation that is ready for its next message.

    Attributes:
        body: the request as the client sent it.
        converted: the request as deepseek-recipe reads it.
        token_ids: the prompt.
        stop: stop strings of the content.
        stop_after: the token after which they count; None: they count from the beginning.
        ignored: what of the schemas the answer need not hold.
    """

    body: ChatProtocolBody
    converted: ProtocolRequest
    token_ids: list[int]
    params: SamplingParams
    stop: tuple[str, ...]
    stop_after: int | None
    answer_id: str
    ignored: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))


async def prepare(state: ServerState, body: ChatProtocolBody, log: RequestLog) -> ChatRequest:
    """Checks a body, converts it and encodes its prompt. Raises RequestError, ApiError."""
    state.check_model(body.model)
    request, made = await state.in_thread(log.body_bytes, lambda: _prepare(state, body))
    guide, request.ignored = await answer_formats.held_grammar(state, made, log)
    request.params = replace(request.params, guide=guide)
    return request


def defaults(state: ServerState, *, thinking: bool) -> SamplingParams:
    """The sampling parameters of a chat request that gives none. Raises RequestError, ApiError."""
    asked = {"type": "enabled" if thinking else "disabled"}
    messages = [{"role": "user", "content": ""}]
    body = schemas.ChatBody(model=state.model_name, messages=messages, thinking=asked)
    return _prepare(state, body)[0].params


def convert_body(
    state: ServerState, body: ChatProtocolBody | schemas.CountTokensBody
) -> tuple[ProtocolRequest, WantedFormat | None, ToolChoice]:
    """Converts a checked body to a conversation. Raises RequestError and ApiError.

    Returns:
        The request, whose conversation has the tools that the model may call; the format of the
        answer; and the calls that it may have.
    """
    protocol = body.protocol
    fields = plain_fields(body)
    if isinstance(body, schemas.MessagesBody) and body.thread is not None:
        message = "thread is not supported: send the whole conversation in messages"
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        raise ApiError(400, message, code="unsupported_value", param="thread", details=details)
    if isinstance(body, schemas.CountTokensBody):
        fields["max_tokens"] = 1  # deepseek-recipe needs a value, which no prompt depends on
    if protocol == "responses":  # whose answer repeats these fields
        defaults = state.sampling_defaults
        fields = {n: defaults[n] for n in ("temperature", "top_p") if n in defaults} | fields
    original = dict(fields)
    if isinstance(body, schemas.ChatBody):
        _take_extensions(body, fields)
    wanted = answer_formats.take_own_format(protocol, fields)
    if isinstance(body, schemas.ChatBody):
        wanted = answer_formats.only_format(wanted, body, fields.get("response_format"))
    choice = answer_formats.take_choice(protocol, fields)
    given = original.get("tool_choice")
    if isinstance(given, Mapping) and given.get("type") == "allowed_tools":
        # deepseek-recipe does not know this type, which an answer of Responses would repeat.
        original["tool_choice"] = given.get("mode")
    default_thinking = state.config.default_thinking
    if protocol == "responses":
        default_thinking = _default_thinking(fields, default_thinking)
    converted = convert(
        protocol,
        fields,
        default_thinking=default_thinking,
        echo_body=original,
        response_schema=wanted[1] if protocol == "messages" and wanted else None,
        dialect=state.need_template().dialect,
    )
    wanted = wanted or answer_formats.recipe_format(converted.conversation)
    named = None if wanted is None else answer_formats.named_format(protocol, original, wanted)
    return converted, named, choice


def _prepare(
    state: ServerState, body: ChatProtocolBody
) -> tuple[ChatRequest, AnswerGrammar | None]:
    template = state.need_template()
    converted, wanted, choice = convert_body(state, body)
    asked, conversation = converted.request, converted.conversation
    options = asked.inference_options
    stage = converted.parsing_options.thinking_initial_stage
    thinks = stage is not None and stage.starts_in_reasoning()
    end_of_thinking = template.end_of_thinking if thinks else None

    tools = answer_formats.tool_signatures(conversation.tools)
    hold: Literal["possible", "asked"] = "possible" if state.ready.tool_grammar else "asked"
    tokenizer, dialect = state.need_tokenizer(), template.dialect
    form = AnswerForm(tokenizer, wanted, tools, choice, end_of_thinking, hold, dialect)
    grammar = form.grammar()
    prompt = template.encode(converted, state.check_text)
    state.check_prompt(prompt.token_ids)
    max_tokens = options.max_tokens
    if max_tokens is None:
        # The chat format has a default for each way of thinking, within the context.
        max_tokens = asked.resolve_max_tokens(len(prompt.token_ids), state.ready.max_model_len)
    stop = tuple(converted.parsing_options.stop_sequences)
    params = body.sampling_params(
        max_tokens=max_tokens,
        # Stop strings mean nothing inside tool calls, and only the parser knows where those are.
        stop=() if conversation.tools else stop,
        logprobs=_wanted_logprobs(body, options),
        defaults={
            "temperature": options.temperature,
            "top_p": options.top_p,
            **state.sampling_defaults,
        },
    )
    name = getattr(body, "request_id", None) or uuid.uuid4().hex
    answer_id = _ID_PREFIXES[body.protocol] + name
    request = ChatRequest(
        body, converted, prompt.token_ids, params, stop, end_of_thinking, answer_id
    )
    return request, grammar


def plain_fields(body: ChatProtocolBody | schemas.CountTokensBody) -> answer_formats.Fields:
    """The fields that the client sent, without those that deepseek-recipe must not see."""
    sent = body.model_dump(exclude_unset=True)
    return {k: v for k, v in sent.items() if k not in _OWN_FIELDS and v is not None}


def _take_extensions(body: schemas.ChatBody, fields: answer_formats.Fields) -> None:
    """Replaces fields that deepseek-recipe does not know by those that it knows. Raises
    RequestError: a value is not supported, or fields contradict each other."""
    body.check_stream()
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise RequestError(
                f"max_tokens ({body.max_tokens}) and max_completion_tokens "
                f"({body.max_completion_tokens}) mean the same: give one of them"
            )
        fields["max_tokens"] = body.max_completion_tokens
    for name, value in _template_fields(body.chat_template_kwargs or {}).items():
        if name in fields:
            raise RequestError(f"{name} is given twice: as a field and in chat_template_kwargs")
        fields[name] = value
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise RequestError(
                "continue_final_message needs add_generation_prompt to be false or absent"
            )
        *others, last = fields["messages"]
        if last.get("role") != "assistant":
            raise RequestError("continue_final_message needs an assistant's message at the end")
        fields["messages"] = [*others, {**last, "prefix": True}]
    elif body.add_generation_prompt is False:
        raise RequestError(
            "add_generation_prompt: false is only supported with continue_final_message"
        )


def _default_thinking(fields: answer_formats.Fields, default: bool) -> bool:
    """Whether the model thinks if a Responses request has no reasoning effort.

    deepseek-recipe does not read `thinking` in this protocol.

    Raises:
        RequestError: `thinking` is not valid, or contradicts the reasoning effort.
    """
    if "thinking" not in fields:
        return default
    kind = fields["thinking"].get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise RequestError(f"thinking.type must be enabled, adaptive or disabled, got {kind!r}")
    thinks: bool = kind != "disabled"
    effort = fields.get("reasoning", {}).get("effort")
    if effort is not None and (effort != "none") != thinks:
        raise RequestError(f"thinking is {kind}, but reasoning.effort is {effort!r}: omit one")
    return thinks


def _template_fields(kwargs: answer_formats.Fields) -> answer_formats.Fields:
    """The fields of a body that replace its `chat_template_kwargs`. Raises RequestError."""
    found: answer_formats.Fields = {}
    for name, value in kwargs.items():
        if name in ("thinking", "enable_thinking") and isinstance(value, bool):
            if found.get("thinking", value) is not value:
                raise RequestError("chat_template_kwargs: thinking and enable_thinking differ")
            found["thinking"] = value
        elif name == "reasoning_effort" and (value is None or type(value) in (str, int)):
            if value is not None:
                found[name] = value
        else:
            raise RequestError(
                "chat_template_kwargs may have thinking and enable_thinking (true or false) and "
                f"reasoning_effort (a string, or an integer), got {name!r}: {str(value)[:40]!r}"
            )
    if "thinking" in found:
        found["thinking"] = {"type": "enabled" if found["thinking"] else "disabled"}
    return found


def _wanted_logprobs(body: ChatProtocolBody, options: recipe.InferenceOptions) -> int | None:
    asked = isinstance(body, schemas.ResponsesBody) and schemas.LOGPROBS in (body.include or ())
    if isinstance(body, schemas.MessagesBody) or not (options.logprobs or asked):
        return None
    return int(options.top_logprobs or 0)
