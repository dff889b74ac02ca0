"""The fields that requests may have, at every depth. No other field is dropped silently.

`deepseek-recipe` ignores fields that it does not know, and replaces images by a note. So
`check_fields` walks a body beside a description of what this server knows. The first level of a
body is described by its class in `server.schemas`, the levels below by the shapes here:

- None: any value.
- a dict: an object with these fields. A list with one shape: an array. Another type of value is
  left alone, since the conversion of a request checks types.
- `Variants`: an object whose fields depend on one of them.
- EMPTY: null or an empty value only. Clients send such fields when they repeat an answer.
- UNUSED: an object that is accepted, but has no effect here. The answer's headers name it.

Fields marked "no effect" are the ones that clients send without being asked to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args

from pydantic import BaseModel

from finwhale.server.errors import ApiError
from finwhale.server.schemas import (
    ChatBody,
    CompletionBody,
    CountTokensBody,
    MessagesBody,
    ResponsesBody,
    TokenizeBody,
)

# A name from a request has at most this many characters in an error, a log line or a header.
MAX_NAME = 60
# With --lenient, the header and the log name this many fields at most.
MAX_NAMED = 16


@dataclass(frozen=True, slots=True)
class Variants:
    """An object whose fields depend on the value of its field `tag`.

    Attributes:
        default: the variant of an object without the tag; None: the conversion refuses it.
        open: leave an unknown variant to the conversion, which refuses it with a better message.
    """

    tag: str
    shapes: Mapping[str, "Shape"]
    default: str | None = None
    open: bool = False


class _Empty:
    pass


class _Unused:
    pass


EMPTY, UNUSED = _Empty(), _Unused()
Shape: TypeAlias = "dict[str, Shape] | list[Shape] | Variants | _Empty | _Unused | None"


def _fields(*names: str, **shapes: Shape) -> dict[str, Shape]:
    return {**dict.fromkeys(names), **shapes}


# --- Chat Completions -----------------------------------------------------------------------------

_CHAT_PARTS: Shape = [
    Variants("type", {"text": _fields("type", "text", "cache_control")})  # no effect: cache_control
]
_CHAT_CALL: Shape = Variants(
    "type",
    # no effect: index
    {"function": _fields("type", "id", "index", function=_fields("name", "arguments"))},
    default="function",
)
# no effect: name
_CHAT_TEXT = _fields("role", "name", content=_CHAT_PARTS)
_CHAT_MESSAGES: Shape = [
    Variants(
        "role",
        {
            "system": _CHAT_TEXT,
            "developer": _CHAT_TEXT,
            "user": _CHAT_TEXT,
            "latest_reminder": _CHAT_TEXT,
            "tool": {**_CHAT_TEXT, "tool_call_id": None},
            "assistant": {
                **_CHAT_TEXT,
                # no effect: annotations, and reasoning, the second name of reasoning_content
                **_fields("reasoning_content", "reasoning", "prefix", "annotations"),
                **_fields(refusal=EMPTY, audio=EMPTY, function_call=EMPTY),
                "tool_calls": [_CHAT_CALL],
            },
        },
        open=True,
    )
]
_CHAT_FUNCTION = _fields("name", "description", "parameters", "strict")
_CHAT_TOOLS: Shape = [
    Variants(
        "type",
        # no effect: cache_control
        {"function": _fields("type", "cache_control", function=_CHAT_FUNCTION)},
    )
]
_RESPONSE_FORMAT: Shape = Variants(
    "type",
    {
        "text": _fields("type"),
        "json_object": _fields("type"),
        # no effect: name, description, strict (a schema always holds)
        "json_schema": _fields(
            "type", json_schema=_fields("name", "description", "schema", "strict")
        ),
        "regex": _fields("type", "regex"),
        "grammar": _fields("type", "grammar"),
    },
    open=True,
)
_CHAT_NAMED = _fields("type", "name", function=_fields("name"))
_CHAT_CHOICE: Shape = Variants(
    "type",
    {
        "function": _CHAT_NAMED,
        "allowed_tools": _fields("type", allowed_tools=_fields("mode", tools=[_CHAT_NAMED])),
    },
)
# no effect: budget_tokens, display
_THINKING: Shape = _fields("type", "budget_tokens", "display")

# --- Responses ------------------------------------------------------------------------------------

# no effect, in every item: id, status, phase, annotations, logprobs
_ITEM = _fields("type", "id", "status")
_RESPONSES_PARTS: Shape = [
    Variants(
        "type",
        {
            "input_text": _fields("type", "text"),
            "output_text": _fields("type", "text", "annotations", "logprobs"),
        },
    )
]
_RESPONSES_FUNCTION = _fields("type", "name", "description", "parameters", "strict") | _fields(
    "defer_loading"
)
_RESPONSES_CUSTOM = _fields("type", "name", "description", "format", "defer_loading")
_RESPONSES_TOOLS: Shape = [
    Variants(
        "type",
        {
            "function": _RESPONSES_FUNCTION,
            "custom": _RESPONSES_CUSTOM,
            "namespace": _fields(
                "type",
                "name",
                "description",
                tools=[
                    Variants("type", {"function": _RESPONSES_FUNCTION, "custom": _RESPONSES_CUSTOM})
                ],
            ),
            "tool_search": _fields("type", "execution", "description", "parameters"),
            # Codex always sends it. The model cannot search, so it is not told of the tool.
            "web_search": UNUSED,
            "web_search_2025_08_26": UNUSED,
        },
    )
]
_RESPONSES_NAMED = _fields("type", "name")
_RESPONSES_CHOICE: Shape = Variants(
    "type",
    {
        "function": _RESPONSES_NAMED,
        "custom": _RESPONSES_NAMED,
        "allowed_tools": _fields("type", "mode", tools=[_RESPONSES_NAMED]),
    },
)
_RESPONSES_INPUT: Shape = [
    Variants(
        "type",
        {
            "message": {**_ITEM, "role": None, "phase": None, "content": _RESPONSES_PARTS},
            "function_call": {
                **_ITEM,
                **_fields("call_id", "name", "namespace", "arguments", "parsed_arguments"),
            },
            "function_call_output": {**_ITEM, "call_id": None, "output": _RESPONSES_PARTS},
            "custom_tool_call": {**_ITEM, **_fields("call_id", "name", "namespace", "input")},
            "custom_tool_call_output": {
                **_ITEM,
                **_fields("call_id", "name", output=_RESPONSES_PARTS),
            },
            "reasoning": {
                **_ITEM,
                "encrypted_content": None,
                "summary": [_fields("type", "text")],
                "content": [_fields("type", "text")],
            },
            "tool_search_call": {**_ITEM, **_fields("call_id", "execution", "arguments")},
            "tool_search_output": {
                **_ITEM,
                **_fields("call_id", "execution", tools=_RESPONSES_TOOLS),
            },
        },
        default="message",
    )
]
_RESPONSES_FORMAT: Shape = Variants(
    "type",
    {
        "text": _fields("type"),
        "json_object": _fields("type"),
        "json_schema": _fields("type", "name", "description", "schema", "strict"),
    },
    open=True,
)

# --- Messages -------------------------------------------------------------------------------------

_TEXT_BLOCK = _fields("type", "text", "cache_control", "citations")  # no effect: the last two
_RESULT_BLOCKS: Shape = [
    Variants(
        "type",
        {"text": _TEXT_BLOCK, "tool_reference": _fields("type", "tool_name", "cache_control")},
    )
]
_BLOCKS: Shape = [
    Variants(
        "type",
        {
            "text": _TEXT_BLOCK,
            "thinking": _fields("type", "thinking", "signature"),
            # no effect: caller
            "tool_use": _fields("type", "id", "name", "input", "cache_control", "caller"),
            # no effect: is_error
            "tool_result": _fields(
                "type", "tool_use_id", "is_error", "cache_control", content=_RESULT_BLOCKS
            ),
            "tool_addition": _fields("type", "tool", "cache_control"),
        },
    )
]
_MESSAGES: Shape = [_fields("role", content=_BLOCKS)]
# no effect: all fields but type, name, description, input_schema and strict
_MESSAGES_TOOL = _fields("type", "name", "description", "input_schema", "strict") | _fields(
    "cache_control", "defer_loading", "eager_input_streaming", "input_examples", "allowed_callers"
)
_MESSAGES_FORMAT: Shape = _fields("type", "schema", "name")
_MESSAGES_FIELDS: dict[str, Shape] = {
    "messages": _MESSAGES,
    "system": [Variants("type", {"text": _TEXT_BLOCK})],
    "tools": [Variants("type", {"custom": _MESSAGES_TOOL}, default="custom")],
    "tool_choice": _fields("type", "name", "disable_parallel_tool_use"),
    "thinking": _THINKING,
    "output_config": _fields("effort", format=_MESSAGES_FORMAT),
    "output_format": _MESSAGES_FORMAT,
}

_BELOW: dict[type[BaseModel], dict[str, Shape]] = {
    CompletionBody: {"response_format": _RESPONSE_FORMAT},
    ChatBody: {
        "messages": _CHAT_MESSAGES,
        "tools": _CHAT_TOOLS,
        "tool_choice": _CHAT_CHOICE,
        "response_format": _RESPONSE_FORMAT,
        "thinking": _THINKING,
    },
    ResponsesBody: {
        "input": _RESPONSES_INPUT,
        "tools": _RESPONSES_TOOLS,
        "tool_choice": _RESPONSES_CHOICE,
        # no effect: verbosity, summary, generate_summary
        "text": _fields("verbosity", format=_RESPONSES_FORMAT),
        "reasoning": _fields("effort", "summary", "generate_summary"),
        "thinking": _THINKING,
    },
    MessagesBody: _MESSAGES_FIELDS,
    CountTokensBody: _MESSAGES_FIELDS,
    TokenizeBody: {
        "messages": _CHAT_MESSAGES,
        "tools": _CHAT_TOOLS,
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


def check_fields(shape: Shape, body: object, *, lenient: bool = False) -> list[str]:
    """Checks that a body has no field that is unknown here.

    Args:
        shape: as `shape_of` gives it.
        lenient: remove unknown fields from `body` instead of refusing them.

    Returns:
        The paths of fields without effect: at most MAX_NAMED, and "..." if there are more.

    Raises:
        ApiError: a field is unknown, or a part of a message or a tool has a type that is not
            supported.
    """
    ignored: list[str] = []
    for path, holder, name in _findings(shape, body, ""):
        if name is not None:
            if not lenient:
                message = f"unknown parameter: {path}"
                raise ApiError(400, message, code="unknown_parameter", param=path)
            del holder[name]
        if len(ignored) <= MAX_NAMED:
            ignored.append(path if len(ignored) < MAX_NAMED else "...")
    return ignored


def _findings(shape: Shape, value: Any, path: str) -> Iterator[tuple[str, Any, str | None]]:
    """Yields each ignored field: its path, the object that has it, and its name in the object.

    The name is None for an object that is accepted without an effect.
    """
    if isinstance(shape, list):
        if isinstance(value, list):
            for i, item in enumerate(value):
                yield from _findings(shape[0], item, _join(path, str(i)))
        return
    if not isinstance(value, dict):
        return
    if isinstance(shape, _Unused):
        yield f"{path}.type={_printable(str(value.get('type')))}", value, None
        return
    if isinstance(shape, Variants):
        shape = _variant(shape, value, path)
        if isinstance(shape, _Unused):
            yield from _findings(shape, value, path)
            return
    if not isinstance(shape, dict):
        return
    for name in list(value):
        where = _join(path, name)
        if name not in shape:
            # Clients repeat the parts of an answer with all fields that their package knows. Those
            # without a value say nothing.
            if not path or value[name] is not None:
                yield where, value, name
            continue
        inner = shape[name]
        if isinstance(inner, _Empty):
            if value[name]:
                raise ApiError(
                    400, f"{where} is not supported", code="unsupported_value", param=where
                )
        elif inner is not None:
            yield from _findings(inner, value[name], where)


def _variant(shape: Variants, value: dict[str, Any], path: str) -> Shape:
    kind = value.get(shape.tag)
    kind = shape.default if kind is None else kind
    if not isinstance(kind, str):
        return None
    if kind in shape.shapes:
        return shape.shapes[kind]
    if shape.open:
        return None
    where = path or shape.tag
    media = next((many for word, many in _MEDIA.items() if word in kind), None)
    known = ", ".join(shape.shapes)
    reason = (
        f"type {_printable(kind)} is not supported; supported: {known}"
        if media is None
        else f"{media} are not supported (type {_printable(kind)}): the model reads only text"
    )
    raise ApiError(400, f"{where}: {reason}", code="unsupported_type", param=where)


_MEDIA = {"image": "images", "audio": "audio inputs", "video": "videos", "file": "files"} | {
    "document": "documents"
}


def _join(path: str, name: str) -> str:
    name = _printable(name)
    return f"{path}.{name}" if path else name


def _printable(text: str) -> str:
    """A name as errors, logs and headers show it: short, and in harmless characters."""
    shown = text[:MAX_NAME].encode("ascii", "replace").decode()
    return "".join(c if c.isalnum() or c in "_-." else "?" for c in shown)
