"""Conversations as clients send them back: what only other programs can read becomes text, or is
left out.

The bodies are parsed JSON of any form. What is not understood here stays as it is, and the checks
of fields and the conversion refuse it with their own words.
"""

import base64
import binascii
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from finwhale.chat.known_fields import media_of

Json = Any
_VERSION = "finwhale-1:"
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TEXT_FILES = ("text/", "application/json", "application/xml")


def pack_reasoning(text: str) -> str:
    """A reasoning as the `encrypted_content` of Responses, which a client sends back.

    The server needs no key and no store: this is an encoding, not a secret.
    """
    data = text.encode()
    return _VERSION + base64.b64encode(zlib.crc32(data).to_bytes(4) + data).decode()


def unpack_reasoning(packed: Json) -> str | None:
    """The reasoning; None if `packed` is damaged or comes from elsewhere."""
    if not isinstance(packed, str) or not packed.startswith(_VERSION):
        return None
    try:
        data = base64.b64decode(packed.removeprefix(_VERSION), validate=True)
        text = data[4:].decode()
    except (binascii.Error, ValueError):
        return None
    return text if zlib.crc32(data[4:]).to_bytes(4) == data[:4] else None


def readable(
    protocol: Literal["chat", "responses", "messages"], body: Mapping[str, Json]
) -> tuple[dict[str, Json], list[str]]:
    """The body of a request with a conversation that the model can read.

    - `reasoning` of a chat's message means the same as `reasoning_content`, which precedes it.
    - A reasoning item of Responses without `content` gets it from its `encrypted_content`.
    - Reasoning that cannot be read (encrypted elsewhere, damaged) is left out.
    - Arguments of a call that are blank are `{}`.
    - A text document is text. Any other medium in a tool's result becomes a text that says so.

    Returns:
        The new body, and the paths of what was left out. `body` stays as it is.
    """
    reader = _Reader("input_text" if protocol == "responses" else "text")
    reads = {"chat": reader.chat_message, "responses": reader.item, "messages": reader.message}
    name = "input" if protocol == "responses" else "messages"
    return {**body, **replaced(body, name, "", reads[protocol])}, reader.left_out


class _Reader:
    """Reads the messages of one body, which it may change. `left_out`: paths of what was."""

    def __init__(self, text_type: str) -> None:
        self.left_out: list[str] = []
        self._text_type = text_type

    def chat_message(self, message: dict[str, Json], path: str) -> Json:
        if message.get("role") == "assistant":
            other = message.pop("reasoning", None)
            if other and not message.get("reasoning_content"):
                message["reasoning_content"] = other
            message |= replaced(message, "tool_calls", path, _chat_call)
        read = self._result_part if message.get("role") == "tool" else self._part
        return message | replaced(message, "content", path, read)

    def item(self, item: dict[str, Json], path: str) -> Json:
        """An item of Responses."""
        kind = item.get("type")
        if kind == "reasoning":
            return self._reasoning(item, path)
        if kind == "function_call":
            return _with_arguments(item)
        if kind in _OUTPUTS:
            return item | replaced(item, "output", path, self._result_part)
        return item | replaced(item, "content", path, self._part)

    def message(self, message: dict[str, Json], path: str) -> Json:
        """A message of Messages."""
        return message | replaced(message, "content", path, self._block)

    def _reasoning(self, item: dict[str, Json], path: str) -> Json:
        content = item.get("content")
        parts = content if isinstance(content, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        text: str | None = "".join(text for text in texts if isinstance(text, str))
        text = text or unpack_reasoning(item.get("encrypted_content"))
        if text is None:
            self.left_out.append(path)
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {"type": "reasoning", "summary": [], "content": content}

    def _block(self, block: dict[str, Json], path: str) -> Json:
        kind = block.get("type")
        unread = kind == "thinking" and block.get("thinking") == "" and block.get("signature")
        if unread or kind == "redacted_thinking":
            self.left_out.append(path)
            return {"type": "thinking", "thinking": "", "signature": ""}
        if kind == "tool_result":
            return block | replaced(block, "content", path, self._result_part)
        return self._part(block, path)

    def _part(self, part: dict[str, Json], path: str) -> Json:
        text = _text_of_document(part)
        return part if text is None else {"type": self._text_type, "text": text}

    def _result_part(self, part: dict[str, Json], path: str) -> Json:
        part = self._part(part, path)
        medium = media_of(part.get("type"))
        if medium is None:
            return part
        self.left_out.append(path)
        text = f"[{medium} left out: the model reads only text]"
        return {"type": self._text_type, "text": text}


def replaced(
    holder: Mapping[str, Json], name: str, path: str, read: Callable[[dict[str, Json], str], Json]
) -> dict[str, Json]:
    """The list `name` of an object, whose own objects `read` has replaced; {}: there is no list.
    Their number stays, so that paths stay true."""
    value, where = holder.get(name), f"{path}.{name}" if path else name
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return {}
    return {
        name: [
            read(dict(one), f"{where}.{i}") if isinstance(one, Mapping) else one
            for i, one in enumerate(value)
        ]
    }


def _chat_call(call: dict[str, Json], path: str) -> Json:
    function = call.get("function")
    return {**call, "function": _with_arguments(function)} if isinstance(function, dict) else call


def _with_arguments(call: Mapping[str, Json]) -> Json:
    """A call whose arguments are JSON. Many clients write "" for none."""
    arguments = call.get("arguments")
    blank = isinstance(arguments, str) and not arguments.strip()
    return {**call, "arguments": "{}"} if blank else call


def _text_of_document(part: Mapping[str, Json]) -> str | None:
    """The text of a document in one of the three protocols, after its title; None: it has none."""
    kind, text, titles = part.get("type"), None, []
    if kind == "document" and isinstance(source := part.get("source"), dict):
        titles = [part.get("title"), part.get("context")]
        if source.get("type") == "text":
            text = source.get("data")
        elif source.get("type") == "base64":
            text = _decoded(source.get("media_type"), source.get("data"))
        elif source.get("type") == "content":
            text = _joined(source.get("content"))
    elif kind in ("file", "input_file"):
        holder = part.get("file") if kind == "file" else part
        if isinstance(holder, dict) and isinstance(data := holder.get("file_data"), str):
            titles = [holder.get("filename")]
            head, _, encoded = data.partition(";base64,")
            text = _decoded(head.removeprefix("data:"), encoded)
    if not isinstance(text, str):
        return None
    return "\n".join([*(one for one in titles if isinstance(one, str) and one), text])


def _joined(content: Json) -> str | None:
    """The text of Anthropic's blocks of text; None if there are others."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [block.get("text") if isinstance(block, dict) else None for block in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else None  # type: ignore[arg-type]


def _decoded(media_type: Json, data: Json) -> str | None:
    if not isinstance(media_type, str) or not media_type.startswith(_TEXT_FILES):
        return None
    try:
        return base64.b64decode(data, validate=True).decode()
    except (TypeError, binascii.Error, ValueError):
        return None
