"""Checks of what the model writes: answers to questions, tools, JSON, recall and drafts."""

import json
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from finwhale.chat.grammar import json_guide
from finwhale.errors import RequestError
from finwhale.llm import LLM
from finwhale.request import CompletionOutput, SamplingParams
from finwhale.validation.expectations import Expectations
from finwhale.validation.report import Check, CheckVerdict
from finwhale.validation.texts import AUSTEN

QUESTIONS = {
    "What is the capital of France?": r"\bParis\b",
    "What is the capital of Japan?": r"\bTokyo\b",
    "What is 7 + 5?": r"\b(12|twelve)\b",
    "What is 6 times 7?": r"\b(42|forty-two)\b",
    "What is the opposite of hot?": r"\bcold\b",
    "What day comes after Monday?": r"\bTuesday\b",
    "Who wrote Hamlet?": r"\bShakespeare\b",
    "How many days are in a week?": r"\b(7|seven)\b",
}
SUMS = {"What is 7 + 8?": r"\b(15|fifteen)\b", "What is 9 + 8?": r"\b(17|seventeen)\b"}
CITY = "Paris"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Tokyo", "Madrid", "Cairo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SECRETS = ("banana", "tiger", "violin")
DEPTHS = (0.1, 0.5, 0.9)
STARTS = (
    "Tell me a story about a rabbit.",
    "Tell me a story about a fox and a bear.",
    "What does a farmer do?",
    "What is a whale?",
)


def check_chat(llm: LLM) -> list[Check]:
    """Ask in every way that the chat format has. Raises RequestError if a request fails."""
    plain = ask(llm, list(QUESTIONS), SamplingParams(temperature=0, max_tokens=64))
    right = [
        _says(output, pattern) for output, pattern in zip(plain, QUESTIONS.values(), strict=True)
    ]
    thought = ask(llm, list(SUMS), SamplingParams(temperature=0, max_tokens=1024), thinking=True)
    sums = [
        _says(output, pattern) and bool((output.message or {}).get("reasoning_content"))
        for output, pattern in zip(thought, SUMS.values(), strict=True)
    ]
    return [
        _count("chat: questions", right, list(QUESTIONS)),
        _count("chat: questions, thinking", sums, list(SUMS)),
        _check_tool(llm),
        _check_schema(llm),
    ]


def check_recall(llm: LLM, num_tokens: int) -> list[Check]:
    """Hide a word at three depths of a long prompt and ask for it. Raises RequestError."""
    prompts = [
        _haystack(llm, num_tokens, depth, word) for depth, word in zip(DEPTHS, SECRETS, strict=True)
    ]
    outputs = ask(llm, prompts, SamplingParams(temperature=0, max_tokens=64))
    right = [_says(output, word) for output, word in zip(outputs, SECRETS, strict=True)]
    places = [f"at {depth:.0%} of the prompt" for depth in DEPTHS]
    return [_count(f"recall in {num_tokens:,} tokens", right, places)]


def check_drafts(llm: LLM, expectations: Expectations) -> list[Check]:
    """How many drafts the model accepts at each position. Raises RequestError: a request failed."""
    before = llm.metrics()
    ask(llm, STARTS, SamplingParams(temperature=0, max_tokens=96))
    after = llm.metrics()
    checks = []
    for position, (proposed, accepted) in enumerate(
        zip(after.drafts_proposed, after.drafts_accepted, strict=True)
    ):
        proposed -= before.drafts_proposed[position]
        accepted -= before.drafts_accepted[position]
        if not proposed:
            continue
        name = f"accepted drafts, position {position + 1}"
        if position == 0:
            checks.append(expectations.first_draft.check(name, accepted / proposed))
        else:
            reason = "no reference value is known for later drafts"
            checks.append(Check(name, f"{accepted / proposed:.2f}", "any", "ok", reason))
    return checks


def ask(
    llm: LLM, questions: Sequence[str], params: SamplingParams, **options: Any
) -> list[CompletionOutput]:
    """The answers to questions, each in its own conversation. Raises RequestError."""
    conversations = [[{"role": "user", "content": question}] for question in questions]
    results = llm.chat(conversations, params, show_progress=False, **options)
    for result in results:
        if result.error is not None:
            raise RequestError(result.error)
    return [result.outputs[0] for result in results]


def _says(output: CompletionOutput, pattern: str) -> bool:
    found = re.search(pattern, (output.message or {}).get("content") or "", re.IGNORECASE)
    return found is not None and output.finish_reason == "stop"


def _count(name: str, right: Sequence[bool], what: Sequence[str]) -> Check:
    """All right is ok, and fewer than two thirds right is failed."""
    wrong = [one for one, is_right in zip(what, right, strict=True) if not is_right]
    verdict: CheckVerdict = "ok" if not wrong else "unusual"
    if 3 * sum(right) < 2 * len(right):
        verdict = "failed"
    reason = f"wrong: {'; '.join(wrong)}" if wrong else ""
    return Check(name, f"{sum(right)} of {len(right)}", f"{len(right)}", verdict, reason)


def _check_tool(llm: LLM) -> Check:
    question = f"What is the weather in {CITY}?"
    params = SamplingParams(temperature=0, max_tokens=256)
    (output,) = ask(llm, [question], params, tools=[WEATHER])
    calls = (output.message or {}).get("tool_calls") or []
    expected = f'get_weather {{"city": "{CITY}"}}'
    if not calls:
        return Check("chat: tool call", "no call", expected, "failed", question)
    call = calls[0]["function"]
    found = f"{call['name']} {call['arguments']}"
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        return Check("chat: tool call", found, expected, "failed", "the arguments are not JSON")
    is_right = len(calls) == 1 and call["name"] == "get_weather" and arguments == {"city": CITY}
    return Check("chat: tool call", found, expected, "ok" if is_right else "unusual", question)


def _check_schema(llm: LLM) -> Check:
    question = "What is the capital of Japan? Answer in JSON."
    params = SamplingParams(temperature=0, max_tokens=64, guide=json_guide(SCHEMA))
    (output,) = ask(llm, [question], params)
    found = (output.message or {}).get("content") or ""
    name, expected = "chat: JSON schema", '{"city": "Tokyo"}'
    try:
        city = json.loads(found)["city"]
    except (ValueError, KeyError, TypeError):
        return Check(name, found, expected, "failed", "the answer does not follow the schema")
    return Check(name, found, expected, "ok" if city == "Tokyo" else "unusual", question)


def _haystack(llm: LLM, num_tokens: int, depth: float, word: str) -> str:
    """A question of about `num_tokens` tokens about one sentence at `depth` of a text."""
    sentences: list[str] = []
    room = num_tokens - 32
    for sentence in _sentences():
        room -= len(llm.encode(sentence)) - 1
        if room < 0:
            break
        sentences.append(sentence)
    sentences.insert(round(depth * len(sentences)), f"The secret word is {word}.")
    return f"{' '.join(sentences)}\n\nWhat is the secret word?"


def _sentences() -> Iterator[str]:
    """Prose, then the entries of an endless diary, which are all different."""
    yield from re.split(r"(?<=[.?]) ", AUSTEN)
    random, day = Random(0), 0
    while True:
        day += 1
        ships, gulls = random.randrange(2, 100), random.randrange(2, 1000)
        wind = random.choice(("north", "east", "south", "west"))
        yield f"On day {day} the keeper counted {ships} ships and {gulls} gulls, wind {wind}."
