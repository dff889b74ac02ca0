"""A prompt that is too long: each protocol's clients recognise the error by its code or its words.

The patterns are those of the clients: Claude Code compacts a conversation after CLAUDE_CODE,
LiteLLM and LangChain raise errors of their own after WORDS, Codex and inspect-ai look at the code.
"""

import re
import urllib.request
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest

from .running import MODEL, RunningServer

CLAUDE_CODE = re.compile(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", re.IGNORECASE)
CONTEXT = 2048
WORDS = {
    "context": ["maximum context length is 2048 tokens", r"requested \d+ tokens"],
    "limit": ["input tokens exceed the configured limit", r"resulted in \d+ tokens"],
}
Ask = Callable[[openai.OpenAI, str], Any]


def chat(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **more
    )


def responses(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, **more)


def completion(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=text, **more)


@pytest.mark.parametrize("limit", [None, 20])
@pytest.mark.parametrize("length", [5000, 200_000])  # too many tokens; too many characters
def test_clients_recognise_a_full_context(
    start: Callable[..., RunningServer], limit: int | None, length: int
) -> None:
    server = start() if limit is None else start(max_prompt_tokens=limit)
    text = "whale " * (length // 2) if limit is None or length > 5000 else "whale " * 30
    client = server.openai()
    for param, ask in (("messages", chat), ("input", responses), ("prompt", completion)):
        for more in ({}, {"stream": True}):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(client, text, **more)
            error = caught.value
            assert (error.code, error.param) == ("context_length_exceeded", param)
            words = WORDS["context" if limit is None or length > 5000 else "limit"]
            assert all(re.search(one, str(error), re.IGNORECASE) for one in words)
    for more in ({}, {"stream": True}):
        with pytest.raises(anthropic.BadRequestError) as refused:
            server.anthropic().messages.create(
                model=MODEL, max_tokens=9, messages=[{"role": "user", "content": text}], **more
            )
        found = CLAUDE_CODE.search(str(refused.value))
        assert found is not None and int(found[1]) > int(found[2])
        assert int(found[2]) in (CONTEXT - 1, limit)
        body: Any = refused.value.body
        assert body["error"]["type"] == "invalid_request_error"
    reason = 'finwhale_refusals_total{reason="context_length_exceeded"} 8.0'
    with urllib.request.urlopen(f"{server.url}/metrics") as metrics:
        assert reason in metrics.read().decode()


def test_the_longest_prompt_is_accepted(start: Callable[..., RunningServer]) -> None:
    client = start().openai()
    made: Any = client.completions.create(model=MODEL, prompt=[5] * (CONTEXT - 1), max_tokens=9)
    assert made.choices[0].finish_reason == "length" and made.usage.completion_tokens == 1
    with pytest.raises(openai.BadRequestError, match="requested 2049 tokens"):
        client.completions.create(model=MODEL, prompt=[5] * CONTEXT, max_tokens=9)
