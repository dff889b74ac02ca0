"""`finwhale serve demo-v41`: clients chat with DeepSeek-V4.1 in its own format."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import deepseek_recipe as recipe
import httpx2 as httpx
import openai
import pytest

from finwhale.chat.tokenizer import Tokenizer
from finwhale.demo import V41_PATH

from .test_process import Served

MODEL = "finwhale-demo"
BOS, SYSTEM, USER, ASSISTANT = (
    getattr(recipe.SpecialToken, name).default_str()
    for name in ("Bos", "System", "User", "Assistant")
)
TOOL: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
}
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Now"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = Served("--device", "cpu", "--max-model-len", "2048", "demo-v41")
    yield found
    found.process.terminate()
    found.end()


def prompt(served: Served, **fields: Any) -> str:
    """The prompt of a chat."""
    made = served.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1,
        **{**fields, "extra_body": {"return_token_ids": True, **fields.get("extra_body", {})}},
    )  # fmt: skip
    ids = made.model_extra["prompt_token_ids"] if made.model_extra else []
    return Tokenizer.open(V41_PATH).decode(ids, skip_special=False)


def test_efforts_are_numbers(served: Served) -> None:
    ends = f"{USER}Hi{SYSTEM}Now{ASSISTANT}"
    assert prompt(served, reasoning_effort="none") == f"{BOS}{ends}</think>"
    numbers: list[tuple[int, dict[str, Any]]] = [
        (50, {"reasoning_effort": "low"}),
        (100, {"reasoning_effort": "max"}),
        (42, {"reasoning_effort": 42}),
        (7, {"extra_body": {"chat_template_kwargs": {"thinking": True, "reasoning_effort": 7}}}),
    ]
    for number, fields in numbers:
        found = prompt(served, **fields)
        assert found.startswith(f"{BOS}{SYSTEM}Reasoning Effort: {number} (range 1-100, ")
        assert found.endswith(f")\n\n{ends}<think>")
    client = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    counts = [
        client.messages.count_tokens(
            model=MODEL,
            messages=MESSAGES[:1],
            output_config={"effort": effort},
            thinking={"type": "adaptive"},
        ).input_tokens
        for effort in ("max", 100, 1)
    ]  # type: ignore[misc]
    assert counts[0] == counts[1] > counts[2]
    made = served.client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=1, reasoning={"effort": 42},  # type: ignore[typeddict-item]
    )  # fmt: skip
    assert made.reasoning is not None and made.reasoning.effort == "low"  # the level near it
    for wrong in (0, 101):
        with pytest.raises(openai.BadRequestError, match="an integer from 1 to 100"):
            prompt(served, reasoning_effort=wrong)


def test_calls_in_each_protocol(served: Served) -> None:
    """The weights are random: the grammar writes the call, the parser reads it."""
    function = {"name": "weather", "parameters": TOOL}
    chat = served.client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=200, tool_choice="required",
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        parallel_tool_calls=False, reasoning_effort="none",
    )  # fmt: skip
    (call,) = chat.choices[0].message.tool_calls or []
    responses = served.client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=200, tool_choice="required",
        tools=[{"type": "function", **function}],  # type: ignore[list-item]
        parallel_tool_calls=False, reasoning={"effort": "none"},
    )  # fmt: skip
    messages = anthropic.Anthropic(base_url=served.url, api_key="none").messages.create(
        model=MODEL, messages=MESSAGES[:1], max_tokens=200, thinking={"type": "disabled"},
        tools=[{"name": "weather", "input_schema": TOOL}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )  # fmt: skip
    found = [
        json.loads(call.function.arguments),  # type: ignore[union-attr]
        json.loads(responses.output[-1].arguments),  # type: ignore[union-attr]
        messages.content[-1].input,  # type: ignore[union-attr]
    ]
    assert all(one["city"] in ("Rome", "Oslo") for one in found)


def test_images_are_refused_in_one_line(served: Served) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "images are not supported" in message
    assert "\n" not in message
