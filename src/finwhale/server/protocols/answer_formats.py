"""Reads the wanted format and the tools of a body, and tries the grammar of its answer."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import deepseek_recipe as recipe

from finwhale.chat.answer_grammar import AnswerGrammar, Format, ToolChoice, WantedFormat
from finwhale.chat.grammar_limits import GrammarError
from finwhale.chat.template import ProtocolName
from finwhale.chat.tool_grammar import ToolSignature
from finwhale.errors import RequestError
from finwhale.request import Guide
from finwhale.server.observe.logs import RequestLog
from finwhale.server.protocols.schemas import SECOND_NAMES, CompletionBody, OpenAIBody
from finwhale.server.state import ServerState

Fields = dict[str, Any]
_ANY_OBJECT = {"type": "object"}
# The types of a tool choice that name one tool.
_NAMES_A_TOOL: dict[ProtocolName, tuple[str, ...]] = {
    "chat": ("function",),
    "responses": ("function", "custom"),
    "messages": ("tool",),
}


async def held_grammar(
    state: ServerState, grammar: AnswerGrammar | None, log: RequestLog
) -> tuple[Guide | None, tuple[str, ...]]:
    """Tries the grammar, and relaxes it until its trial succeeds.

    Returns:
        Its guide (None: the answer is free), and the parts of the request that it does not enforce.

    Raises:
        GrammarError: this needs more than MAX_RELAXED places, or there is another reason.
    """
    while grammar is not None and grammar.guide is not None:
        try:
            await state.grammars.check(grammar.guide, log.user)
            break
        except GrammarError as error:
            grammar = await state.in_thread(log.body_bytes, partial(grammar.relax, error))
    return (None, ()) if grammar is None else (grammar.guide, grammar.ignored)


def tool_signatures(tools: Sequence[recipe.ToolDefinition]) -> list[ToolSignature]:
    return [
        ToolSignature(t.name, t.parameters if isinstance(t.parameters, Mapping) else {},
                      bool(t.strict))
        for t in tools
    ]  # fmt: skip


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


def only_format(
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
    outputs = body.structured_outputs
    given: list[tuple[str, Any]] = []
    if outputs is not None:
        sent = outputs.model_dump(by_alias=True, exclude_none=True)
        given = [(kind, value) for kind, value in sent.items() if value is not False]
        if not given:
            raise RequestError(
                "structured_outputs needs json, json_object, regex, choice or grammar"
            )
    for name, (first, _) in SECOND_NAMES.items():
        kind = first.partition(".")[2]
        if kind and getattr(body, name) is not None:
            given.append((kind, getattr(body, name)))
    return [_guided_format(kind, value) for kind, value in given]


def _guided_format(kind: str, value: Any) -> Format:
    if kind == "choice":
        return "grammar", f"start: {' | '.join(map(json.dumps, value))}"
    if kind in ("regex", "grammar"):
        return ("regex" if kind == "regex" else "grammar"), value
    return "json", _ANY_OBJECT if kind == "json_object" else _parsed_schema(value)


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


def completion_format(body: CompletionBody) -> WantedFormat | None:
    """The format of a completion. Raises RequestError."""
    given = body.response_format
    wanted = only_format(None if given is None else _format(given), body, None)
    return None if wanted is None else named_format("chat", {"response_format": given}, wanted)


def named_format(protocol: ProtocolName, fields: Fields, wanted: Format) -> WantedFormat:
    """The format that the fields of a request ask for. Anthropic's protocol has no `strict`."""
    name = {"chat": "response_format", "responses": "text", "messages": "output_config"}[protocol]
    inner = "json_schema" if protocol == "chat" else "format"
    given = fields.get(name)
    holder = given.get(inner) if isinstance(given, Mapping) else None
    strict = isinstance(holder, Mapping) and holder.get("strict") is True
    return WantedFormat(wanted, name if protocol == "chat" else f"{name}.format", strict)


def recipe_format(conversation: recipe.Conversation) -> Format | None:
    kind = conversation.response_format
    if kind == "json_schema":
        return "json", conversation.response_schema or _ANY_OBJECT
    if kind == "regex":
        return "regex", conversation.response_regex
    return ("json", _ANY_OBJECT) if kind == "json_object" else None


def take_own_format(protocol: ProtocolName, fields: Fields) -> Format | None:
    """Remove a format that deepseek-recipe cannot read, and return it. Raises RequestError."""
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


def take_choice(protocol: ProtocolName, fields: Fields) -> ToolChoice:
    """Read which tool calls the fields of a request allow or require.

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
            return ToolChoice(required=True, parallel=parallel)
    elif kind == "required":
        del fields["tool_choice"]
        return ToolChoice(required=True, parallel=parallel)
    elif isinstance(choice, Mapping) and kind == "allowed_tools":
        allowed = choice.get("allowed_tools") if protocol == "chat" else choice
        return ToolChoice(required=_take_allowed(allowed, fields), parallel=parallel)
    if not isinstance(choice, Mapping) or kind not in _NAMES_A_TOOL[protocol]:
        return ToolChoice(parallel=parallel)
    _keep_tools([_tool_name(choice)], fields)
    return ToolChoice(required=True, parallel=parallel)


def _take_allowed(allowed: Any, fields: Fields) -> bool:
    """Keep only the allowed tools; returns whether a call is required."""
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tool_choice of type allowed_tools needs a list of tools")
    if allowed.get("mode") not in ("auto", "required"):
        raise RequestError(f"tool_choice's mode is auto or required, got {allowed.get('mode')!r}")
    _keep_tools([_tool_name(tool) for tool in tools], fields)
    return bool(allowed["mode"] == "required")


def _keep_tools(names: list[Any], fields: Fields) -> None:
    """Keep only the tools with these names, and remove the choice. Raises RequestError."""
    tools = fields.get("tools", ())
    known = [_tool_name(tool) for tool in tools]
    for name in names:
        if not isinstance(name, str) or name not in known:
            raise RequestError(f"tool_choice names {name!r}, which is not among the tools")
    fields["tools"] = [tool for tool in tools if _tool_name(tool) in names]
    del fields["tool_choice"]


def _tool_name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return (function if isinstance(function, Mapping) else tool).get("name")
