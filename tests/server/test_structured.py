"""Structured output: every answer matches what was asked for, after thinking too."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import httpx2 as httpx
import openai
import pytest
from jsonschema_rs import validate

from finwhale import LLM

from .running import MODEL, RunningServer
from .test_openai import QUESTION

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["whale", "frog", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
TOOL_PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    },
    "required": ["city", "days", "unit", "exact"],
    "additionalProperties": False,
}

# For tests of which tool is called: the fewest tokens.
ONE_PARAMETER = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": TOOL_PARAMETERS, **more}}


@pytest.mark.parametrize("effort", [pytest.param("none", marks=pytest.mark.long), "low"])
def test_all_of_several_match_the_schema(server: RunningServer, effort: str) -> None:
    made = server.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, response_format=FORMAT, reasoning_effort=effort,
        temperature=1.0, seed=1, n=8, max_tokens=400,
    )  # fmt: skip
    contents = [choice.message.content for choice in made.choices]
    assert len(contents) == 8 and len(set(contents)) > 5
    for choice in made.choices:
        assert choice.finish_reason == "stop"
        validate(PERSON, json.loads(choice.message.content or ""))
        reasoning = getattr(choice.message, "reasoning_content", None)
        assert bool(reasoning) == (effort == "low")


def test_json_object_regex_and_grammar(server: RunningServer) -> None:
    client = server.openai()

    def ask(response_format: dict[str, Any], n: int = 4, **options: Any) -> list[str]:
        made = client.chat.completions.create(
            model=MODEL, n=n, seed=3, max_tokens=40, **options,
            messages=[{"role": "user", "content": "Answer in json."}],
            response_format=response_format,  # type: ignore[arg-type]
        )  # fmt: skip
        return [choice.message.content or "" for choice in made.choices]

    for text in ask({"type": "json_object"}, n=1):
        assert text.startswith("{")
    for text in ask({"type": "regex", "regex": r"[a-z]{3,9}-\d{2}"}):
        assert re.fullmatch(r"[a-z]{3,9}-\d{2}", text)
    for text in ask(
        {"type": "grammar", "grammar": 'start: "a" inner "b"\ninner: "" | "(" inner ")"'}
    ):
        assert re.fullmatch(r"a\(*\)*b", text) and text.count("(") == text.count(")")


def test_stop_string_cuts_structured_output(server: RunningServer) -> None:
    made = server.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, response_format=FORMAT, stop=['"age"'], max_tokens=200
    )
    text = made.choices[0].message.content or ""
    assert text.lstrip().startswith("{") and '"name"' in text and '"age"' not in text


def test_completion_with_a_format(server: RunningServer) -> None:
    made = server.openai().completions.create(
        model=MODEL, prompt="The answer is", max_tokens=20, n=3,
        extra_body={"response_format": {"type": "regex", "regex": "yes|no"}},
    )  # fmt: skip
    assert all(choice.text in ("yes", "no") for choice in made.choices)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """OpenAI's choice of some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools(server: RunningServer) -> None:
    """The prompt has only the allowed tools, in both of OpenAI's protocols."""
    chat, responses = server.openai().chat.completions, server.openai().responses

    def prompt_tokens(choice: Any, *names: str) -> int:
        made = chat.create(
            model=MODEL, messages=QUESTION, max_tokens=1, tool_choice=choice,
            tools=[function(name) for name in names],  # type: ignore[misc]
        )  # fmt: skip
        assert made.usage is not None
        return made.usage.prompt_tokens

    both = prompt_tokens("auto", "weather", "sky")
    assert prompt_tokens(allowed("auto", "weather", "sky"), "weather", "sky") == both
    assert prompt_tokens(allowed("auto", "sky"), "weather", "sky") == prompt_tokens("auto", "sky")
    call = responses.create(
        model=MODEL, input="Hi", max_output_tokens=300,
        tools=[
            {"type": "function", "name": name, "parameters": ONE_PARAMETER}
            for name in ("weather", "sky")
        ],
        tool_choice={
            "type": "allowed_tools", "mode": "required",
            "tools": [{"type": "function", "name": "sky"}],
        },
    ).output[-1]  # fmt: skip
    assert call.type == "function_call" and call.name == "sky"
    for wrong, message in (
        (allowed("auto", "sea"), "'sea', which is not among"),
        (allowed("never", "sky"), "auto or required, got 'never'"),
        ({"type": "allowed_tools"}, "needs a list of tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            prompt_tokens(wrong, "sky")


@pytest.mark.parametrize(
    ("choice", "effort"),
    [
        ("required", "low"),
        ({"type": "function", "function": {"name": "sky"}}, "none"),
        pytest.param(allowed("required", "sky"), "none", marks=pytest.mark.long),
    ],
)
def test_tool_choice(server: RunningServer, effort: str, choice: Any) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "tools": [function("weather"), function("sky")],
        "tool_choice": choice,
        "reasoning_effort": effort,
        "parallel_tool_calls": False,
        "max_tokens": 300,
        "seed": 2,
    }
    client = server.openai()
    made = client.chat.completions.create(**options)
    assert made.choices[0].finish_reason == "tool_calls"
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "function"
    # Any tool may be called only if all are allowed.
    assert call.function.name in (("weather", "sky") if choice == "required" else ("sky",))
    validate(TOOL_PARAMETERS, json.loads(call.function.arguments))
    name, arguments, pieces = "", "", 0
    for chunk in client.chat.completions.create(**options, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.index == 0 and delta.function is not None
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
            pieces += 1
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert pieces > 3


def test_names_of_parameters(server: RunningServer) -> None:
    names = ["first name", 'a"b', "back\\slash", "new\nline"]
    schema = {
        "type": "object", "properties": {name: {"enum": ["Ann", "Bob"]} for name in names},
        "required": names,
    }  # fmt: skip
    made = server.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, tool_choice="required", parallel_tool_calls=False,  # type: ignore[call-overload]
        tools=[{"type": "function", "function": {"name": "add", "parameters": schema}}],
    )  # fmt: skip
    (call,) = made.choices[0].message.tool_calls
    validate(schema, json.loads(call.function.arguments))
    block = server.anthropic().messages.create(
        model=MODEL, messages=QUESTION, max_tokens=300, tool_choice={"type": "any"},  # type: ignore[arg-type]
        tools=[{"name": "add", "input_schema": schema}],
    ).content[0]  # fmt: skip
    validate(schema, block.input)  # type: ignore[union-attr]


def test_strict_tools_leave_text_free(server: RunningServer) -> None:
    made = server.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[function("weather", strict=True)],  # type: ignore[list-item]
        temperature=0, max_tokens=60,
    )  # fmt: skip
    assert made.choices[0].message.content
    assert not made.choices[0].message.tool_calls


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "sky"}])
def test_messages_tool_choice(server: RunningServer, choice: dict[str, Any]) -> None:
    tools: Any = [{"name": name, "input_schema": ONE_PARAMETER} for name in ("weather", "sky")]
    options: dict[str, Any] = {
        "model": MODEL, "max_tokens": 300, "messages": QUESTION, "tools": tools,
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
    }  # fmt: skip
    client = server.anthropic()
    made = client.messages.create(**options)
    assert made.stop_reason == "tool_use"
    block = made.content[-1]
    assert block.type == "tool_use" and (block.name == "sky" or choice["type"] == "any")
    validate(ONE_PARAMETER, block.input)
    # The answer, with the tool's result, is a conversation that goes on.
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "21 degrees"}
    more = client.messages.create(
        model=MODEL, max_tokens=10, tools=tools,
        messages=[*QUESTION, {"role": "assistant", "content": made.content},
                  {"role": "user", "content": [result]}],  # type: ignore[misc]
    )  # fmt: skip
    assert more.usage.output_tokens > 0


def test_messages_output_format(server: RunningServer) -> None:
    made = server.anthropic().messages.create(
        model=MODEL, max_tokens=300, messages=QUESTION,
        output_config={"format": {"type": "json_schema", "schema": PERSON}},
    )  # fmt: skip
    block = made.content[-1]
    assert block.type == "text"
    validate(PERSON, json.loads(block.text))


def test_responses_tools_and_format(server: RunningServer) -> None:
    client = server.openai()
    made = client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=300, tool_choice="required",
        tools=[{"type": "function", "name": "sky", "parameters": TOOL_PARAMETERS, "strict": True}],
        parallel_tool_calls=False,
    )  # fmt: skip
    call = made.output[-1]
    assert call.type == "function_call" and call.name == "sky"
    validate(TOOL_PARAMETERS, json.loads(call.arguments))
    assert made.tool_choice == "required"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21"}
    more = client.responses.create(
        model=MODEL, max_output_tokens=8,
        input=[{"role": "user", "content": "Hi"}, call.model_dump(), result],
    )  # fmt: skip
    assert more.output
    shaped = client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=300,
        text={"format": {"type": "json_schema", "name": "person", "schema": PERSON}},
    )  # fmt: skip
    validate(PERSON, json.loads(shaped.output_text))


def test_one_call_at_a_time_without_tools(server: RunningServer) -> None:
    """Codex asks for that when it compacts a conversation."""
    client = server.openai()
    made = client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=8, tools=[], parallel_tool_calls=False
    )
    assert made.output_text
    chat = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=8, parallel_tool_calls=False
    )
    assert chat.choices[0].message.content


NOT_ENFORCED = {
    "type": "object",
    "properties": {
        "when": {"type": "integer", "not": {"const": 3}},
        "where": {"type": "string", "format": "path", "maxLength": 2},
        "more": {"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 0},
    },
    "required": ["when", "where", "more"],
    "additionalProperties": False,
}


def bodies(strict: bool) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Requests with a schema that cannot be enforced: the path, the body, and what is named."""
    also = {"strict": True} if strict else {}
    good = {"name": "good", "parameters": ONE_PARAMETER, "strict": True}
    bad = {"name": "bad", "parameters": NOT_ENFORCED, **also}
    asked: dict[str, Any] = {"messages": QUESTION, "max_tokens": 200}
    tool = "tools.bad.properties.when.not"
    chat_format = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": NOT_ENFORCED, **also},
    }
    responses_format = {"type": "json_schema", "name": "x", "schema": NOT_ENFORCED, **also}
    anthropic_tools = [
        {
            "name": one["name"],
            "input_schema": one["parameters"],
            **{k: v for k, v in one.items() if k == "strict"},
        }
        for one in (good, bad)
    ]
    found = {
        "chat tools": ("/v1/chat/completions", {**asked, "tool_choice": "required", "tools": [
            {"type": "function", "function": one} for one in (good, bad)]}, tool),
        "responses tools": ("/v1/responses", {"input": "Hi", "tool_choice": "required",
            "max_output_tokens": 200, "tools": [{"type": "function", **good},
                                                {"type": "function", **bad}]}, tool),
        "messages tools": ("/v1/messages", {**asked, "tools": anthropic_tools,
                                            "tool_choice": {"type": "any"}}, tool),
        "chat format": ("/v1/chat/completions", {**asked, "response_format": chat_format},
                        "response_format.properties.when.not"),
        "completions format": ("/v1/completions", {"prompt": "x", "max_tokens": 200,
            "response_format": chat_format}, "response_format.properties.when.not"),
        "responses format": ("/v1/responses", {"input": "Hi", "max_output_tokens": 200,
            "text": {"format": responses_format}}, "text.format.properties.when.not"),
    }  # fmt: skip
    if not strict:  # Anthropic's formats cannot ask for it
        found["messages format"] = ("/v1/messages", {**asked, "output_config": {
            "format": {"type": "json_schema", "schema": NOT_ENFORCED}}},
            "output_config.format.properties.when.not")  # fmt: skip
    return found


@pytest.mark.parametrize("name", bodies(False))
def test_what_cannot_be_enforced_is_named(server: RunningServer, name: str) -> None:
    """Strict and other tools may stand side by side."""
    path, body, named = bodies(False)[name]
    answer = httpx.post(server.url + path, json={"model": MODEL, **body}, timeout=200)
    assert answer.status_code == 200, answer.text
    assert answer.headers["finwhale-ignored"] == named
    assert "bad" in answer.text or "good" in answer.text or "when" in answer.text


@pytest.mark.parametrize("name", bodies(True))
def test_strict_refuses_what_cannot_be_enforced(server: RunningServer, name: str) -> None:
    path, body, named = bodies(True)[name]
    answer = httpx.post(server.url + path, json={"model": MODEL, **body}, timeout=200)
    assert answer.status_code == 400 and named in answer.text, answer.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_call_that_max_tokens_cuts(server: RunningServer, path: str) -> None:
    """Over a socket, streamed and whole: the answer says that it is incomplete, and no token of the
    markup is in it."""
    with_tools = {name: body for name, body in bodies(False).items() if "tools" in name}
    name, body = next((name, one[1]) for name, one in with_tools.items() if one[0] == path)
    words = {"chat": '"length"', "responses": '"incomplete"', "messages": '"max_tokens"'}
    for count, stream in itertools.product((1, 3, 8, 15, 22, 30), (False, True)):
        if not stream and count in (3, 15, 22):
            continue
        sent: dict[str, Any] = {"model": MODEL, **body, "stream": stream, "temperature": 0}
        sent |= {key: count for key in ("max_tokens", "max_output_tokens") if key in body}
        text = httpx.post(server.url + path, json=sent, timeout=200).text
        assert words[name.split()[0]] in text and "DSML" not in text
        assert "invoke name" not in text and "parameter name" not in text


def test_a_server_with_tool_grammar_auto(short_demo_path: Path) -> None:
    """The server holds calls that no request forces, and its grammar refuses no request."""
    options = {"max_num_seqs": 8, "max_model_len": 2048, "tool_grammar": "auto"}
    llm = LLM(short_demo_path, device="cpu", **options)
    server = RunningServer(llm._engine)
    dsml = llm.get_tokenizer().added_ids[recipe.SpecialToken.Dsml.default_str()]
    begin = {dsml: 100} | dict.fromkeys(llm.get_tokenizer().encode("<"), 50)
    try:
        asked = {"model": MODEL, "messages": QUESTION, "logit_bias": begin, "max_tokens": 110}
        url = f"{server.url}/v1/chat/completions"
        bad = {"type": "object", "properties": {"a": {"type": "nonsense"}}, "required": ["a"]}
        for schema, ignored in (
            (TOOL_PARAMETERS, None),
            (NOT_ENFORCED, "tools.f.properties.when.not"),
            (bad, "tools"),
        ):
            sent = {**asked, "tools": [function("f", parameters=schema)]}
            answer = httpx.post(url, json=sent, timeout=200)
            assert answer.status_code == 200, answer.text
            assert answer.headers.get("finwhale-ignored") == ignored
            calls = answer.json()["choices"][0]["message"].get("tool_calls")
            assert bool(calls) == (schema is not bad)
            if schema is TOOL_PARAMETERS:
                validate(schema, json.loads(calls[0]["function"]["arguments"]))
        strict = {**asked, "tools": [function("f", parameters=NOT_ENFORCED, strict=True)]}
        assert httpx.post(url, json=strict, timeout=200).status_code == 400
    finally:
        server.close()
