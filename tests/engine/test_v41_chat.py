"""`LLM.chat` with DeepSeek-V4.1: its prompts, and calls that hold their schemas."""

import json
from typing import Any

import deepseek_recipe as recipe
from jsonschema_rs import validate

from finwhale import LLM

from .test_tool_grammar import PARAMETERS, calling, tools


def test_chat_with_tools() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "Now"}]
    body: dict[str, Any] = {"messages": messages, "tools": tools(PARAMETERS)}
    body |= {"model": "DeepSeek-V4.1-Flash", "thinking": {"type": "disabled"}}
    asked = recipe.ChatCompletionRequest(json.dumps(body)).convert(recipe.ConversionOptions())
    wanted = recipe.DeepseekV41Encoding().render_conversation(asked.conversation).prompt
    with LLM("demo-v41", device="cpu", max_model_len=1024, tool_grammar="auto") as llm:
        (result,) = llm.chat(messages, calling(llm), thinking=False, tools=tools(PARAMETERS))
    assert result.prompt == wanted
    call, *_ = (result.outputs[0].message or {})["tool_calls"]
    validate(PARAMETERS, json.loads(call["function"]["arguments"]))
