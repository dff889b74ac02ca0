"""What `finwhale connect` prints is what docs/agents.md shows."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema_rs import validate

import finwhale
from finwhale.cli.connect import PROGRAMS, settings

PAGE = Path(finwhale.__file__).parents[2] / "docs/agents.md"
FENCES = {"claude-code": "bash", "codex": "toml", "continue": "yaml", "litellm": "yaml"}


def closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


# Transcribed from what Zed documents of `openai_compatible` and `agent`, and from the types of its
# settings: Zed makes the schema of its settings itself and publishes no file of it.
TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 1}, {"type": "boolean"}
CAPABILITIES = ["tools", "images", "parallel_tool_calls", "prompt_cache_key"]
MORE_CAPABILITIES = ["chat_completions", "interleaved_reasoning", "max_tokens_parameter"]
ZED_MODEL = closed(
    {
        "name": TEXT,
        "display_name": TEXT,
        "max_tokens": NUMBER,
        "max_output_tokens": NUMBER,
        "max_completion_tokens": NUMBER,
        "reasoning_effort": TEXT,
        "capabilities": closed(
            dict.fromkeys([*CAPABILITIES, *MORE_CAPABILITIES], FLAG), CAPABILITIES
        ),
    },
    ["name", "max_tokens"],
)
ZED_PROVIDER = closed(
    {"api_url": TEXT, "available_models": {"type": "array", "items": ZED_MODEL}},
    ["api_url", "available_models"],
)
ZED_DEFAULT = closed({"provider": TEXT, "model": TEXT}, ["provider", "model"])
ZED = closed(
    {
        "language_models": closed(
            {"openai_compatible": {"type": "object", "additionalProperties": ZED_PROVIDER}}, []
        ),
        "agent": closed({"default_model": ZED_DEFAULT}, []),
    },
    [],
)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_page_shows_the_settings(name: str) -> None:
    text = settings(name, "http://127.0.0.1:8000", "", "finwhale-demo", 32768)
    assert f"```{FENCES.get(name, 'json')}\n{text}\n```\n" in PAGE.read_text()
    assert f"finwhale connect {name}`" in PAGE.read_text()


def test_zed_knows_every_name() -> None:
    validate(ZED, json.loads(settings("zed", "http://host:1", "", "m", 131072)))


@pytest.mark.parametrize("model", ["deepseek-ai/DeepSeek-V4-Flash", 'a "model" of $me\'s\\'])
def test_names_stay_whole(model: str) -> None:
    for name in PROGRAMS:
        text = settings(name, "http://host:1", "key", model, 131072)
        if name == "claude-code":
            words = shlex.split(text)
            assert f"ANTHROPIC_DEFAULT_HAIKU_MODEL={model}" in words
            assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072" in words
        elif name == "codex":
            assert tomllib.loads(text)["model"] == model
        elif name in ("continue", "litellm"):
            found = yaml.safe_load(text)
            first = (found.get("models") or found["model_list"])[0]
            assert model in (first.get("model"), first.get("model_name"))
        else:
            assert json.loads(text) and json.dumps(model)[1:-1] in text
