"""Asks a server one thing after the other through a client: `python ask.py CLIENT URL`.

It runs in the client's own environment. It fails if the server refuses anything, or if an answer
has the wrong form. What the small model answers counts only where a grammar or a well-known
question determines it.
"""

# mypy: ignore-errors
# ruff: noqa: PLC0415

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

from pydantic import BaseModel

MODEL = "finwhale-demo"
TOO_LONG = [{"role": "user", "content": "whale " * 40_000}]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
CHOICES: dict[str, Callable[[], None]] = {}


class City(BaseModel, extra="forbid"):
    name: Literal["Paris", "Rome"]


SKY = {
    "type": "function",
    "function": {"name": "sky", "parameters": {"type": "object", "properties": {}}},
}


@contextmanager
def raises(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def choice(function: Callable[[], None]) -> Callable[[], None]:
    CHOICES[function.__name__] = function
    return function


@choice
def litellm() -> None:
    import litellm

    def ask(route: str, **more: Any) -> Any:
        options = {"messages": QUESTION, "max_tokens": 60, "temperature": 0, **more}
        return litellm.completion(model=f"{route}/{MODEL}", **options)

    for route in ("openai", "hosted_vllm", "anthropic"):
        assert ask(route).choices[0].message.content == ANSWER
        pieces = list(ask(route, stream=True, stream_options={"include_usage": True}))
        found = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
        assert found == ANSWER
    made = ask("hosted_vllm", tools=[SKY], tool_choice="required", max_tokens=200)
    assert made.choices[0].message.tool_calls[0].function.name == "sky"
    made = ask("hosted_vllm", reasoning_effort="low", max_tokens=120)
    assert made.choices[0].message.reasoning_content
    made = ask("hosted_vllm", response_format=City)
    City.model_validate_json(made.choices[0].message.content)
    made = litellm.text_completion(model=f"hosted_vllm/{MODEL}", prompt="Once", max_tokens=4)
    assert made.usage.completion_tokens == 4
    assert litellm.responses(model=f"openai/{MODEL}", input="Hi", max_output_tokens=8).output
    for route in ("openai", "hosted_vllm", "anthropic"):
        with raises(litellm.ContextWindowExceededError):
            ask(route, messages=TOO_LONG)


@choice
def langchain() -> None:
    import openai
    from langchain_anthropic import ChatAnthropic
    from langchain_core.exceptions import ContextOverflowError
    from langchain_openai import ChatOpenAI, OpenAI

    options = {"model": MODEL, "max_tokens": 200, "temperature": 0}
    for kind in (ChatOpenAI, ChatAnthropic):
        with raises(ContextOverflowError):
            kind(**options).invoke(TOO_LONG)
        assert kind(**options).invoke(QUESTION).text == ANSWER
        assert "".join(piece.text for piece in kind(**options).stream(QUESTION)) == ANSWER
    for method in ("json_schema", "function_calling"):
        found = ChatOpenAI(**options).with_structured_output(City, method=method)
        assert isinstance(found.invoke("A city"), City)
        found = ChatAnthropic(**options).with_structured_output(City, method=method)
        assert isinstance(found.invoke("A city"), City)
    # The format is any JSON object, which the small model may not end.
    with suppress(openai.LengthFinishReasonError):
        found = ChatOpenAI(**options).with_structured_output(
            City, method="json_mode", include_raw=True
        )
        assert found.invoke("A city in JSON")["raw"].content.startswith("{")
    assert ChatOpenAI(**options, use_responses_api=True).invoke(QUESTION).text == ANSWER
    assert OpenAI(model=MODEL, max_tokens=4).invoke("Once")


@choice
def instructor() -> None:
    import anthropic
    import instructor
    import openai

    options = {
        "model": MODEL, "messages": QUESTION, "response_model": City, "max_tokens": 200,
        "max_retries": 0, "temperature": 0,
    }  # fmt: skip
    for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"):
        client = instructor.from_openai(openai.OpenAI(), mode=instructor.Mode[mode])
        assert isinstance(client.chat.completions.create(**options), City)
    client = instructor.from_anthropic(anthropic.Anthropic(), mode=instructor.Mode.ANTHROPIC_TOOLS)
    del options["temperature"]
    assert isinstance(client.messages.create(**options), City)


@choice
def pydantic_ai() -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

    settings = {"max_tokens": 200, "temperature": 0}
    for kind in (OpenAIChatModel, OpenAIResponsesModel, AnthropicModel):
        agent = Agent(kind(MODEL), model_settings=settings)
        assert agent.run_sync(QUESTION[0]["content"]).output == ANSWER
        agent = Agent(kind(MODEL), output_type=City, model_settings=settings)
        assert isinstance(agent.run_sync("A city").output, City)


@choice
def openai_agents() -> None:
    import agents
    import openai

    @agents.function_tool
    def sky() -> str:
        return "blue"

    agents.set_tracing_disabled(True)
    settings = agents.ModelSettings(max_tokens=60, temperature=0)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        model = kind(MODEL, openai.AsyncOpenAI())
        plain = agents.Agent(name="one", model=model, model_settings=settings)
        assert agents.Runner.run_sync(plain, QUESTION[0]["content"]).final_output == ANSWER
        agent = agents.Agent(name="two", model=model, tools=[sky], model_settings=settings)
        assert agents.Runner.run_sync(agent, QUESTION[0]["content"], max_turns=3).final_output


@choice
def inspect_ai() -> None:
    import asyncio

    from inspect_ai.model import GenerateConfig, get_model

    async def ask(route: str) -> None:
        config = GenerateConfig(max_tokens=60, temperature=0)
        model = get_model(f"{route}/{MODEL}", config=config)
        assert (await model.generate(QUESTION[0]["content"])).completion == ANSWER
        found = await model.generate(TOO_LONG[0]["content"])
        assert found.stop_reason == "model_length", found

    for route in ("openai", "anthropic", "openai-api/openai"):
        asyncio.run(ask(route))


if __name__ == "__main__":
    url = sys.argv[2]
    os.environ |= {
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": f"{url}/v1",
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_BASE": url,
        "HOSTED_VLLM_API_BASE": f"{url}/v1",
        "HOSTED_VLLM_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # nothing is fetched
    }
    CHOICES[sys.argv[1]]()
