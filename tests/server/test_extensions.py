"""Fields of vLLM, SGLang and Anthropic, through the openai and anthropic packages."""

import base64
import json
import re
from dataclasses import replace
from typing import Any

import anthropic
import httpx2 as httpx
import numpy as np
import pytest

import finwhale
from finwhale import LLM, SamplingParams
from finwhale.demo import DEMO_PATH
from finwhale.engine.plan.step_sizes import StepSizes
from finwhale.request import Logprob
from finwhale.server.link.wire import Add

from .running import MODEL, RunningServer
from .test_openai import ANSWER, QUESTION

TEXT = "Once upon a time, there was a fox who lived"


@pytest.fixture(scope="module")
def demo_llm(whole_demo_llm: LLM) -> LLM:
    """Here, the embedded model's texts are known."""
    return whole_demo_llm


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=100)


def chat(server: RunningServer, **body: Any) -> dict[str, Any]:
    wanted = {"messages": QUESTION, "temperature": 0, "max_tokens": 60, **body}
    answer = post(server, "/v1/chat/completions", **wanted)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def refusal(server: RunningServer, path: str = "/v1/chat/completions", **body: Any) -> str:
    prompt = {"messages": QUESTION} if "chat" in path else {"prompt": TEXT}
    answer = post(server, path, **{**prompt, **body})
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def chunks(server: RunningServer, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = post(server, path, stream=True, **{"temperature": 0, "max_tokens": 60, **body})
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", answer.text
    return [json.loads(line) for line in lines[:-1]]


def in_json(table: dict[int, Logprob], num_top: int) -> dict[str, Any]:
    return {
        str(i): {"logprob": e.logprob, "rank": e.rank, "decoded_token": e.decoded_token}
        for index, (i, e) in enumerate(table.items())
        if index == 0 or e.rank <= num_top
    }


# --- Lengths and ends -----------------------------------------------------------------------------


def test_max_completion_tokens(server: RunningServer) -> None:
    client = server.openai()
    made = client.chat.completions.create(model=MODEL, messages=QUESTION, max_completion_tokens=5)  # type: ignore[arg-type]
    assert made.usage is not None and made.usage.completion_tokens == 5
    assert made.choices[0].finish_reason == "length"
    assert chat(server, max_tokens=5, max_completion_tokens=5)["usage"]["completion_tokens"] == 5
    assert "mean the same" in refusal(server, max_tokens=5, max_completion_tokens=6)


def test_min_tokens_and_kept_stops(server: RunningServer) -> None:
    tokenizer = server.state.need_tokenizer()
    assert chat(server)["usage"]["completion_tokens"] == 9
    longer = chat(server, min_tokens=20)
    assert longer["usage"]["completion_tokens"] >= 20
    options: dict[str, Any] = {"prompt": TEXT, "temperature": 0, "max_tokens": 20}
    whole = post(server, "/v1/completions", **options).json()["choices"][0]["text"]
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        kept = post(server, "/v1/completions", **options, stop=whole[5:9], **{name: True}).json()
        assert kept["choices"][0]["text"] == whole[: whole.index(whole[5:9]) + 4]
    ids = tokenizer.encode(ANSWER)
    token = ids[5]
    for keep in (False, True):
        made = chat(server, stop_token_ids=[token], include_stop_str_in_output=keep)
        text = made["choices"][0]["message"]["content"]
        assert text == tokenizer.decode(ids[: ids.index(token) + keep])
    assert "at most max_tokens" in refusal(server, min_tokens=9, max_tokens=8)


def test_allowed_tokens_and_bad_words(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beside_the_step_loop(params: SamplingParams, *_: Any) -> None:
        assert not params.filters_tokens, "the step loop encodes the words"

    monkeypatch.setattr("finwhale.engine.loop.engine.new_filter", beside_the_step_loop)
    tokenizer = server.state.need_tokenizer()
    allowed = tokenizer.encode(ANSWER)[:2]
    made = chat(server, allowed_token_ids=allowed, max_tokens=9, return_token_ids=True)
    assert {*made["choices"][0]["token_ids"]} <= {*allowed}
    assert "Paris" in ANSWER
    answer = chat(server, bad_words=["Paris"], max_tokens=20)["choices"][0]["message"]["content"]
    assert answer.startswith("The capital") and "Paris" not in answer
    assert "is not in 0.." in refusal(server, allowed_token_ids=[2**30])
    assert "bad_words" in refusal(server, bad_words=[""])


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "more",
    [{}, {"reasoning_effort": "low"}, pytest.param({"tools": [TOOL]}, marks=pytest.mark.long)],
)
def test_stop_strings_with_min_tokens_and_kept(server: RunningServer, more: dict[str, Any]) -> None:
    """The reasoning contains the stop strings, too."""
    kept = {"include_stop_str_in_output": True}
    client = server.openai()
    for options, wanted in (
        ({"stop": ["Pari", "zzz"], **kept}, ANSWER[: ANSWER.index("Pari") + 4]),
        ({"stop": "of Fr", **kept}, "The capital of Fr"),
        ({"stop": "of Fr", "min_tokens": 1}, "The capital "),
        ({"stop": "capital", "min_tokens": 40, "max_tokens": 41, "ignore_eos": True}, ANSWER),
    ):
        made = chat(server, **more, **options)["choices"][0]
        assert made["message"]["content"].startswith(wanted)
        streamed: Any = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, stream=True,  # type: ignore[arg-type]
            extra_body={**more, **options},
        )  # fmt: skip
        pieces = [chunk.choices[0] for chunk in streamed if chunk.choices]
        assert "".join(piece.delta.content or "" for piece in pieces) == made["message"]["content"]
        assert pieces[-1].finish_reason == made["finish_reason"]
        if "ignore_eos" not in options:
            assert made["message"]["content"] == wanted and made["finish_reason"] == "stop"


def test_special_tokens(server: RunningServer) -> None:
    tokenizer = server.state.need_tokenizer()
    special = max(tokenizer.special_ids - {1})
    text = tokenizer.token_text(special)
    options = {"logit_bias": {str(special): 100}, "max_tokens": 2, "ignore_eos": True}
    for skip, wanted in ((True, ""), (False, text * 2)):
        made = chat(server, **options, skip_special_tokens=skip)
        assert (made["choices"][0]["message"]["content"] or "") == wanted
        made = post(
            server, "/v1/completions", prompt=TEXT, **options, skip_special_tokens=skip
        ).json()
        assert made["choices"][0]["text"] == wanted
    assert chat(server, skip_special_tokens=False)["choices"][0]["message"]["content"] == ANSWER


# --- Token ids and usage --------------------------------------------------------------------------


def test_the_client_s_request_id(server: RunningServer) -> None:
    assert chat(server, request_id="mine")["id"] == "chatcmpl-mine"
    options = {"prompt": TEXT, "max_tokens": 3, "request_id": "mine"}
    assert post(server, "/v1/completions", **options).json()["id"] == "cmpl-mine"
    assert {c["id"] for c in chunks(server, "/v1/completions", **options)} == {"cmpl-mine"}


def test_token_ids(server: RunningServer) -> None:
    tokenizer = server.state.need_tokenizer()
    whole = chat(server, return_token_ids=True, n=2)
    for choice in whole["choices"]:
        assert tokenizer.decode(choice["token_ids"]) == ANSWER and choice["token_ids"][-1] == 1
    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    found = chunks(server, "/v1/chat/completions", messages=QUESTION, return_token_ids=True)
    assert [c["prompt_token_ids"] for c in found if "prompt_token_ids" in c] == [
        whole["prompt_token_ids"]
    ]
    ids = [i for chunk in found for i in chunk["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    options = {"prompt": [TEXT, "x"], "return_token_ids": True, "max_tokens": 5}
    made = post(server, "/v1/completions", temperature=0, **options).json()["choices"]
    assert [len(choice["token_ids"]) for choice in made] == [5, 5]
    assert made[1]["prompt_token_ids"] == [0, *tokenizer.encode("x")]
    streamed: list[list[int]] = [[], []]
    for chunk in chunks(server, "/v1/completions", **options):
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += choice["token_ids"]
    assert streamed == [choice["token_ids"] for choice in made]
    assert "token_ids" not in chat(server)["choices"][0]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_continuous_usage(server: RunningServer, path: str) -> None:
    prompt = {"messages": QUESTION} if "chat" in path else {"prompt": TEXT}
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(server, path, **prompt, stream_options=options, max_tokens=7)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 7
    assert all(
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for usage in (chunk["usage"] for chunk in found)
    )
    plain = chunks(server, path, **prompt, stream_options={"include_usage": True}, max_tokens=7)
    assert [chunk["usage"] for chunk in plain[:-1]] == [None] * (len(plain) - 1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_progress_of_a_prompt(
    server: RunningServer, demo_llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A chunk after each step that reads a part of it; otherwise the stream is the same."""
    monkeypatch.setattr(demo_llm._engine.scheduler, "sizes", StepSizes.given(8, 256))
    text = f"{path} sang to the whale. " * 60
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    body = {**(prompt if "chat" in path else {"prompt": text}), "max_tokens": 3}
    body["stream_options"] = {"include_usage": True}

    def told(found: list[dict[str, Any]]) -> list[dict[str, int]]:
        return [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]

    found = chunks(server, path, **body, return_progress=True)
    total, read = found[-1]["usage"]["prompt_tokens"], [one["processed"] for one in told(found)]
    assert len(read) > 2 and read == sorted(set(read)) and read[-1] == total
    assert all((one["total"], one["cache"]) == (total, 0) for one in told(found))
    times = [one["time_ms"] for one in told(found)]
    assert times == sorted(times) and times[-1] > 0

    plain = chunks(server, path, **body)
    assert not told(plain)
    rest = [chunk["choices"] for chunk in found if "prompt_progress" not in chunk]
    assert [chunk["choices"] for chunk in plain] == rest

    (again,) = told(chunks(server, path, **body, return_progress=True))
    assert again["processed"] == total > again["cache"] > 0
    del body["stream_options"]
    assert "prompt_progress" not in post(server, path, **body, return_progress=True).json()


# --- Log-probabilities of prompts -----------------------------------------------------------------


def test_echo_with_logprobs(server: RunningServer, demo_llm: LLM) -> None:
    tokenizer = server.state.need_tokenizer()
    ids = tokenizer.encode(TEXT)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, logprobs=3)
    wanted = demo_llm.generate([ids], params)[0]
    assert wanted.prompt_logprobs is not None and wanted.outputs[0].logprobs is not None
    tables = [*wanted.prompt_logprobs, *wanted.outputs[0].logprobs]
    options: dict[str, Any] = {
        "model": MODEL, "prompt": [ids, ids[:1]], "echo": True, "logprobs": 2, "temperature": 0,
        "n": 2,
    }  # fmt: skip
    client = server.openai()
    for max_tokens in (0, 2):
        made = client.completions.create(**options, max_tokens=max_tokens)
        assert made.usage is not None and made.usage.completion_tokens == 4 * max_tokens
        for choice in made.choices[:2]:
            assert choice.text == TEXT + (wanted.outputs[0].text if max_tokens else "")
            found = choice.logprobs
            assert found is not None and found.token_logprobs is not None
            assert "".join(found.tokens or []) == choice.text
            assert len(found.token_logprobs) == len(ids) + max_tokens
            assert found.token_logprobs[0] is None and found.top_logprobs[0] is None  # type: ignore[index]
            for index, table in enumerate(tables[: len(ids) + max_tokens]):
                assert found.text_offset[index] == len("".join(found.tokens[:index]))  # type: ignore[index]
                if table is not None:
                    assert found.token_logprobs[index] == next(iter(table.values())).logprob
                    own = next(iter(table.values()))
                    best = {
                        e.decoded_token: e.logprob
                        for e in table.values()
                        if e.rank <= 2 or e is own
                    }
                    assert found.top_logprobs[index] == best  # type: ignore[index]
        streamed: list[dict[str, list[Any]]] = [{} for _ in made.choices]
        texts = [""] * 4
        for chunk in client.completions.create(**options, max_tokens=max_tokens, stream=True):
            for part in chunk.choices:
                texts[part.index] += part.text
                assert part.logprobs is not None
                for name, values in part.logprobs.model_dump().items():
                    streamed[part.index].setdefault(name, []).extend(values)
        assert texts == [choice.text for choice in made.choices]
        assert streamed == [choice.logprobs.model_dump() for choice in made.choices]  # type: ignore[union-attr]


def test_prompt_logprobs(server: RunningServer, demo_llm: LLM) -> None:
    """In vLLM's form, also on a prompt that is cached."""
    made = chat(server, prompt_logprobs=1, return_token_ids=True, n=2)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (wanted,) = demo_llm.generate([made["prompt_token_ids"]], params)
    assert wanted.prompt_logprobs is not None
    tables = [None if t is None else in_json(t, 1) for t in wanted.prompt_logprobs]
    assert made["prompt_logprobs"] == tables
    long = [5, *range(300, 700)]
    for num_top in (0, 2):
        answer = post(
            server, "/v1/completions", prompt=long, max_tokens=1, prompt_logprobs=num_top
        ).json()
        (wanted,) = demo_llm.generate([long], SamplingParams(max_tokens=1, prompt_logprobs=num_top))
        assert wanted.prompt_logprobs is not None
        tables = [None if t is None else in_json(t, num_top) for t in wanted.prompt_logprobs]
        assert answer["choices"][0]["prompt_logprobs"] == tables
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert "not available in streams" in refusal(server, path, stream=True, prompt_logprobs=1)


def test_log_likelihoods_of_the_harness(server: RunningServer, demo_llm: LLM) -> None:
    """lm-evaluation-harness, whose client sends token ids with echo and logprobs."""
    completions = pytest.importorskip("lm_eval.models.openai_completions")
    instances = pytest.importorskip("lm_eval.api.instance")
    client = completions.LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model=MODEL,
        tokenizer=str(DEMO_PATH),
        tokenizer_backend="huggingface",
        num_concurrent=1,
        max_retries=1,
    )
    pairs = [("The capital of France is", " Paris."), ("The capital of France is", " a horse.")]
    found = client.loglikelihood(
        [instances.Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)],
        disable_tqdm=True,
    )
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        context_ids, ids = client._encode_pair(context, continuation)
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (wanted,) = demo_llm.generate([context_ids + ids], params)
        assert wanted.prompt_logprobs is not None
        entries = [next(iter(t.values())) for t in wanted.prompt_logprobs[-len(ids) :] if t]
        assert score == pytest.approx(sum(entry.logprob for entry in entries), abs=1e-4)
        assert greedy == all(entry.rank == 1 for entry in entries)
    assert found[0][0] > found[1][0]


# --- Prompts of chats -----------------------------------------------------------------------------


def test_chat_template_kwargs(server: RunningServer) -> None:
    for name in ("thinking", "enable_thinking"):
        for value in (True, False):
            made = chat(server, chat_template_kwargs={name: value}, max_tokens=90)
            assert ("reasoning_content" in made["choices"][0]["message"]) == value
    both = {"thinking": True, "enable_thinking": True, "reasoning_effort": "low"}
    assert "reasoning_content" in chat(server, chat_template_kwargs=both)["choices"][0]["message"]
    for wrong, told in (
        ({"chat_template_kwargs": {"custom": 1}}, "got 'custom'"),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "got 'thinking'"),
        ({"chat_template_kwargs": {"thinking": True, "enable_thinking": False}}, "differ"),
        (
            {"chat_template_kwargs": {"thinking": True}, "thinking": {"type": "disabled"}},
            "given twice",
        ),
    ):
        assert told in refusal(server, **wrong)


def test_continue_final_message(server: RunningServer) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of"}]
    for more in ({}, {"add_generation_prompt": False}):
        made = chat(server, messages=begun, continue_final_message=True, **more)
        assert made["choices"][0]["message"]["content"] == " France is Paris."
    told = refusal(server, messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert "add_generation_prompt" in told
    assert "an assistant's message" in refusal(server, continue_final_message=True)
    assert "only supported with" in refusal(server, add_generation_prompt=False)
    chat(server, continue_final_message=False, add_generation_prompt=True)


def test_a_format_in_a_continued_answer_that_thinks(server: RunningServer) -> None:
    """The reasoning is over, so the grammar begins at once."""
    made = chat(
        server,
        messages=[*QUESTION, {"role": "assistant", "content": "It is "}],
        continue_final_message=True,
        thinking={"type": "enabled"},
        guided_choice=["Rome", "Paris"],
    )
    assert made["choices"][0]["message"]["content"] in ("Rome", "Paris")


@pytest.mark.parametrize("stream", [False, True])
def test_where_the_reasoning_goes(server: RunningServer, stream: bool) -> None:
    thinking: dict[str, Any] = {"reasoning_effort": "low", "max_tokens": 90}

    def ask(**more: Any) -> tuple[str, str, list[str]]:
        """Content, reasoning, and the pieces of the reasoning."""
        if not stream:
            message = chat(server, **thinking, **more)["choices"][0]["message"]
            reasoning = message.get("reasoning_content", "")
            return message["content"], reasoning, [reasoning]
        content, pieces = "", []
        for chunk in chunks(server, "/v1/chat/completions", messages=QUESTION, **thinking, **more):
            delta = chunk["choices"][0]["delta"]
            content += delta.get("content") or ""
            pieces += [delta["reasoning_content"]] if delta.get("reasoning_content") else []
        return content, "".join(pieces), pieces

    content, reasoning, _ = ask()
    assert content == ANSWER and reasoning
    assert ask(separate_reasoning=False)[:2] == (f"{reasoning}</think>{ANSWER}", "")
    assert ask(include_reasoning=False)[:2] == (ANSWER, "")
    assert ask(stream_reasoning=False) == (ANSWER, reasoning, [reasoning])


# --- Formats --------------------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
CHOICES = ['say "yes"', "no\n"]


@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, lambda t: "a" in json.loads(t)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, lambda t: "a" in json.loads(t)),
        ({"structured_outputs": {"regex": "[ab]{4}"}}, re.compile("[ab]{4}").fullmatch),
        ({"structured_outputs": {"choice": CHOICES}}, CHOICES.__contains__),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, re.compile(r"x\d\d").match),
        ({"guided_json": SCHEMA}, lambda t: "a" in json.loads(t)),
        ({"guided_regex": "[ab]{4}"}, re.compile("[ab]{4}").fullmatch),
        ({"guided_choice": CHOICES}, CHOICES.__contains__),
        ({"guided_grammar": 'start: "x" /[0-9]{2}/'}, re.compile(r"x\d\d").match),
        ({"regex": "[ab]{4}"}, re.compile("[ab]{4}").fullmatch),
    ],
)
def test_formats(server: RunningServer, fields: dict[str, Any], matches: Any) -> None:
    made = post(server, "/v1/completions", prompt=TEXT, max_tokens=60, seed=1, **fields).json()
    assert matches(made["choices"][0]["text"]), made
    text = chat(server, **fields)["choices"][0]["message"]["content"]
    assert matches(text), text


def test_formats_that_are_refused(server: RunningServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    for path in ("/v1/chat/completions", "/v1/completions"):
        for fields, told in (
            ({"guided_json": SCHEMA, "guided_regex": "a"}, "give one format"),
            ({"guided_json": SCHEMA, "response_format": schema}, "give one format"),
            ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "give one format"),
            ({"structured_outputs": {}}, "structured_outputs needs"),
            ({"structured_outputs": {"structural_tag": "x"}}, "unknown parameter"),
            ({"guided_json": "{"}, "not JSON"),
            ({"guided_json": "[]"}, "must be an object"),
            ({"guided_choice": []}, "guided_choice"),
        ):
            assert told in refusal(server, path, **fields)


# --- Anthropic ------------------------------------------------------------------------------------


def test_context_management_has_no_effect_and_says_so(server: RunningServer) -> None:
    client = server.anthropic()
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    options: dict[str, Any] = {
        "model": MODEL, "max_tokens": 40, "messages": QUESTION,
        "extra_body": {"temperature": 0, "context_management": edits},
    }  # fmt: skip
    made = client.messages.create(**options).model_dump()
    assert made["content"][0]["text"] == ANSWER
    assert made["context_management"] == {"applied_edits": []}
    deltas = [
        event.model_dump()
        for event in client.messages.create(**options, stream=True)
        if event.type == "message_delta"
    ]
    assert [delta["context_management"] for delta in deltas] == [{"applied_edits": []}]
    counted = client.messages.count_tokens(
        model=MODEL,
        messages=QUESTION,
        extra_body={"context_management": edits},  # type: ignore[arg-type]
    )
    assert counted.input_tokens == made["usage"]["input_tokens"]


def test_custom_tools(server: RunningServer) -> None:
    tool = {"name": "sky", "description": "d", "input_schema": {"type": "object", "properties": {}}}
    options: dict[str, Any] = {
        "model": MODEL, "max_tokens": 100, "messages": QUESTION, "tool_choice": {"type": "any"},
    }  # fmt: skip
    client = server.anthropic()
    plain, custom = (
        client.messages.create(**options, tools=[given])
        for given in (tool, tool | {"type": "custom"})
    )
    assert custom.content[-1].type == "tool_use" and custom.content[-1].name == "sky"
    assert custom.usage.input_tokens == plain.usage.input_tokens
    counted = client.messages.count_tokens(
        model=MODEL, messages=QUESTION, tools=[tool | {"type": "custom"}],  # type: ignore[arg-type, list-item]
    )  # fmt: skip
    assert counted.input_tokens == custom.usage.input_tokens
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**options, tools=[tool | {"type": "web_search_20250305"}])


@pytest.mark.parametrize("thinking", [False, True])
def test_a_final_turn_of_the_assistant_is_continued(server: RunningServer, thinking: bool) -> None:
    client = server.anthropic()
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 40,
        "messages": [*QUESTION, {"role": "assistant", "content": "The capital of"}],
        "extra_body": {"temperature": 0},
    }
    if thinking:
        options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    made = client.messages.create(**options)
    assert [block.type for block in made.content] == ["text"]
    text = made.content[0].text  # type: ignore[union-attr]
    if not thinking:
        assert text == " France is Paris."
    with client.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == text
    counting = {name: options[name] for name in ("messages", "thinking") if name in options}
    counted = client.messages.count_tokens(model=MODEL, **counting)
    assert counted.input_tokens == made.usage.input_tokens


# --- Paths ----------------------------------------------------------------------------------------


def test_paths_of_other_servers(start: Any) -> None:
    server = start(api_keys=("secret-key",))
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        assert httpx.request(method, server.url + path).status_code == 200
    assert httpx.get(f"{server.url}/version").status_code == 401
    answer = httpx.get(f"{server.url}/version", headers={"x-api-key": "secret-key"})
    assert answer.json() == {"version": finwhale.__version__}


# --- Sampling defaults ----------------------------------------------------------------------------


def test_sampling_defaults_of_the_checkpoint(
    new_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each protocol they hold where the request leaves fields out, and only there."""
    server, found = new_server, []
    submit = server.client.submit

    def watched(prompts: Any, request: Add) -> Any:
        found.append(request.params)
        return submit(prompts, request)

    monkeypatch.setattr(server.client, "submit", watched)
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 7, "min_p": 0.1}
    server.state.sampling_defaults = defaults | {"repetition_penalty": 1.5}
    says = [{"role": "user", "content": "Hello"}]
    bodies = {
        "/v1/chat/completions": {"messages": says, "max_tokens": 2},
        "/v1/completions": {"prompt": "x", "max_tokens": 2},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 2},
        "/v1/messages": {"messages": says, "max_tokens": 2},
    }
    for path, body in bodies.items():
        for more in ({}, {"temperature": 1.0, "top_k": 0}):
            answer = post(server, path, **body, **more)
            assert answer.status_code == 200
            if path == "/v1/responses":
                temperature = more.get("temperature", 0.6)
                assert (answer.json()["temperature"], answer.json()["top_p"]) == (temperature, 0.9)
            params, wanted = found.pop(), defaults | more
            assert {name: getattr(params, name) for name in wanted} == wanted, path
            assert params.repetition_penalty == 1.5


# --- Routed experts -------------------------------------------------------------------------------


def decoded(field: dict[str, Any]) -> Any:
    array = np.frombuffer(base64.b64decode(field["data"]), field["dtype"])
    return array.reshape(field["shape"])


def test_routed_experts(one_thread: None) -> None:
    """Of chats and of completions with several prompts, as `LLM` returns them."""
    llm = LLM(device="cpu", max_num_seqs=8, enable_return_routed_experts=True)
    server = RunningServer(llm._engine)
    wants = {"return_routed_experts": True, "return_token_ids": True, "temperature": 0}
    try:
        whole = chat(server, **wants, max_tokens=20, n=2)
        stopped = chat(server, **wants, stop=ANSWER[20:24])
        options = {"prompt": [TEXT, "x"], "n": 2, "max_tokens": 3, **wants}
        made = post(server, "/v1/completions", **options).json()["choices"]
        echoed = post(server, "/v1/completions", **{**options, "max_tokens": 0, "echo": True})
        plain = chat(server, max_tokens=2)
    finally:
        server.close()
    params = SamplingParams(temperature=0, return_routed_experts=True)
    for answer in (whole, stopped):
        for choice in answer["choices"]:
            ids, found = choice["token_ids"], decoded(choice["routed_experts"])
            wanted = llm.generate(
                [answer["prompt_token_ids"]], replace(params, max_tokens=len(ids))
            )[0]
            assert wanted.outputs[0].token_ids == ids
            assert np.array_equal(found, wanted.outputs[0].routed_experts)
            found = decoded(answer["prompt_routed_experts"])
            assert np.array_equal(found, wanted.prompt_routed_experts)
    for choice, same in zip(made, echoed.json()["choices"], strict=True):
        wanted = llm.generate([choice["prompt_token_ids"]], replace(params, max_tokens=3))[0]
        for one in (choice, same):
            found = decoded(one["prompt_routed_experts"])
            assert np.array_equal(found, wanted.prompt_routed_experts)
        found = decoded(choice["routed_experts"])
        assert np.array_equal(found, wanted.outputs[0].routed_experts)
    assert "routed_experts" not in plain["choices"][0] and "prompt_routed_experts" not in plain


def test_routed_experts_are_refused(server: RunningServer) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        wants = {"return_routed_experts": True}
        assert "--enable-return-routed-experts" in refusal(server, path, **wants)
        assert "not available in streams" in refusal(server, path, **wants, stream=True)
