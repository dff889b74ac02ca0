"""The fields that requests may have, at every depth. No other field is dropped silently.

The first level of a body is described by its class in `server.schemas`, the levels below by the
shapes here and in `chat.known_fields`.
"""

from typing import Any, get_args

from pydantic import BaseModel

from finwhale.chat.known_fields import CHAT_FIELDS, UNUSED, Shape, by_type, fields
from finwhale.server.protocols import schemas

_RESPONSE_FORMAT: Shape = by_type(
    open=True,
    text={},
    json_object={},
    # no effect: name, description
    json_schema=fields(json_schema=fields("name", "description", "schema", "strict")),
    regex=fields("regex"),
    grammar=fields("grammar"),
)
# no effect: budget_tokens, display
_THINKING: Shape = fields("type", "budget_tokens", "display")

# no effect, in every item: id, status, phase, annotations, logprobs
_RESPONSES_PARTS: Shape = [
    by_type(input_text=fields("text"), output_text=fields("text", "annotations", "logprobs"))
]
_RESPONSES_FUNCTION = fields("name", "description", "parameters", "strict", "defer_loading")
_RESPONSES_CUSTOM = fields("name", "description", "format", "defer_loading")
_RESPONSES_CALLABLE = by_type(function=_RESPONSES_FUNCTION, custom=_RESPONSES_CUSTOM)
_RESPONSES_TOOLS: Shape = [
    by_type(
        function=_RESPONSES_FUNCTION,
        custom=_RESPONSES_CUSTOM,
        namespace=fields("name", "description", tools=[_RESPONSES_CALLABLE]),
        tool_search=fields("execution", "description", "parameters"),
        # Codex always sends it. The model cannot search, so it is not told of the tool.
        web_search=UNUSED,
        web_search_2025_08_26=UNUSED,
    )
]
_RESPONSES_NAMED = fields("type", "name")
_RESPONSES_CHOICE: Shape = by_type(
    function=_RESPONSES_NAMED,
    custom=_RESPONSES_NAMED,
    allowed_tools=fields("mode", tools=[_RESPONSES_NAMED]),
)


def _item(*names: str, **shapes: Shape) -> dict[str, Shape]:
    return fields("id", "status", *names, **shapes)


_RESPONSES_INPUT: Shape = [
    by_type(
        default="message",
        message=_item("role", "phase", content=_RESPONSES_PARTS),
        function_call=_item("call_id", "name", "namespace", "arguments", "parsed_arguments"),
        function_call_output=_item("call_id", output=_RESPONSES_PARTS),
        custom_tool_call=_item("call_id", "name", "namespace", "input"),
        custom_tool_call_output=_item("call_id", "name", output=_RESPONSES_PARTS),
        reasoning=None,  # chat/history.py makes it anew
        tool_search_call=_item("call_id", "execution", "arguments"),
        tool_search_output=_item("call_id", "execution", tools=_RESPONSES_TOOLS),
    )
]
_RESPONSES_FORMAT: Shape = by_type(
    open=True,
    text={},
    json_object={},
    json_schema=fields("name", "description", "schema", "strict"),
)

_TEXT_BLOCK = fields("text", "cache_control", "citations")  # no effect: the last two
_RESULT_BLOCKS: Shape = [
    by_type(text=_TEXT_BLOCK, tool_reference=fields("tool_name", "cache_control"))
]
_BLOCKS: Shape = [
    by_type(
        text=_TEXT_BLOCK,
        thinking=fields("thinking", "signature"),
        # no effect: caller
        tool_use=fields("id", "name", "input", "cache_control", "caller"),
        # no effect: is_error
        tool_result=fields("tool_use_id", "is_error", "cache_control", content=_RESULT_BLOCKS),
        tool_addition=fields("tool", "cache_control"),
    )
]
# no effect: all fields but type, name, description, input_schema and strict
_MESSAGES_TOOL = fields("name", "description", "input_schema", "strict") | fields(
    "cache_control", "defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"
)
_MESSAGES_FORMAT: Shape = fields("type", "schema", "name")
_MESSAGES_FIELDS: dict[str, Shape] = {
    "messages": [fields("role", content=_BLOCKS)],
    "system": [by_type(text=_TEXT_BLOCK)],
    "tools": [by_type(default="custom", custom=_MESSAGES_TOOL)],
    "tool_choice": fields("type", "name", "disable_parallel_tool_use"),
    "thinking": _THINKING,
    "output_config": fields("effort", format=_MESSAGES_FORMAT),
    "output_format": _MESSAGES_FORMAT,
}

_BELOW: dict[type[BaseModel], dict[str, Shape]] = {
    schemas.CompletionBody: {"response_format": _RESPONSE_FORMAT},
    schemas.ChatBody: {**CHAT_FIELDS, "response_format": _RESPONSE_FORMAT, "thinking": _THINKING},
    schemas.ResponsesBody: {
        "input": _RESPONSES_INPUT,
        "tools": _RESPONSES_TOOLS,
        "tool_choice": _RESPONSES_CHOICE,
        # no effect: verbosity, summary, generate_summary
        "text": fields("verbosity", format=_RESPONSES_FORMAT),
        "reasoning": fields("effort", "summary", "generate_summary"),
        "thinking": _THINKING,
    },
    schemas.MessagesBody: _MESSAGES_FIELDS,
    schemas.CountTokensBody: _MESSAGES_FIELDS,
    schemas.TokenizeBody: {
        "messages": CHAT_FIELDS["messages"],
        "tools": CHAT_FIELDS["tools"],
        "thinking": _THINKING,
    },
}


def shape_of(body: type[BaseModel]) -> dict[str, Shape]:
    """The shape of a class of bodies, or of a class that one of its fields has."""
    below = _BELOW.get(body, {})
    return {
        declared.alias or name: below.get(name) or _nested(declared.annotation)
        for name, declared in body.model_fields.items()
    }


def _nested(annotation: Any) -> Shape:
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return shape_of(one)
    return None
