"""Structured output: what a request wants its answer to match, and the grammar of it.

Grammars are written here, within the limits of `chat.grammar_limits`, and compiled nowhere in this
process: `ServerState.grammars` checks them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe

from finwhale.chat.grammar import json_guide, json_lark, lark_guide, regex_guide, tool_guide
from finwhale.chat.protocols import ProtocolName, ProtocolRequest, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.chat.tool_grammar import ToolGrammar, ToolSignature
from finwhale.errors import RequestError
from finwhale.request import Guide

Fields = dict[str, Any]
Format = tuple[Literal["json", "regex", "grammar"], Any]

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A chat request converted, and what its answer must match.

    Attributes:
        has_tools: the answer may call tools.
        guide: None: anything goes.
    """

    converted: ProtocolRequest
    has_tools: bool
    guide: Guide | None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a request says of calling tools.

    Attributes:
        required: it must call one.
        name: that one only; None: any.
        parallel: it may call several.
    """

    required: bool = False
    name: str | None = None
    parallel: bool = True


def completion_guide(response_format: Fields | None) -> Guide | None:
    """The guide of a completion, from the format that a chat request would have.

    Raises:
        RequestError: it is not a format, or its grammar is too large.
    """
    wanted = None if response_format is None else _format(response_format)
    return None if wanted is None else _content_guide(wanted, None)


def plan_chat(
    tokenizer: Tokenizer, protocol: ProtocolName, fields: Fields, *, default_thinking: bool
) -> ChatPlan:
    """Converts a request and makes the grammar of its answer.

    Args:
        fields: the request's body, without what deepseek-recipe does not know.
        default_thinking: whether a request thinks that does not say.

    Raises:
        RequestError: the request is not valid, or asks for what no grammar can be made of.
    """
    original = dict(fields)
    own = _take_own_format(protocol, fields)
    choice = _take_choice(protocol, fields)
    converted = convert(protocol, fields, default_thinking=default_thinking, echo_body=original)
    conversation = converted.request.conversation
    wanted = own or _recipe_format(conversation)
    after = None
    if conversation.thinking_mode:
        after = tokenizer.added_id(recipe.SpecialToken.ThinkingEnd.default_str())
    schemas = {_tool_name(tool): _tool_schema(tool) for tool in fields.get("tools", ())}
    signatures = [
        # As the client wrote it: conversion leaves out some keywords of strict tools.
        ToolSignature(tool.name, schemas.get(tool.name) or _parameters(tool))
        for tool in conversation.tools
    ]
    strict = any(tool.strict for tool in conversation.tools)
    guide = _guide(tokenizer, wanted, signatures, strict, choice, after)
    return ChatPlan(converted, bool(conversation.tools), guide)


def _guide(
    tokenizer: Tokenizer,
    wanted: Format | None,
    tools: list[ToolSignature],
    strict: bool,
    choice: ToolChoice,
    after: int | None,
) -> Guide | None:
    if not tools:
        if choice.required:
            raise RequestError("tool_choice asks for a tool, but there are no tools")
        return None if wanted is None else _content_guide(wanted, after)
    if wanted is None and not choice.required and choice.parallel and not strict:
        return None
    dsml = tokenizer.added_id(recipe.SpecialToken.Dsml.default_str())
    grammar = ToolGrammar(tools, dsml, parallel=choice.parallel)
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


# --- What the protocols say -----------------------------------------------------------------------


def _format(response_format: Fields) -> Format | None:
    """Chat's response_format. Raises RequestError."""
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
    """A format that deepseek-recipe does not read, out of the fields."""
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


def _take_choice(protocol: ProtocolName, fields: Fields) -> ToolChoice:
    """What is said of calling tools; where it must, out of the fields: the grammar sees to it.

    Raises:
        RequestError: the tool named is not there.
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
    named = "tool" if protocol == "messages" else "function"
    if not isinstance(choice, Mapping) or kind != named:
        return ToolChoice(parallel=parallel)
    holder = choice.get("function", choice) if protocol == "chat" else choice
    name = holder.get("name") if isinstance(holder, Mapping) else None
    tools = [tool for tool in fields.get("tools", ()) if _tool_name(tool) == name]
    if not isinstance(name, str) or not tools:
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools")
    fields["tools"] = tools
    del fields["tool_choice"]
    return ToolChoice(required=True, name=name, parallel=parallel)


def _tool_name(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return (function if isinstance(function, Mapping) else tool).get("name")


def _tool_schema(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    function = tool.get("function")
    holder = function if isinstance(function, Mapping) else tool
    schema = holder.get("parameters", holder.get("input_schema"))
    return schema if isinstance(schema, Mapping) else None
