"""Requests of the three chat protocols: a checked body becomes a `ChatRequest`.

A request may ask for a format of its answer or for a call of a tool. This module writes the grammar
for it, within the limits of `chat.grammar_limits`, but compiles no grammar: `ServerState.grammars`
checks it in another process.
"""

import json
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
from finwhale.server.schemas import (
    ChatBody,
    CompletionBody,
    CountTokensBody,
    MessagesBody,
    OpenAIBody,
    ResponsesBody,
    SamplingBody,
    StructuredOutputs,
)
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
    "min_tokens",
    "include_stop_str_in_output",
    "no_stop_trim",
    "skip_special_tokens",
    "prompt_logprobs",
    "return_routed_experts",
    "return_token_ids",
    "request_id",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "regex",
    "chat_template_kwargs",
    "continue_final_message",
    "add_generation_prompt",
    "separate_reasoning",
    "stream_reasoning",
    "include_reasoning",
    "context_management",
    "cache_control",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options that say what an answer contains besides the message.

    Attributes:
        include_usage: whether a stream of chat completions ends with a chunk of usage.
        continuous_usage: whether each of its chunks has the usage so far.
        token_ids: whether it has the token ids of the prompt and of the answer.
        special_tokens: whether the text has special tokens.
        separate_reasoning: whether the reasoning is a field of its own, not part of the content.
        include_reasoning: whether the reasoning is in the answer.
        stream_reasoning: whether the reasoning streams; otherwise it comes in one piece.
        no_edits: whether the answer says that context management has made no edits.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    special_tokens: bool = False
    separate_reasoning: bool = True
    include_reasoning: bool = True
    stream_reasoning: bool = True
    no_edits: bool = False

    @staticmethod
    def of(body: "ChatProtocolBody") -> "AnswerOptions":
        if isinstance(body, MessagesBody):
            return AnswerOptions(no_edits=body.context_management is not None)
        if not isinstance(body, ChatBody):
            return AnswerOptions()
        return AnswerOptions(
            include_usage=body.wants_usage,
            continuous_usage=body.wants_continuous_usage,
            token_ids=bool(body.return_token_ids),
            special_tokens=body.skip_special_tokens is False,
            separate_reasoning=body.separate_reasoning is not False,
            include_reasoning=body.include_reasoning is not False,
            stream_reasoning=body.stream_reasoning is not False,
        )


@dataclass(slots=True)
class ChatRequest:
    """A conversation that is ready for its next message.

    Attributes:
        converted: the request as deepseek-recipe reads it.
        token_ids: the prompt.
        stop: stop strings of the content.
        stop_after: the token after which they count; None: they count from the beginning.
    """

    converted: ProtocolRequest
    token_ids: list[int]
    params: SamplingParams
    stop: tuple[str, ...]
    stop_after: int | None
    priority: int
    options: AnswerOptions
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


@dataclass(frozen=True, slots=True)
class ConvertedBody:
    """A body as deepseek-recipe reads it, and what the grammar of the answer needs.

    Attributes:
        converted: the request; its conversation has the tools that the model may call.
        schemas: the tools' schemas as the client wrote them.
        wanted: the format of the answer, unless deepseek-recipe reads it.
    """

    converted: ProtocolRequest
    schemas: Mapping[str, Mapping[str, Any] | None]
    wanted: Format | None
    choice: "_ToolChoice"


def convert_body(
    state: ServerState, protocol: ProtocolName, body: ChatProtocolBody | CountTokensBody
) -> ConvertedBody:
    """Converts a checked body to a conversation. Raises RequestError."""
    fields = plain_fields(body)
    if isinstance(body, CountTokensBody):
        fields["max_tokens"] = 1  # deepseek-recipe needs a value, which no prompt depends on
    original = dict(fields)
    if isinstance(body, ChatBody):
        _take_extensions(body, fields)
    wanted = _take_own_format(protocol, fields)
    if isinstance(body, ChatBody):
        wanted = _only_format(wanted, body, fields.get("response_format"))
    choice = _take_choice(protocol, fields)
    default_thinking = state.config.default_thinking
    if protocol == "responses":
        default_thinking = _default_thinking(fields, default_thinking)
    converted = convert(protocol, fields, default_thinking=default_thinking, echo_body=original)
    return ConvertedBody(converted, _tool_schemas(fields), wanted, choice)


def _prepare(state: ServerState, protocol: ProtocolName, body: ChatProtocolBody) -> ChatRequest:
    template = state.need_template()
    read = convert_body(state, protocol, body)
    converted = read.converted
    request, conversation = converted.request, converted.conversation
    options = request.inference_options
    stage = converted.parsing_options.thinking_initial_stage
    thinks = stage is not None and stage.starts_in_reasoning()
    end_of_thinking = template.end_of_thinking if thinks else None
    guide = _guide(
        state.need_tokenizer(),
        read.wanted or _recipe_format(conversation),
        conversation.tools,
        read.schemas,
        read.choice,
        end_of_thinking,
    )
    prompt = template.encode(converted, state.check_text)
    state.check_prompt(prompt.token_ids)
    max_tokens = options.max_tokens
    if max_tokens is None:
        # The chat format has a default for each way of thinking, within the context.
        max_tokens = request.resolve_max_tokens(len(prompt.token_ids), state.ready.max_model_len)
    stop = tuple(converted.parsing_options.stop_sequences)
    params = body.sampling_params(
        max_tokens=max_tokens,
        # Stop strings mean nothing inside tool calls, and only the parser knows where those are.
        stop=() if conversation.tools else stop,
        logprobs=_wanted_logprobs(body, options),
        guide=guide,
        defaults={"temperature": options.temperature, "top_p": options.top_p},
    )
    return ChatRequest(
        converted,
        prompt.token_ids,
        params,
        stop,
        end_of_thinking,
        body.priority or 0,
        AnswerOptions.of(body),
        f"{_ID_PREFIXES[protocol]}{getattr(body, 'request_id', None) or uuid.uuid4().hex}",
    )


def plain_fields(body: ChatProtocolBody | CountTokensBody) -> Fields:
    """The fields that the client sent, without those that deepseek-recipe must not see."""
    sent = body.model_dump(exclude_unset=True)
    return {k: v for k, v in sent.items() if k not in _OWN_FIELDS and v is not None}


def _take_extensions(body: ChatBody, fields: Fields) -> None:
    """Replaces fields that deepseek-recipe does not know by those that it knows.

    Raises:
        RequestError: a value is not supported, or fields contradict each other.
    """
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


def _default_thinking(fields: Fields, default: bool) -> bool:
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


def _template_fields(kwargs: Fields) -> Fields:
    """The fields of a body that replace its `chat_template_kwargs`. Raises RequestError."""
    found: Fields = {}
    for name, value in kwargs.items():
        if name in ("thinking", "enable_thinking") and isinstance(value, bool):
            if found.get("thinking", value) is not value:
                raise RequestError("chat_template_kwargs: thinking and enable_thinking differ")
            found["thinking"] = value
        elif name == "reasoning_effort" and (value is None or isinstance(value, str)):
            if value is not None:
                found[name] = value
        else:
            raise RequestError(
                "chat_template_kwargs may have thinking and enable_thinking (true or false) and "
                f"reasoning_effort (a string), got {name!r}: {str(value)[:40]!r}"
            )
    if "thinking" in found:
        found["thinking"] = {"type": "enabled" if found["thinking"] else "disabled"}
    return found


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


def format_guide(body: CompletionBody) -> Guide | None:
    """The guide of a completion.

    Raises:
        RequestError: its format is not valid, or the grammar is too large.
    """
    wanted = None if body.response_format is None else _format(body.response_format)
    wanted = _only_format(wanted, body, None)
    return None if wanted is None else _content_guide(wanted, None)


def _guide(
    tokenizer: Tokenizer,
    wanted: Format | None,
    tools: list[recipe.ToolDefinition],
    schemas: Mapping[str, Mapping[str, Any] | None],
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


def _only_format(
    wanted: Format | None, body: OpenAIBody, response_format: Fields | None
) -> Format | None:
    """The one format that the body asks for, in its own words or in those of vLLM and SGLang.

    Args:
        wanted: the format of its response_format.
        response_format: a response_format that deepseek-recipe will read.

    Raises:
        RequestError: a format is not valid, or there are several.
    """
    formats: list[Format] = [] if wanted is None else [wanted]
    if response_format is not None and response_format.get("type") != "text":
        formats.append(("json", _ANY_OBJECT))  # only counted: it cannot be combined with others
    others = _guided_formats(body)
    if len(formats) + len(others) > 1:
        raise RequestError(
            "give one format: response_format, structured_outputs, guided_json, guided_regex, "
            "guided_choice, guided_grammar or regex"
        )
    return others[0] if others else wanted


def _guided_formats(body: OpenAIBody) -> list[Format]:
    """The formats in vLLM's and SGLang's fields. Raises RequestError."""
    given = body.structured_outputs or StructuredOutputs()
    fields = (
        ("json", body.guided_json),
        ("json", given.json_schema),
        ("json", _ANY_OBJECT if given.json_object else None),
        ("regex", body.guided_regex),
        ("regex", given.regex),
        ("regex", body.regex),
        ("grammar", body.guided_grammar),
        ("grammar", given.grammar),
        ("choice", body.guided_choice),
        ("choice", given.choice),
    )
    found = [_guided_format(kind, value) for kind, value in fields if value is not None]
    if body.structured_outputs is not None and not found:
        raise RequestError("structured_outputs needs json, json_object, regex, choice or grammar")
    return found


def _guided_format(kind: str, value: Any) -> Format:
    if kind == "json":
        return "json", _parsed_schema(value)
    if kind == "choice":
        return "grammar", f"start: {' | '.join(map(json.dumps, value))}"
    return ("regex" if kind == "regex" else "grammar"), value


def _parsed_schema(schema: str | Fields) -> Fields:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise RequestError("a JSON schema must be an object")
    return schema


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
    """Removes a format that deepseek-recipe cannot read, and returns it. Raises RequestError."""
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

    If a call is required, this removes the choice from the fields, since the grammar enforces it.

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


def _tool_schemas(fields: Fields) -> dict[str, Mapping[str, Any] | None]:
    """The schemas of the tools that have a name; one of another type may have none."""
    tools = [(_tool_name(tool), tool) for tool in fields.get("tools", ())]
    return {name: _tool_schema(tool) for name, tool in tools if isinstance(name, str)}


def _tool_schema(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    function = tool.get("function")
    holder = function if isinstance(function, Mapping) else tool
    schema = holder.get("parameters", holder.get("input_schema"))
    return schema if isinstance(schema, Mapping) else None
