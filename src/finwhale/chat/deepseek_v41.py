"""The dialect of DeepSeek-V4.1.

Prompts of conversations with thinking begin with the reasoning effort, a number:

| effort | number |
|---|---|
| minimal, low | 50 |
| medium, high (the default), xhigh | 75 |
| max | 100 |

deepseek-recipe writes these numbers. A request may have any other number from 1 to 100, as in
vLLM.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import deepseek_recipe as recipe

from finwhale.chat.client_schemas import ClientSchemas
from finwhale.chat.dialect import Body, Dialect
from finwhale.chat.effort import changed
from finwhale.errors import RequestError

_BOS, _SYSTEM = recipe.SpecialToken.Bos.default_str(), recipe.SpecialToken.System.default_str()
_EFFORT = f"{_BOS}{_SYSTEM}Reasoning Effort: "
# The fields that have the reasoning effort in each protocol.
_PLACES = {
    "chat": ("reasoning_effort",),
    "responses": ("reasoning", "effort"),
    "messages": ("output_config", "effort"),
}
_NUMBERS = {50: "low", 75: "high", 100: "max"}
# A placeholder in JSON that deepseek-recipe has made, and the `strict` after it.
_PLACEHOLDER = re.compile(r'\{(?:"type":"[^"\\]*",)?"x-schema":(\d+)\}(,"strict":null)?')


class Prompt(NamedTuple):
    """What recipe.RenderedPrompt has of a text."""

    prompt: str
    special_ranges: list[tuple[int, int]]


class _Schemas(ClientSchemas):
    """Also the schemas of tools that a conversation adds: those that a tool search has found.

    Such tools are in the search's result, and in a system message after it.
    """

    def take_from(self, body: Mapping[str, Any]) -> dict[str, Any]:
        taken = super().take_from(body)
        self._searches: set[object] = set()
        if isinstance(taken.get("input"), list | tuple):
            taken["input"] = [self._take_found(item) for item in taken["input"]]
        return taken

    def _take_found(self, item: Any) -> Any:
        if not isinstance(item, Mapping) or item.get("type") != "tool_search_output":
            return item
        if isinstance(item.get("call_id"), str):
            self._searches.add(item["call_id"])
        return {k: self._take(v) if k == "tools" else v for k, v in item.items()}

    def put_back(self, conversation: recipe.Conversation) -> recipe.Conversation:
        conversation = super().put_back(conversation)
        return changed(conversation, messages=list(map(self._message, conversation.messages)))

    def _message(self, message: recipe.Message) -> recipe.Message:
        if isinstance(message, recipe.SystemMessage) and message.tools:
            tools = [self._with_schema(tool) for tool in message.tools]
            return recipe.SystemMessage(message.content, message.image_sources, tools)
        if message.role == "tool" and message.tool_call_id in self._searches:
            text = _PLACEHOLDER.sub(self._as_json, message.content)
            return recipe.ToolMessage(text, message.tool_call_id)
        return message

    def _as_json(self, found: re.Match[str]) -> str:
        number = int(found[1])
        if number >= len(self._schemas):  # a client's text
            return found[0]
        schema, strict = self._schemas[number]
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        return text + (found[2] or "").replace("null", "true" if strict else "null")


class DeepseekV41(Dialect):
    """The chat format of DeepSeek-V4.1."""

    model, space = "DeepSeek-V4.1-Flash", " "
    developer = "system"  # as deepseek-recipe reads it in Responses
    tokens = (*Dialect.tokens, "System")
    blocks = "calls", "tool_calls", "function_calls"
    schemas = _Schemas

    def take_effort(self, protocol: str, body: Body) -> tuple[Body, int | None]:
        """The level is the one with the next number: the default of max_tokens depends on it."""
        *outer, name = _PLACES[protocol]
        holder = body.get(outer[0]) if outer else body
        number = holder.get(name) if isinstance(holder, Mapping) else None
        if holder is None or type(number) is not int:
            return body, None
        if not 1 <= number <= 100:
            raise RequestError(
                "the reasoning effort of DeepSeek-V4.1 is a level such as high, or an integer from "
                f"1 to 100, got {number}"
            )
        level = next(level for most, level in _NUMBERS.items() if number <= most)
        holder = {**holder, name: level}
        return ({**body, outer[0]: holder} if outer else holder), number

    def render(
        self, conversation: recipe.Conversation, effort: int | None
    ) -> recipe.RenderedPrompt | Prompt:
        rendered = recipe.DeepseekV41Encoding().render_conversation(conversation)
        if effort is None or not conversation.thinking_mode:
            return rendered
        text, begin = rendered.prompt, len(_EFFORT)
        assert text.startswith(_EFFORT)
        end = text.index(" ", begin)
        longer = len(str(effort)) - (end - begin)
        ranges = rendered.special_ranges
        moved = [(a + longer, b + longer) if a > begin else (a, b) for a, b in ranges]
        return Prompt(f"{text[:begin]}{effort}{text[end:]}", moved)


DEEPSEEK_V41 = DeepseekV41()
