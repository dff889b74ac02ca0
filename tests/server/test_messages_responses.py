"""The anthropic package, and the openai package's responses, as clients."""

import json
from typing import Any, Literal

import anthropic
import httpx2 as httpx
import openai
import pytest

from finwhale import LLM
from finwhale.chat.history import unpack_reasoning

from .running import MODEL, RunningServer
from .test_openai import ANSWER, QUESTION

TEXT = "What is the capital of France?"


@pytest.fixture(scope="module")
def demo_llm(whole_demo_llm: LLM) -> LLM:
    """Here, the embedded model's texts are known."""
    return whole_demo_llm


@pytest.mark.parametrize("thinking", [False, True])
def test_messages(server: RunningServer, thinking: bool) -> None:
    client = server.anthropic()
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 120,
        "messages": QUESTION,
        "extra_body": {"temperature": 0},
        "thinking": (
            {"type": "enabled", "budget_tokens": 1024} if thinking else {"type": "disabled"}
        ),
    }
    whole = client.messages.create(**options)
    kinds = [block.type for block in whole.content]
    assert kinds == (["thinking", "text"] if thinking else ["text"])
    assert whole.content[-1].text == ANSWER  # type: ignore[union-attr]
    assert whole.stop_reason == "end_turn"
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == ANSWER
    assert [block.type for block in final.content] == kinds
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(
        model=MODEL, messages=QUESTION, thinking=options["thinking"]
    )
    assert counted.input_tokens == whole.usage.input_tokens


SKY, SEA = (
    {"name": name, "description": "d " * 9, "input_schema": {"type": "object", "properties": {}}}
    for name in ("sky", "sea")
)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [SKY, SEA]},
        {"tools": [SKY, SEA], "tool_choice": {"type": "tool", "name": "sea"}},
        {"tools": [SKY, SEA], "tool_choice": {"type": "none"}},
        {"output_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
    ],
)
def test_count_tokens_counts_the_prompt_of_messages(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    client = server.anthropic()
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION}
    plain = client.messages.count_tokens(**options).input_tokens
    options["extra_body"] = fields
    made = client.messages.create(**options, max_tokens=1)
    counted = client.messages.count_tokens(**options).input_tokens
    assert counted == made.usage.input_tokens
    if fields.keys() & {"output_format", "output_config"}:
        assert counted > plain + 20, "the prompt has no schema"


def test_the_tool_runner_of_anthropic_s_client(server: RunningServer) -> None:
    """It asks for a thread on the server, is refused, and sends the whole conversation."""

    @anthropic.beta_tool
    def get_weather(city: Literal["Oslo", "Rome"]) -> str:  # A free text may not end in time.
        """Returns the weather."""
        return f"sunny in {city}"

    runner = server.anthropic().beta.messages.tool_runner(
        model=MODEL, max_tokens=200, messages=QUESTION, tools=[get_weather],
        tool_choice={"type": "any"}, max_iterations=2,
    )  # fmt: skip
    first, second = runner
    assert first.stop_reason == "tool_use" and first.content[-1].type == "tool_use"
    cached = second.usage.cache_read_input_tokens or 0
    assert cached + second.usage.input_tokens > first.usage.input_tokens


def test_messages_stop_and_length(server: RunningServer) -> None:
    client = server.anthropic()
    options: dict[str, Any] = {
        "model": MODEL, "messages": QUESTION, "extra_body": {"temperature": 0},
    }  # fmt: skip
    made = client.messages.create(**options, max_tokens=50, stop_sequences=["Par"])
    assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "Par")
    made = client.messages.create(**options, max_tokens=2, system="Be short.")
    assert made.stop_reason == "max_tokens" and made.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"model": "other"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"messages": [{"role": "robot", "content": "x"}]}, anthropic.BadRequestError),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, anthropic.BadRequestError),
        ({"extra_body": {"unheard_of": 1}}, anthropic.BadRequestError),
        ({"tool_choice": {"type": "any"}}, anthropic.BadRequestError),
    ],
)
def test_messages_errors(
    server: RunningServer, wrong: dict[str, Any], kind: type[anthropic.APIStatusError]
) -> None:
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 10, **wrong}
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            server.anthropic().messages.create(**options, stream=stream)
        body = caught.value.body
        assert isinstance(body, dict) and body["type"] == "error"
        assert body["error"]["type"] in ("not_found_error", "invalid_request_error")
        assert body["error"]["message"]
        assert (caught.value.request_id or "").startswith("req_")


@pytest.mark.parametrize("thinking", [False, True])
def test_responses(server: RunningServer, thinking: bool) -> None:
    client = server.openai()
    options: dict[str, Any] = {
        "model": MODEL,
        "input": TEXT,
        "temperature": 0,
        "reasoning": {"effort": "low" if thinking else "none"},
    }
    whole = client.responses.create(**options)
    assert whole.output_text == ANSWER and whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning"] * thinking + ["message"]
    text, reasoning, numbers, final = "", "", [], None
    for event in client.responses.create(**options, stream=True):
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type == "response.reasoning_text.delta":
            reasoning += event.delta
        elif event.type == "response.completed":
            final = event.response
    assert text == ANSWER and bool(reasoning) == thinking
    assert numbers == list(range(len(numbers)))
    assert final is not None and final.usage == whole.usage


def test_responses_conversation_and_length(server: RunningServer) -> None:
    client = server.openai()
    turns: list[Any] = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": [{"type": "input_text", "text": TEXT}]},
    ]
    made = client.responses.create(
        model=MODEL, input=turns, instructions="Be short.", max_output_tokens=2, temperature=0,
    )  # fmt: skip
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"
    assert made.instructions == "Be short."


@pytest.mark.parametrize(
    "wrong",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"include": ["message.output_text.unheard_of"]},
        {"input": [{"type": "function_call_output", "call_id": "none", "output": "1"}]},
        {"tools": [{"type": "function", "name": "not a name"}]},
        {"temperature": 9},
    ],
)
def test_responses_errors(server: RunningServer, wrong: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().responses.create(**{"model": MODEL, "input": TEXT, **wrong})
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "invalid_request_error"


def test_included_logprobs(server: RunningServer) -> None:
    options: dict[str, Any] = {"model": MODEL, "input": TEXT, "max_output_tokens": 2}
    for fields, tops in (({}, 0), ({"top_logprobs": 1}, 1)):
        made = server.openai().responses.create(
            **options, **fields, include=["message.output_text.logprobs"]
        )
        (part,) = (part for item in made.output for part in getattr(item, "content", ()))
        assert part.logprobs and all(len(token.top_logprobs) == tops for token in part.logprobs)


def test_a_custom_tool_that_must_be_called(server: RunningServer) -> None:
    made = server.openai().responses.create(
        model=MODEL, input=TEXT, max_output_tokens=60, temperature=0,
        tools=[
            {"type": "function", "name": "get_weather", "parameters": {}, "strict": None},
            {"type": "custom", "name": "apply_patch"},
        ],
        tool_choice={"type": "custom", "name": "apply_patch"},
    )  # fmt: skip
    call = made.output[-1]
    assert call.type == "custom_tool_call" and call.name == "apply_patch"


def expire(server: RunningServer) -> None:
    """The time of all running requests is over."""

    def all_of_them() -> None:
        for live in list(server.client._live.values()):
            live.generation.expire()

    assert server.client._loop is not None
    server.client._loop.call_soon_threadsafe(all_of_them)


def test_a_responses_stream_that_fails(server: RunningServer) -> None:
    """Its last event is a typed error with the next number, and the client raises it."""
    body: dict[str, Any] = {
        "model": MODEL, "input": TEXT, "max_output_tokens": 4000, "stream": True,
    }  # fmt: skip
    own = {"ignore_eos": True}
    url = f"{server.url}/v1/responses"
    with httpx.stream("POST", url, json=body | own, timeout=200) as response:
        pieces = response.iter_text()
        first = next(pieces)
        expire(server)
        answer = first + "".join(pieces)
    *_, before, last = answer.strip().split("\n\n")
    assert last.startswith("event: error\n")
    told, sent = (json.loads(event.partition("data: ")[2]) for event in (last, before))
    assert told["type"] == "error" and told["code"] == told["error"]["code"] == "timeout"
    assert told["sequence_number"] == sent["sequence_number"] + 1
    stream = server.openai().responses.create(**body, extra_body=own)
    expire(server)
    with pytest.raises(openai.APIError, match="longer than the server allows"):
        list(stream)


def test_a_responses_tool_whose_name_is_no_string(server: RunningServer) -> None:
    """deepseek-recipe ignores tools of this type, and so their fields."""
    tool: Any = {"type": "web_search", "name": ["x"]}
    made = server.openai().responses.create(
        model=MODEL, input=TEXT, tools=[tool], max_output_tokens=2, temperature=0
    )
    assert made.status == "incomplete"


@pytest.mark.parametrize("default", [False, True])
def test_thinking_in_responses(start: Any, default: bool) -> None:
    client = start(default_thinking=default).openai()

    def begins_with(reasoning: dict[str, Any] | None = None, **fields: Any) -> str:
        more: dict[str, Any] = {} if reasoning is None else {"reasoning": reasoning}
        made = client.responses.create(
            model=MODEL, input=TEXT, max_output_tokens=3, temperature=0, extra_body=fields, **more
        )
        return made.output[0].type

    on, off = ({"thinking": {"type": kind}} for kind in ("enabled", "disabled"))
    assert begins_with() == ("reasoning" if default else "message")
    assert begins_with(**on) == begins_with({"effort": "low"}, **on) == "reasoning"
    assert begins_with(**off) == begins_with({"effort": "none"}, **off) == "message"
    for effort, fields in (("none", on), ("low", off)):
        with pytest.raises(openai.BadRequestError, match=r"thinking is .*, but reasoning\.effort"):
            begins_with({"effort": effort}, **fields)
    with pytest.raises(openai.BadRequestError, match=r"thinking\.type must be"):
        begins_with(thinking={"type": "sometimes"})


def test_input_tokens_counts_the_prompt_of_responses(server: RunningServer) -> None:
    client = server.openai()
    tools: list[Any] = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    for options in ({}, {"tools": tools}, {"instructions": "Be short."}):
        made = client.responses.create(
            model=MODEL,
            input=TEXT,
            max_output_tokens=1,
            **options,  # type: ignore[arg-type]
        )
        counted = client.responses.input_tokens.count(model=MODEL, input=TEXT, **options)  # type: ignore[arg-type]
        assert made.usage is not None and counted.input_tokens == made.usage.input_tokens


def test_reasoning_comes_back_in_encrypted_content(server: RunningServer) -> None:
    """Clients such as Codex send back nothing else of a reasoning item."""
    client = server.openai()
    options: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_output_tokens": 150}
    first = client.responses.create(**options, input=TEXT, reasoning={"effort": "high"})
    with client.responses.stream(**options, input=TEXT, reasoning={"effort": "high"}) as stream:
        done = [event.item for event in stream if event.type == "response.output_item.done"]
        streamed = stream.get_final_response()
    found: list[Any] = [first.output[0], streamed.output[0], done[0]]
    for item in found:
        assert item.type == "reasoning" and item.content
        assert unpack_reasoning(item.encrypted_content) == item.content[0].text
    call: Any = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "1", "output": "R"}

    def prompt_tokens(reasoning: Any) -> tuple[int, str | None]:
        user = {"role": "user", "content": TEXT}
        answer = client.responses.with_raw_response.create(
            model=MODEL,
            max_output_tokens=1,
            input=[user, reasoning, call, result],
            reasoning={"effort": "high"},
            tools=[{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        )
        usage = answer.parse().usage
        assert usage is not None
        return usage.input_tokens, answer.headers.get("finwhale-ignored")

    whole = first.output[0].to_dict()
    bare = {**whole, "content": None}
    damaged = {**bare, "encrypted_content": str(whole["encrypted_content"])[:-8]}
    assert prompt_tokens(bare) == prompt_tokens(whole) and prompt_tokens(whole)[1] is None
    assert prompt_tokens(damaged)[0] < prompt_tokens(whole)[0]
    assert prompt_tokens(damaged)[1] == "input.1"
