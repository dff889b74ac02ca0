"""A fuzz of hostile JSON Schemas against every way in, over loopback, against a server's process.

FINWHALE_HOSTILE_SECONDS makes many more examples (`just long-hostile`). The examples are always the
same; hypothesis prints the arguments of one that fails.
"""

import contextlib
import http.client
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from finwhale.chat.template import _convert
from finwhale.errors import RequestError

from .attacks import MODEL, Target, ask, honest_client
from .hostile import ways_in

Fields = dict[str, Any]
# Five examples are always run, and these beside them where there is time.
GENERATED = 200 if float(os.environ.get("FINWHALE_HOSTILE_SECONDS", "0")) else 0
BODY_BYTES = 4 << 20

# How a definition refers to others.
HOLDERS = {
    "$ref": lambda refs: refs[0],
    "properties": lambda refs: {"properties": {str(i): ref for i, ref in enumerate(refs)}},
    "patternProperties": lambda refs: {
        "patternProperties": {rf"(?=a)\w{{150}}{i}": ref for i, ref in enumerate(refs)}
    },
    "items": lambda refs: {"items": refs[0], "type": "array"},
    "prefixItems": lambda refs: {"prefixItems": refs},
    "allOf": lambda refs: {"allOf": refs},
    "anyOf": lambda refs: {"anyOf": refs},
    "oneOf": lambda refs: {"oneOf": refs},
    "not": lambda refs: {"not": refs[0]},
    "if": lambda refs: {"if": refs[0], "then": refs[-1], "else": refs[0]},
    "dependentSchemas": lambda refs: {"dependentSchemas": {"x": refs[0], "y": refs[-1]}},
    "unevaluatedProperties": lambda refs: {"allOf": refs, "unevaluatedProperties": False},
    "unevaluatedItems": lambda refs: {"anyOf": refs, "unevaluatedItems": refs[0]},
    "$dynamicRef": lambda refs: {"$dynamicRef": refs[-1]["$ref"]},
}
SHAPES = {
    "chain": lambda i, n: [i + 1],
    "fan": lambda i, n: [i + 1, i + 1],
    "cycle": lambda i, n: [(i + 1) % n],
    "complete": lambda i, n: range(min(n, 30)),
    "tree": lambda i, n: [2 * i + 1, 2 * i + 2],
    "back": lambda i, n: [i + 1, i // 2],
}


def schema_of(shape: str, holder: str, count: int, levels: int, nested: bool) -> Fields:
    """A schema of `count` definitions.

    Args:
        levels: levels of nesting between a definition and its references.
        nested: each definition is in the $defs of the one before, as deep as a body may be.
    """
    definitions: dict[str, Any] = {}
    size = 0
    place = (lambda i: "#" + f"/$defs/{i % 12}") if nested else (lambda i: f"#/$defs/{i}")
    for i in range(count):
        refs = [{"$ref": place(min(j, count))} for j in SHAPES[shape](i, count)]
        made = HOLDERS[holder](refs)
        for _ in range(levels):
            made = {"type": "object", "properties": {"a": made}}
        definitions[str(i)] = made
        size += len(json.dumps(made)) + 12
        if size > BODY_BYTES // 3:
            break
    definitions[str(count)] = {"type": "string"}
    top = {"type": "object", "properties": {"x": {"$ref": place(0)}}}
    if not nested:
        return {**top, "$defs": definitions}
    inner: Fields = {}
    for i in reversed(range(min(12, count))):
        inner = {"$defs": {str(i): {**definitions[str(i)], **inner}}}
    return {**top, **inner}


def every_way(schema: Fields) -> dict[str, tuple[str, Fields]]:
    tool = {"name": "f", "input_schema": schema}
    function: Fields = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"messages": [{"role": "user", "content": "json"}], "max_tokens": 2}
    text = {"prompt": "x", "max_tokens": 2}
    space = {"type": "namespace", "name": "n", "description": "d"}
    return {
        **ways_in(schema),
        "chat tool": ("/v1/chat/completions", {**asked, "tools": [function]}),
        "responses namespace": ("/v1/responses", {
            "input": "x", "max_output_tokens": 2,
            "tools": [{**space, "tools": [{"type": "function", **function["function"]}]}]}),
        "messages tool": ("/v1/messages", {**asked, "tools": [tool]}),
        "messages strict tool": ("/v1/messages", {**asked, "tools": [{**tool, "strict": True}]}),
        "count_tokens": ("/v1/messages/count_tokens", {
            "messages": asked["messages"], "tools": [tool]}),
        "input_tokens": ("/v1/responses/input_tokens", {
            "input": "x", "tools": [{"type": "function", **function["function"]}]}),
        "tokenize": ("/tokenize", {"messages": asked["messages"], "tools": [function]}),
        "guided_json": ("/v1/completions", {**text, "guided_json": schema}),
        "guided_json, a string": ("/v1/completions", {**text, "guided_json": json.dumps(schema)}),
        "structured_outputs": ("/v1/completions", {
            **text, "structured_outputs": {"json": schema}}),
        "guided_grammar": ("/v1/completions", {
            **text, "guided_grammar": f"start: %json {json.dumps(schema)}"}),
        "arguments of a call": ("/v1/chat/completions", {
            "max_tokens": 2,
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [{
                    "id": "1", "type": "function",
                    "function": {"name": "f", "arguments": json.dumps(schema)}}]},
                {"role": "tool", "tool_call_id": "1", "content": "x"}]}),
    }  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("schemas")
    offered = ("--batch-dir", str(directory / "batches"), "--max-files", "100000")
    made = Target(directory / "log", *offered)
    yield made
    made.close()


@settings(
    max_examples=max(1, GENERATED), deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, *([Phase.generate] if GENERATED else [])],
)  # fmt: skip
@example("chain", "properties", 2500, 0, False)
@example("chain", "allOf", 400, 14, False)
@example("fan", "unevaluatedProperties", 40, 0, False)
@example("chain", "patternProperties", 300, 0, False)
@example("complete", "unevaluatedItems", 12, 0, True)
@given(
    st.sampled_from(sorted(SHAPES)),
    st.sampled_from(sorted(HOLDERS)),
    st.sampled_from([3, 20, 300, 2500, 30_000]),
    st.sampled_from([0, 1, 14]),
    st.booleans(),
)
def test_no_schema_ends_the_server(
    target: Target, shape: str, holder: str, count: int, levels: int, nested: bool
) -> None:
    schema = schema_of(shape, holder, count, levels, nested)
    with honest_client(target) as seen:
        for way, (path, fields) in every_way(schema).items():
            body = json.dumps({"model": MODEL, **fields}).encode()
            status, answer = ask(target.port, "POST", path, body)
            # A mask may be too slow only after the trial: an error of this request alone.
            allowed = status in (200, 400, 413, 429) or b"generation_failed" in answer
            assert allowed and target.process.poll() is None, (way, status, answer[:300])
        batch(target, schema)
    assert not seen.failures, seen.failures[:3]
    function = {"name": "f", "parameters": schema}
    with contextlib.suppress(RequestError):
        tool = {"type": "function", "function": function}
        _convert([{"role": "user", "content": "x"}], thinking=True, tools=[tool])


def batch(target: Target, schema: Fields) -> None:
    """Runs a batch of chat completions, one with a tool of this schema, to its end."""
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    url = "/v1/chat/completions"
    lines = [
        {"custom_id": str(i), "method": "POST", "url": url, "body": {**asked, **more}}
        for i, more in enumerate(({}, {"tools": [tool]}, {}))
    ]
    parts = "\r\n".join([
        '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch',
        '--b\r\ncontent-disposition: form-data; name="file"; filename="x.jsonl"\r\n',
        "\n".join(map(json.dumps, lines)) + "\r\n--b--\r\n",
    ])  # fmt: skip
    kind = {"content-type": "multipart/form-data; boundary=b"}
    connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=60)
    connection.request("POST", "/v1/files", parts.encode(), kind)
    file = json.loads(connection.getresponse().read())
    connection.close()
    assert "id" in file, file
    body = {"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"}
    status, answer = ask(target.port, "POST", "/v1/batches", json.dumps(body).encode())
    made = json.loads(answer)
    assert status == 200, made
    while made["status"] not in ("completed", "failed", "expired", "cancelled"):
        assert target.process.poll() is None
        time.sleep(0.05)
        made = json.loads(ask(target.port, "GET", f"/v1/batches/{made['id']}")[1])
    assert made["status"] == "completed", made
