"""Nothing in a request is dropped silently: what is unknown is refused by name, or reported."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from finwhale.chat.known_fields import MAX_NAMED, check_fields
from finwhale.server.protocols import known_fields
from finwhale.server.protocols.schemas import ChatBody

from .running import MODEL, RunningServer
from .test_limits import request

CHAT, COMPLETIONS, RESPONSES, MESSAGES, COUNT, INPUT_TOKENS, TOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/tokenize",
)
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
TEXT = {"type": "text", "text": "Hi"}
# One body a protocol, in which every object has only known fields.
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": MODEL,
        "max_tokens": 2,
        "tools": [{"type": "function", "function": FUNCTION}],
        "response_format": {"type": "text"},
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": [TEXT], "name": "ann"},
            # The fields of the openai package's message.model_dump().
            {
                "role": "assistant", "content": None, "refusal": None, "audio": None,
                "annotations": [], "function_call": None, "reasoning": None,
                "tool_calls": [{"id": "a", "type": "function", "index": 0,
                                "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "3"},
        ],
    },
    COMPLETIONS: {"model": MODEL, "prompt": "Hi", "max_tokens": 2,
                  "response_format": {"type": "text"}},
    RESPONSES: {
        "model": MODEL,
        "max_output_tokens": 2,
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "none"},
        "input": [
            {"role": "user", "content": "Hi"},
            {"type": "message", "id": "m", "status": "completed", "role": "assistant",
             "content": [{"type": "output_text", "text": "Yes", "annotations": []}]},
            {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "x"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c",
             "output": [{"type": "input_text", "text": "3"}]},
        ],
    },
    MESSAGES: {
        "model": MODEL,
        "max_tokens": 2,
        "system": [{**TEXT, "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "messages": [
            {"role": "user", "content": [TEXT]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [TEXT]}]},
        ],
    },
}  # fmt: skip
GOOD[COUNT] = {k: v for k, v in GOOD[MESSAGES].items() if k != "max_tokens"}
GOOD[INPUT_TOKENS] = GOOD[RESPONSES]
GOOD[TOKENIZE] = {k: GOOD[CHAT][k] for k in ("messages", "tools")}
# Objects that hold what the client defines.
FREE = {"parameters", "input_schema", "input", "cache_control"}


def post(server: RunningServer, path: str, body: Any) -> tuple[int, dict[str, str], Any]:
    status, headers, answer = request(server, "POST", path, json.dumps(body).encode())
    return status, headers, json.loads(answer)


def objects(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all objects in a body. Reasoning may come from anywhere, with any fields."""
    if isinstance(value, dict) and value.get("type") == "reasoning":
        return []
    found = [path] if isinstance(value, dict) else []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items if isinstance(value, dict | list) else ():
        if isinstance(item, dict | list) and not (name in FREE and isinstance(item, dict)):
            found += objects(item, (*path, name))
    return found


def changed(body: Any, path: tuple[Any, ...], change: dict[str, Any]) -> Any:
    body = json.loads(json.dumps(body))
    holder = body
    for step in path:
        holder = holder[step]
    holder.update(change)
    return body


def test_an_unknown_field_is_refused_at_every_depth(server: RunningServer) -> None:
    for path, good in GOOD.items():
        status, headers, answer = post(server, path, good)
        assert status == 200, answer
        assert "finwhale-ignored" not in headers
        json_paths = objects(good)
        assert len(json_paths) > 1
        for json_path in json_paths:
            for name in ("nonsense", "wo_eos") if json_path else ("nonsense",):
                status, _, answer = post(server, path, changed(good, json_path, {name: 1}))
                where = ".".join(str(step) for step in (*json_path, name))
                assert status == 400, (path, where)
                assert answer["error"]["message"].startswith(f"unknown parameter: {where} (")
                assert "--lenient" in answer["error"]["message"]
                if "param" in answer["error"]:
                    assert answer["error"]["param"] == where
                    assert answer["error"]["code"] == "unknown_parameter"
    body = {**GOOD[CHAT], "stream": True, "stream_options": {"nonsense": 1}}
    assert post(server, CHAT, body)[2]["error"]["param"] == "stream_options.nonsense"
    body = changed(GOOD[RESPONSES], ("input", 3), {"async_": None})
    assert post(server, RESPONSES, body)[0] == 200, "a null says nothing"
    assert post(server, RESPONSES, {**body, "nonsense": None})[0] == 400
    for name in ("task", "response_format", "thinking", "tools"):
        body = changed(GOOD[CHAT], ("messages", 1), {name: {}})
        assert post(server, CHAT, body)[2]["error"]["param"] == f"messages.1.{name}"


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    (CHAT, ("messages", 1), {"content": [TEXT, IMAGE]},
     "messages.1.content.1: images are not supported (type image_url)"),
    (CHAT, ("messages", 1), {"content": [{"type": "input_audio", "input_audio": {}}]},
     "messages.1.content.0: audio inputs are not supported"),
    (CHAT, ("messages", 1), {"content": [{"type": "file", "file": {}}]}, "files are not supported"),
    (CHAT, ("messages", 1), {"content": [{"type": "odd\n\x1b"}]}, "type odd?? is not supported"),
    (CHAT, ("messages", 0), {"role": "robot"},
     "messages.0: role must be one of system, developer, user"),
    (RESPONSES, (), {"previous_response_id": "resp_1"}, "send the earlier items in `input`"),
    (RESPONSES, (), {"background": True}, "background: this server answers each request at once"),
    (RESPONSES, (), {"truncation": "auto"}, "truncation: this server never shortens"),
    (CHAT, (), {"modalities": ["audio"]}, "modalities: the model writes only text"),
    (CHAT, ("messages", 2), {"refusal": "no"}, "messages.2.refusal is not supported"),
    (CHAT, (), {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
     "tools.0: type custom is not supported; supported: function"),
    (TOKENIZE, ("messages", 1), {"content": [IMAGE]}, "images are not supported"),
    (RESPONSES, (), {"tools": [{"type": "image_generation"}]}, "tools.0: images are not supported"),
    (RESPONSES, (), {"tools": [{"type": "mcp", "server_url": "x"}]}, "tools.0: type mcp is not"),
    (RESPONSES, (), {"tools": [{"type": "local_shell"}]}, "tools.0: type local_shell is not"),
    (RESPONSES, ("input", 0), {"content": [{"type": "input_image", "image_url": "x"}]},
     "input.0.content.0: images are not supported"),
    (RESPONSES, ("input", 0), {"content": [{"type": "input_file", "file_id": "x"}]},
     "input.0.content.0: files are not supported"),
    (RESPONSES, (), {"input": [{"type": "item_reference", "id": "x"}]},
     "input.0: type item_reference is not supported"),
    (RESPONSES, (), {"tool_choice": {"type": "mcp"}}, "tool_choice: type mcp is not supported"),
    (MESSAGES, ("messages", 0), {"content": [{"type": "image", "source": {}}]},
     "messages.0.content.0: images are not supported"),
    (MESSAGES, ("messages", 0), {"content": [{"type": "document", "source": {}}]},
     "messages.0.content.0: documents are not supported"),
    (MESSAGES, (), {"tools": [{"type": "bash_20250124", "name": "bash"}]},
     "tools.0: type bash_20250124 is not supported"),
    (COUNT, ("messages", 0), {"content": [{"type": "image", "source": {}}]}, "images are not"),
]  # fmt: skip


def test_what_the_model_cannot_read_is_refused_by_name(start: Callable[..., RunningServer]) -> None:
    # --lenient is about fields, not about these.
    server = start(lenient=True)
    for path, json_path, change, wanted in CASES:
        status, _, answer = post(server, path, changed(GOOD[path], json_path, change))
        assert status == 400 and wanted in answer["error"]["message"], (wanted, answer)


def test_lenient_reports_unknown_fields(
    start: Callable[..., RunningServer], caplog: pytest.LogCaptureFixture
) -> None:
    server = start(lenient=True)
    for path, good in GOOD.items():
        body = good
        for json_path in objects(good):
            body = changed(body, json_path, {"wo_eos": 1})
        status, headers, answer = post(server, path, body)
        assert status == 200, answer
        assert "wo_eos" in headers["finwhale-ignored"].split(",")
        json_paths = {
            ".".join(str(s) for s in (*json_path, "wo_eos")) for json_path in objects(good)
        }
        if len(json_paths) <= MAX_NAMED:
            assert set(headers["finwhale-ignored"].split(",")) == json_paths
    named = [
        vars(r)["fields"] for r in caplog.records if r.message == "ignored fields of a request"
    ]
    assert len(named) == len(GOOD)
    # A stream has the header too. Names are bounded, and harmless in a header.
    hostile = {f"é\r\nx: {i}" + "a" * 500: 1 for i in range(50)}
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1, "stream": True, **hostile}
    status, headers, _ = request(server, "POST", COMPLETIONS, json.dumps(body).encode())
    ignored = headers["finwhale-ignored"]
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert ignored.startswith("???x??0aaa") and ignored.endswith(",...") and len(ignored) < 2000


def test_a_tool_without_an_effect_is_named(server: RunningServer) -> None:
    """Codex sends web_search always."""
    tools = [*GOOD[RESPONSES]["tools"], {"type": "web_search", "external_web_access": False}]
    status, headers, _ = post(server, RESPONSES, {**GOOD[RESPONSES], "tools": tools})
    assert status == 200 and headers["finwhale-ignored"] == "tools.1.type=web_search"


def test_every_shape_belongs_to_a_field() -> None:
    for body, below in known_fields._BELOW.items():
        assert below.keys() <= body.model_fields.keys()
    nested = known_fields.shape_of(ChatBody)["stream_options"]
    assert isinstance(nested, dict) and "include_usage" in nested


@pytest.mark.parametrize("odd", [None, 1, "x", [], [[]], [None], [{"type": []}], {"type": {}}])
def test_odd_values_are_left_to_the_check_of_types(odd: Any) -> None:
    shape = known_fields.shape_of(ChatBody)
    for name in ("messages", "tools", "response_format", "tool_choice"):
        assert not check_fields(shape, {name: odd})
    if not isinstance(odd, dict):
        assert not check_fields(shape, odd)
