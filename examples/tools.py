"""Lets the model call a Python function, and answer with what it returned.

python examples/tools.py [PATH]
"""

import json
import sys
from typing import Any

from finwhale import LLM, SamplingParams


def get_weather(city: str) -> str:
    return "sunny"  # a real tool would ask a weather service


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
FUNCTIONS = {"get_weather": get_weather}

llm = LLM(*sys.argv[1:])
params = SamplingParams(temperature=0, max_tokens=200)
messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]

for _ in range(5):  # a model could call tools for ever
    message = llm.chat(messages, params, tools=TOOLS)[0].outputs[0].message
    assert message is not None
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        result = FUNCTIONS[call["function"]["name"]](**arguments)
        print(f"{call['function']['name']}({arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

print(messages[-1]["content"])
