"""Dialects: what differs between the chat formats of the model versions."""

from collections.abc import Mapping
from typing import Any

import deepseek_recipe as recipe

from finwhale.chat.client_schemas import ClientSchemas
from finwhale.chat.effort import EffortLadder, with_ladder
from finwhale.errors import RequestError

Body = Mapping[str, Any]


class Dialect:
    """The chat format of DeepSeek-V4, Flash and Pro. Other versions have subclasses.

    Attributes:
        model: deepseek-recipe's name of the version.
        developer: the role as which a developer's messages of Chat Completions are read.
        tokens: control tokens that every vocabulary has, by deepseek-recipe's names.
        space: what separates the DSML token from the name of a tag.
        blocks: names of a block of tool calls; prompts have the first.
    """

    model, developer, space = "DeepSeek-V4-Pro", "user", ""
    tokens: tuple[str, ...] = "Bos", "Eos", "User", "Assistant", "ThinkingStart", "ThinkingEnd"
    blocks: tuple[str, ...] = "tool_calls", "function_calls"
    schemas = ClientSchemas

    def __init__(self, ladder: EffortLadder = "0731") -> None:
        self._ladder = ladder

    def take_effort(self, protocol: str, body: Body) -> tuple[Body, int | None]:
        """Replaces an effort that is a number by a level; returns both. Raises RequestError."""
        if type(body.get("reasoning_effort")) is int:
            raise RequestError('reasoning_effort must be a level such as "high" (DeepSeek-V4)')
        return body, None

    def render(self, conversation: recipe.Conversation, effort: int | None) -> Any:
        """The prompt (recipe.RenderedPrompt) of a conversation, and of the number of its effort."""
        return recipe.DeepseekV4Encoding().render_conversation(
            with_ladder(conversation, self._ladder)
        )


V4 = Dialect()
