"""Requests of the three chat protocols: a checked body becomes a `ChatRequest`.

A request may ask for a format of its answer or for a call of a tool. This module writes the grammar
for it, within the limits of `chat.grammar_limits`, but compiles no grammar: `ServerState.grammars`
checks it in another process.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import deepseek_recipe as recipe

from finwhale.chat.grammar import json_guide, json_lark, lark_guide, regex_guide, tool_guide
from finwhale.chat.template import ProtocolName, ProtocolRequest, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.chat.tool_grammar import ToolGrammar, ToolSignature
from finwhale.errors import RequestError
from finwhale.request import Guide, SamplingParams
from finwhale.server.schemas import ChatBody, MessagesBody, ResponsesBody, SamplingBody
from finwhale.server.state import ServerState

ChatProtocolBody = ChatBody | ResponsesBody | MessagesBody
Fields = dict[str, Any]
Format = tuple[Literal["json", "regex", "grammar"], Any]

_ANY_OBJECT = {"type": "object"}
_ID_PREFIXES: dict[ProtocolName, str] = {
    "chat": "chatcmpl-",
    "responses": "resp_",
    "messages": "msg_",
}
# deepseek-recipe does not know these fields, or accepts fewer values than this server.
_OWN_FIELDS = frozenset(SamplingBody.model_fields) - {"stream", "temperature", "top_p"} | {
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
class ChatRequest:
    """A conversation that is ready for its next message.

    Attributes:
        converted: the request as deepseek-recipe reads it.
        token_ids: the prompt.
        stop_after: the token after which the engine looks for stop strings; None: it looks for
            them from the beginning.
        include_usage: whether a stream of chat completions ends with a chunk of usage.
    """

    converted: ProtocolRequest
    token_ids: list[int]
    params: SamplingParams
    stop_after: int | None
    priority: int
    include_usage: bool
    answer_id: str
    created: int = field(default_factory=lambda: int(time.time()))


async def prepare(
    state: ServerState, protocol: ProtocolName, body: ChatProtocolBody, body_bytes: int
) -> ChatRequest:
    """Checks a body, converts it and encodes its prompt. Raises RequestError, ApiError."""
    state.check_model(body.model)
    request = await state.in_thread(body_bytes, lambda: _prepare(state, protocol, body))
    await state.grammars.check(request.params.guide)
    return request


def _prepare(state: ServerState, protocol: ProtocolName, body: ChatProtocolBody) -> ChatRequest:
    template = state.need_template()
    fields = plain_fields(body)
    original = dict(fields)
    wanted = _take_own_format(protocol, fields)
    choice = _take_choice(protocol, fields)
    converted = convert(
        protocol, fields, default_thinking=state.config.default_thinking, echo_body=original
    )
    request = converted.request
    conversation, options = request.conversation, request.inference_options
    end_of_thinking = template.end_of_thinking if conversation.thinking_mode else None
    guide = _guide(
        state.need_tokenizer(),
        wanted or _recipe_format(conversation),
        conversation.tools,
        {_tool_name(tool): _tool_schema(tool) for tool in fields.get("tools", ())},
        choice,
        end_of_thinking,
    )
    prompt = template.encode(request, state.check_text)
    state.check_prompt(prompt.token_ids)
    max_tokens = options.max_tokens
    if max_tokens is None:
        # The chat format has a default for each way of thinking, within the context.
        max_tokens = request.resolve_max_tokens(len(prompt.token_ids), state.ready.max_model_len)
    params = body.sampling_params(
        max_tokens=max_tokens,
        # Stop strings mean nothing inside tool calls, and only the parser knows where those are.
        stop=() if conversation.tools else tuple(request.parsing_options.stop_sequences),
        logprobs=_wanted_logprobs(body, options),
        guide=guide,
        defaults={"temperature": options.temperature, "top_p": options.top_p},
    )
    return ChatRequest(
        converted,
        prompt.token_ids,
        params,
        end_of_thinking,
        body.priority or 0,
        isinstance(body, ChatBody) and body.wants_usage,
        f"{_ID_PREFIXES[protocol]}{uuid.uuid4().hex}",
    )


def plain_fields(body: ChatProtocolBody) -> Fields:
    """The fields that the client sent, without those that deepseek-recipe must not see."""
    sent = body.model_dump(exclude_unset=True)
    return {k: v for k, v in sent.items() if k not in _OWN_FIELDS and v is not None}


def _wanted_logprobs(body: ChatProtocolBody, options: recipe.InferenceOptions) -> int | None:
    if isinstance(body, MessagesBody) or not options.logprobs:
        return None
    return int(options.top_logprobs or 0)


# --- The grammar of an answer ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ToolChoice:
    """What a request says about tool calls.

    Attributes:
        required: the answer must be a tool call.
        parallel: the answer may have several tool calls.
    """

    required: bool = False
    parallel: bool = True


def format_guide(response_format: Fields | None) -> Guide | None:
    """The guide of a `response_format` as in chat completions, for an answer without tools.

    Raises:
        RequestError: it is not a format, or its grammar is too large.
    """
    wanted = None if response_format is None else _format(response_format)
    return None if wanted is None else _content_guide(wanted, None)


def _guide(
    tokenizer: Tokenizer,
    wanted: Format | None,
    tools: list[recipe.ToolDefinition],
    schemas: Mapping[Any, Mapping[str, Any] | None],
    choice: _ToolChoice,
    after: int | None,
) -> Guide | None:
    """The guide of an answer; None: the answer may be anything.

    Args:
        schemas: the tools' schemas as the client wrote them. The conversion of a strict tool leaves
            out some keywords.
        after: the token after which the grammar begins.
    """
    if not tools:
        if choice.required:
            raise RequestError("tool_choice asks for a tool, but there are no tools")
        return None if wanted is None else _content_guide(wanted, after)
    strict = any(tool.strict for tool in tools)
    if wanted is None and not choice.required and choice.parallel and not strict:
        return None
    signatures = [
        ToolSignature(tool.name, schemas.get(tool.name) or _parameters(tool)) for tool in tools
    ]
    dsml = tokenizer.added_id(recipe.SpecialToken.Dsml.default_str())
    grammar = ToolGrammar(signatures, dsml, parallel=choice.parallel)
    if choice.required:
        return tool_guide(grammar.required(), after)
    if wanted is None:
        return tool_guide(grammar.after_text(), after)
    return tool_guide(grammar.instead_of(_lark_item(wanted)), after)


def _parameters(tool: recipe.ToolDefinition) -> Mapping[str, Any]:
    return tool.parameters if isinstance(tool.parameters, Mapping) else {}


def _content_guide(wanted: Format, after: int | None) -> Guide:
    kind, value = wanted
    if kind == "json":
        return json_guide(value, after)
    return regex_guide(value, after) if kind == "regex" else lark_guide(value, after)


def _lark_item(wanted: Format) -> str:
    kind, value = wanted
    if kind == "json":
        return json_lark(value)
    raise RequestError(f"a response_format of type {kind} cannot be combined with tools")


# --- What a body says about formats and tools -----------------------------------------------------


def _format(response_format: Fields) -> Format | None:
    """The format of a chat completion's response_format. Raises RequestError."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return "json", _ANY_OBJECT
    if kind == "json_schema":
        return "json", _schema(response_format.get("json_schema"))
    if kind in ("regex", "grammar") and isinstance(response_format.get(kind), str):
        return kind, response_format[kind]
    raise RequestError(
        "response_format must be of type text, json_object, json_schema, regex or grammar, with "
        f"what the type needs; got {str(response_format)[:200]}"
    )


def _schema(holder: Any) -> Mapping[str, Any]:
    schema = holder.get("schema", _ANY_OBJECT) if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("a json_schema format needs a schema, a JSON object")
    return schema


def _recipe_format(conversation: recipe.Conversation) -> Format | None:
    kind = conversation.response_format
    if kind == "json_schema":
        return "json", conversation.response_schema or _ANY_OBJECT
    if kind == "regex":
        return "regex", conversation.response_regex
    return ("json", _ANY_OBJECT) if kind == "json_object" else None


def _take_own_format(protocol: ProtocolName, fields: Fields) -> Format | None:
    """Takes a format that deepseek-recipe does not read out of the fields. Raises RequestError."""
    if protocol == "chat":
        given = fields.get("response_format")
        if isinstance(given, Mapping) and given.get("type") == "grammar":
            return _format(fields.pop("response_format"))
    if protocol == "messages":
        config = fields.get("output_config")
        given = fields.pop("output_format", None)
        if isinstance(config, Mapping) and config.get("format") is not None:
            given = config["format"]
        if given is not None:
            if not isinstance(given, Mapping) or given.get("type") != "json_schema":
                raise RequestError("the output's format must be of type json_schema")
            return "json", _schema(given)
    return None


def _take_choice(protocol: ProtocolName, fields: Fields) -> _ToolChoice:
    """What the fields say about tool calls.

    If a call is required, the choice is taken out of the fields, since the grammar enforces it.

    Raises:
        RequestError: the choice names a tool that is not among the tools.
    """
    choice = fields.get("tool_choice")
    parallel = fields.get("parallel_tool_calls", True) is not False
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if protocol == "messages" and isinstance(choice, Mapping):
        parallel = not choice.get("disable_parallel_tool_use", False)
        if kind == "none":
            fields.pop("tools", None)
        if kind in ("none", "auto", "any"):
            del fields["tool_choice"]
        if kind == "any":
            return _ToolChoice(required=True, parallel=parallel)
    elif kind == "required":
        del fields["tool_choice"]
        return _ToolChoice(required=True, parallel=parallel)
    named = "tool" if protocol == "messages" else "function"
    if not isinstance(choice, Mapping) or kind != named:
        return _ToolChoice(parallel=parallel)
    holder = choice.get("function", choice) if protocol == "chat" else choice
    name = holder.get("name") if isinstance(holder, Mapping) else None
    tools = [tool for tool in fields.get("tools", ()) if _tool_name(tool) == name]
    if not isinstance(name, str) or not tools:
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools")
    fields["tools"] = tools
    del fields["tool_choice"]
    return _ToolChoice(required=True, parallel=parallel)


def _tool_name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return (function if isinstance(function, Mapping) else tool).get("name")


def _tool_schema(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    function = tool.get("function")
    holder = function if isinstance(function, Mapping) else tool
    schema = holder.get("parameters", holder.get("input_schema"))
    return schema if isinstance(schema, Mapping) else None
