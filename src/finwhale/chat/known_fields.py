"""The fields that parts of requests may have, at every depth, and those of a chat's messages.

`deepseek-recipe` ignores fields that it does not know, and replaces images by a note. So
`check_fields` walks a body beside a description of what is known, its shape:

- None: any value.
- a dict: an object with these fields. A list with one shape: an array. Another type of value is
  left alone, since the conversion of a request checks types.
- `Variants`: an object whose fields depend on one of them.
- EMPTY: null or an empty value only. Clients send such fields when they repeat an answer.
- UNUSED: an object that is accepted, but has no effect here. The answer's headers name it.

Fields marked "no effect" are the ones that clients send without being asked to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, TypeAlias

from finwhale.errors import RequestError

# A name from a request has at most this many characters in an error, a log line or a header.
MAX_NAME = 60
# With --lenient, the header and the log name this many fields at most.
MAX_NAMED = 16


class FieldError(RequestError):
    """A field, or an object's type, is unknown or not supported; `path` leads to it."""

    def __init__(
        self,
        message: str,
        code: Literal["unknown_parameter", "unsupported_type", "unsupported_value"],
        path: str,
    ) -> None:
        super().__init__(message, code, path)  # so that pickle can copy it
        self.message, self.code, self.path = message, code, path

    def __str__(self) -> str:
        return self.message


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


_Mark = Enum("_Mark", ["EMPTY", "UNUSED"])
EMPTY, UNUSED = _Mark.EMPTY, _Mark.UNUSED
Shape: TypeAlias = "dict[str, Shape] | list[Shape] | Variants | _Mark | None"


def fields(*names: str, **shapes: Shape) -> dict[str, Shape]:
    """An object with these fields, of any value or of a shape."""
    return {**dict.fromkeys(names), **shapes}


def by_type(*, default: str | None = None, open: bool = False, **shapes: Shape) -> Variants:
    """An object whose fields depend on its type. Each variant also has the field `type`."""
    found = {k: {"type": None, **v} if isinstance(v, dict) else v for k, v in shapes.items()}
    return Variants("type", found, default, open)


_CHAT_PARTS: Shape = [by_type(text=fields("text", "cache_control"))]  # no effect: cache_control
# no effect: index
_CHAT_CALL: Shape = by_type(
    default="function", function=fields("id", "index", function=fields("name", "arguments"))
)
# no effect: name
_CHAT_TEXT = fields("role", "name", content=_CHAT_PARTS)
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
                **fields("reasoning_content", "prefix", "annotations"),  # no effect: annotations
                **fields(refusal=EMPTY, audio=EMPTY, function_call=EMPTY),
                "tool_calls": [_CHAT_CALL],
            },
        },
    )
]
_CHAT_FUNCTION = fields("name", "description", "parameters", "strict")
# no effect: cache_control
_CHAT_TOOLS: Shape = [by_type(function=fields("cache_control", function=_CHAT_FUNCTION))]
_CHAT_NAMED = fields("type", "name", function=fields("name"))
_CHAT_CHOICE: Shape = by_type(
    function=_CHAT_NAMED, allowed_tools=fields(allowed_tools=fields("mode", tools=[_CHAT_NAMED]))
)
# Of a request of Chat Completions, and of `LLM.chat`.
CHAT_FIELDS: dict[str, Shape] = {
    "messages": _CHAT_MESSAGES,
    "tools": _CHAT_TOOLS,
    "tool_choice": _CHAT_CHOICE,
}


def check_fields(
    shape: Shape, body: object, *, lenient: bool = False, left_out: Sequence[str] = ()
) -> list[str]:
    """Checks that a body has no field that is unknown here.

    Args:
        lenient: remove unknown fields from `body` instead of refusing them.
        left_out: paths of what the body had before.

    Returns:
        `left_out`, and the paths of fields without effect: at most MAX_NAMED, and "..." if there
        are more.

    Raises:
        FieldError: a field is unknown, or a part of a message or a tool has a type that is not
            supported.
    """
    ignored = list(left_out[: MAX_NAMED + 1])
    for path, holder, name in _findings(shape, body, ""):
        if name is not None:
            if not lenient:
                raise FieldError(f"unknown parameter: {path}", "unknown_parameter", path)
            del holder[name]
        if len(ignored) <= MAX_NAMED:
            ignored.append(path)
    return ignored if len(ignored) <= MAX_NAMED else [*ignored[:MAX_NAMED], "..."]


def _findings(shape: Shape, value: Any, path: str) -> Iterator[tuple[str, Any, str | None]]:
    """Yields each ignored field: its path, the object that has it, and its name in the object.

    The name is None for an object that is accepted without an effect.
    """
    if isinstance(shape, list):
        if isinstance(value, list | tuple):
            for i, item in enumerate(value):
                if isinstance(item, dict):  # no shape is an array of arrays
                    yield from _findings(shape[0], item, _join(path, str(i)))
        return
    if not isinstance(value, dict):
        return
    if isinstance(shape, Variants):
        shape = _variant(shape, value, path)
    if shape is UNUSED:
        yield f"{path}.type={printable(str(value.get('type')))}", value, None
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
        if inner is EMPTY and value[name]:
            raise FieldError(f"{where} is not supported", "unsupported_value", where)
        if inner is not None:
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
    where, known = path or shape.tag, ", ".join(shape.shapes)
    if shape.tag != "type":
        raise FieldError(f"{where}: {shape.tag} must be one of {known}", "unsupported_value", where)
    reason = f"type {printable(kind)} is not supported; supported: {known}"
    if (medium := media_of(kind)) is not None:
        media, kind = _MEDIA[medium], printable(kind)
        reason = f"{media} are not supported (type {kind}): the model reads only text"
    raise FieldError(f"{where}: {reason}", "unsupported_type", where)


def media_of(kind: Any) -> str | None:
    """The medium that a part of this type has, such as "image"; None: it is text, or unknown."""
    return next((word for word in _MEDIA if word in kind), None) if isinstance(kind, str) else None


_MEDIA = {"image": "images", "audio": "audio inputs", "video": "videos", "file": "files"} | {
    "document": "documents"
}


def _join(path: str, name: object) -> str:
    name = printable(str(name))
    return f"{path}.{name}" if path else name


def printable(text: str) -> str:
    """A name as errors, logs and headers show it: short, and in harmless characters."""
    shown = text[:MAX_NAME].encode("ascii", "replace").decode()
    return "".join(c if c.isalnum() or c in "_-.$" else "?" for c in shown)
