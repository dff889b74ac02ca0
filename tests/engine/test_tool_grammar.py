"""`tool_grammar="auto"`: text is free until a call begins, and then the call holds its schema."""

import json
from pathlib import Path

import deepseek_recipe as recipe
import pytest
from jsonschema_rs import validate

from finwhale import LLM, SamplingParams
from finwhale.errors import RequestError

ASKED = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 3}, "days": {"enum": [1, 20]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tools(schema: object, **more: bool) -> list[dict[str, object]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema, **more}}]


def calling(model: LLM) -> SamplingParams:
    """Parameters with which the model begins a call as soon as it may."""
    tokenizer = model.get_tokenizer()
    bias = {tokenizer.added_ids[recipe.SpecialToken.Dsml.default_str()]: 100.0}
    bias |= dict.fromkeys(tokenizer.encode("<"), 50.0)
    return SamplingParams(logit_bias=bias, temperature=1.0, seed=3, max_tokens=120)


def test_auto_leaves_text_free_and_holds_calls(
    short_demo_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20)
    texts = []
    for mode in ("off", "auto"):
        options = {"max_num_seqs": 4, "max_model_len": 2048, "tool_grammar": mode}
        model = LLM(short_demo_path, device="cpu", **options)
        (free,) = model.chat(ASKED, greedy, tools=tools(PARAMETERS))
        texts.append(free.outputs[0].token_ids)
        for result in model.chat([ASKED, ASKED], calling(model), tools=tools(PARAMETERS)):
            calls = (result.outputs[0].message or {}).get("tool_calls", [])
            assert bool(calls) == (mode == "auto")
            for call in calls[:2]:  # max_tokens may cut later ones
                validate(PARAMETERS, json.loads(call["function"]["arguments"]))
    assert texts[0] == texts[1]
    model.chat(ASKED, greedy, tools=tools({**PARAMETERS, "not": {"minProperties": 9}}))
    assert "tool calls need not hold tools.f.not" in caplog.text
    with pytest.raises(RequestError, match=r"tools\.f\.not"):
        model.chat(ASKED, greedy, tools=tools({"type": "object", "not": {}}, strict=True))
