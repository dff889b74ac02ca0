"""Reasoning effort: the paragraph that each level writes into the prompt of a checkpoint.

A level of effort is a paragraph at the start of the prompt. The V4 checkpoints use the same
paragraphs one level apart:

| effort | April 2026 ("april") | Flash-0731, Pro-0813 ("0731") |
|---|---|---|
| low | nothing | nothing |
| high (the default) | nothing | "Absolute maximum with no shortcuts permitted ..." |
| max | "Absolute maximum with no shortcuts permitted ..." | "Beyond maximum ..." |

deepseek-recipe writes the paragraphs of 0731. Its conversion maps the other names in a protocol to
these levels (medium and xhigh are high, minimal is low, ultra is max). April's API reads xhigh as
max and every other level as high.
"""

import logging
from pathlib import Path
from typing import Any, Literal

import deepseek_recipe as recipe

from finwhale.demo import DSPARK_PATH
from finwhale.files import is_file, read_file, read_json

logger = logging.getLogger(__name__)

EffortLadder = Literal["april", "0731"]

ENCODER = Path("encoding") / "encoding_dsv4.py"
# The checkpoints' own encoders define one of these: a table of three levels, or one paragraph.
_TABLE_OF_0731 = "REASONING_EFFORT_PROMPTS"
_PARAGRAPH_OF_APRIL = "REASONING_EFFORT_MAX"


def effort_ladder(directory: Path) -> EffortLadder:
    """The ladder of reasoning effort that the checkpoint in `directory` was trained with.

    The checkpoint's own encoder (encoding/encoding_dsv4.py) decides; it is read as text and never
    run. Without an encoder, the DSpark keys in config.json decide: a checkpoint without them is
    from April, because 0731 and 0813 have them. A checkpoint with them counts as 0731, with a
    warning unless it is the embedded model, because April's Flash-DSpark and Pro-DSpark have the
    same keys.

    Raises:
        CheckpointError: one of these files cannot be read.
    """
    encoder = directory / ENCODER
    if is_file(encoder):
        text = read_file(encoder).decode(errors="replace")
        if _TABLE_OF_0731 in text:
            return "0731"
        if _PARAGRAPH_OF_APRIL in text:
            return "april"
    config = directory / "config.json"
    if not is_file(config) or not any(key.startswith("dspark_") for key in read_json(config)):
        return "april"
    if directory != DSPARK_PATH:
        logger.warning(
            "%s has no %s that says what its levels of reasoning effort are: taking those of "
            "DeepSeek-V4-Flash-0731. For another checkpoint, put its encoder there",
            directory,
            ENCODER,
        )
    return "0731"


def with_ladder(conversation: recipe.Conversation, ladder: EffortLadder) -> recipe.Conversation:
    """Change the reasoning effort so that deepseek-recipe writes the text of `ladder` for it."""
    if ladder == "0731" or not conversation.thinking_mode:
        return conversation
    strongest = conversation.reasoning_effort in ("xhigh", "max")
    return changed(conversation, reasoning_effort="high" if strongest else "low")


def changed(conversation: recipe.Conversation, **changes: Any) -> recipe.Conversation:
    """Copy a conversation with other values of some of its fields."""
    as_json = conversation.response_format == "json_object"
    fields: dict[str, Any] = {
        "messages": conversation.messages,
        "thinking_mode": conversation.thinking_mode,
        "tools": conversation.tools,
        "tool_choice": conversation.tool_choice,
        "reasoning_effort": conversation.reasoning_effort,
        "response_format": "json_object" if as_json else "text",
        "response_schema": conversation.response_schema,
        "response_regex": conversation.response_regex,
    }
    return recipe.Conversation(**fields | changes)
