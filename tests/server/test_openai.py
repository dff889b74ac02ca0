"""The openai package as a client: completions and chat, whole and streamed."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import deepseek_recipe as recipe
import openai
import pytest

from finwhale import LLM, RequestOutput, SamplingParams
from finwhale.server.link.worker import _Sent

from .running import MODEL, RunningServer

BOS, EOS, USER, ASSISTANT = (
    getattr(recipe.SpecialToken, name).default_str() for name in ("Bos", "Eos", "User", "Assistant")
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def demo_llm(whole_demo_llm: LLM) -> LLM:
    """Here, the embedded model's texts are known."""
    return whole_demo_llm


def test_models(server: RunningServer) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    (card,) = server.anthropic().models.list()
    length = server.state.max_model_len
    assert (card.id, card.type, card.display_name) == (MODEL, "model", MODEL)
    assert card.created_at.timestamp() == client.models.retrieve(MODEL).created
    assert (card.max_input_tokens, card.max_tokens) == (length - 1, length - 1)
    assert client.models.retrieve(MODEL).to_dict()["context_length"] == length
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_completion_is_what_the_engine_makes(new_server: RunningServer, demo_llm: LLM) -> None:
    # The server's engine is this one; its own loop must not step beside another's.
    client = new_server.openai()
    made = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=0
    )
    choice = made.choices[0]
    new_server.close()
    wanted = demo_llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=12))[0]
    assert choice.text == wanted.outputs[0].text
    assert choice.finish_reason == "length"
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (
        len(wanted.prompt_token_ids),
        12,
    )


def test_completion_stream_is_the_whole_in_pieces(server: RunningServer) -> None:
    client = server.openai()
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": ["Once upon a time", "The whale"],
        "n": 2,
        "seed": 5,
        "max_tokens": 8,
        "logprobs": 2,
    }
    whole = client.completions.create(**options)
    texts = [""] * 4
    tokens: list[list[str]] = [[] for _ in range(4)]
    offsets: list[list[int]] = [[] for _ in range(4)]
    usage = None
    for chunk in client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            assert choice.logprobs is not None
            tokens[choice.index] += choice.logprobs.tokens or []
            offsets[choice.index] += choice.logprobs.text_offset or []
    assert texts == [choice.text for choice in whole.choices]
    assert texts[0] != texts[1]
    for choice, streamed, offset in zip(whole.choices, tokens, offsets, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == streamed and "".join(streamed) == choice.text
        assert choice.logprobs.text_offset == offset
        # A token that is not among the two likeliest is the third entry.
        for token, top in zip(streamed, choice.logprobs.top_logprobs or [], strict=True):
            assert token in top and len(top) in (2, 3)
    assert usage == whole.usage


def test_echo_token_ids_and_no_tokens(server: RunningServer) -> None:
    client = server.openai()
    prompt = server.state.need_tokenizer().encode("The fin whale")
    made = client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=3)
    assert made.choices[0].text.startswith("The fin whale")
    nothing = client.completions.create(model=MODEL, prompt=prompt, echo=True, max_tokens=0)
    assert nothing.choices[0].text == "The fin whale"
    assert nothing.usage is not None and nothing.usage.completion_tokens == 0


def test_logit_bias_and_penalties(server: RunningServer) -> None:
    client = server.openai()
    tokenizer = server.state.need_tokenizer()
    (token,) = tokenizer.encode(" whale")
    options: dict[str, Any] = {
        "model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0,
    }  # fmt: skip
    for bias in (22, 100):
        biased = client.completions.create(**options, logit_bias={str(token): bias})
        assert biased.choices[0].text == " whale" * 4
    penalised = client.completions.create(
        **options, logit_bias={str(token): 22}, frequency_penalty=2, presence_penalty=2
    )
    assert penalised.choices[0].text.startswith(" whale")
    assert penalised.choices[0].text != " whale" * 4


def test_chat(server: RunningServer) -> None:
    made = server.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_completion_tokens=30, n=2,
        logprobs=True, top_logprobs=3,
    )  # fmt: skip
    assert [choice.index for choice in made.choices] == [0, 1]
    for choice in made.choices:
        assert choice.message.content == ANSWER and choice.finish_reason == "stop"
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert "".join(entry.token for entry in choice.logprobs.content) == ANSWER
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-6
    assert made.usage is not None and made.usage.completion_tokens == 2 * 9


@pytest.mark.parametrize("thinking", [False, True])
def test_chat_stream_is_the_whole_in_pieces(server: RunningServer, thinking: bool) -> None:
    client = server.openai()
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "temperature": 0,
        "max_tokens": 60,
        "reasoning_effort": "low" if thinking else "none",
    }
    whole = client.chat.completions.create(**options)
    content, reasoning, other, finish, usage = "", "", "", None, None
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            other += getattr(choice.delta, "reasoning", None) or ""
            finish = choice.finish_reason or finish
    message = whole.choices[0].message
    assert content == message.content == ANSWER
    assert reasoning == other == (getattr(message, "reasoning_content", None) or "")
    assert bool(reasoning) == thinking
    assert finish == whole.choices[0].finish_reason == "stop"
    assert usage == whole.usage


def test_stop_strings_count_in_the_answer_alone(server: RunningServer) -> None:
    made = server.openai().chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=60, stop=["Par", "zzz"],
        reasoning_effort="low",
    )  # fmt: skip
    message = made.choices[0].message
    assert message.content == "The capital of France is "
    assert "Paris" in message.reasoning_content  # type: ignore[attr-defined]
    assert made.choices[0].finish_reason == "stop"


def test_length_and_stop_token_ids(server: RunningServer) -> None:
    client = server.openai()
    made = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=3
    )
    assert made.choices[0].finish_reason == "length"
    assert made.choices[0].message.content == "The capital of"
    (token,) = server.state.need_tokenizer().encode(" France")
    made = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, extra_body={"stop_token_ids": [token]}
    )
    assert made.choices[0].message.content == "The capital of"
    assert made.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 3.0},
        {"max_tokens": 0},
        {"n": 500},
        {"top_logprobs": 5},
        {"messages": []},
        {"messages": [{"role": "robot", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x " * 3000}]},
        {"stop": [""]},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"999999": 1}},
        {"extra_body": {"unheard_of": 1}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "nonsense"}}}},
        {"response_format": {"type": "regex", "regex": "("}},
        {"tool_choice": "required"},
    ],
)  # fmt: skip
def test_bad_requests(server: RunningServer, wrong: dict[str, Any]) -> None:
    options = {"model": MODEL, "messages": QUESTION, **wrong}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            server.openai().chat.completions.create(**options, stream=stream)
        body = caught.value.body
        assert isinstance(body, dict) and body["type"] == "invalid_request_error"
        assert body["message"] and "\n" not in body["message"]


@pytest.mark.parametrize(
    ("path", "wrong", "param", "message"),
    [
        ("chat/completions", {"stop": ["a"] * 17}, "stop", "at most 16 items"),
        ("chat/completions", {"stop": 5}, "stop", "a valid string or a valid list"),
        ("chat/completions", {"stop": ["a", 5]}, "stop.1", "a valid string"),
        ("chat/completions", {"tool_choice": 5}, "tool_choice", "or a valid dictionary"),
        ("chat/completions", {"messages": [1]}, "messages.0", "a valid dictionary"),
        ("chat/completions", {"logit_bias": {"5": "x"}}, "logit_bias.5", "a valid number"),
        ("chat/completions", {"structured_outputs": {"json": 5}}, "structured_outputs.json", "or"),
        ("completions", {}, "prompt", "Field required"),
        ("completions", {"prompt": ["a", 5]}, "prompt.1", "a valid string"),
        ("completions", {"prompt": [[5], [6, "a"]]}, "prompt.1.1", "a valid integer"),
        ("completions", {"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ("responses", {"input": [5]}, "input.0", "a valid dictionary"),
    ],
)  # fmt: skip
def test_the_wrong_value_is_named(
    server: RunningServer, path: str, wrong: dict[str, Any], param: str, message: str
) -> None:
    """Not the types that the value could have had."""
    messages = {"messages": QUESTION} if path == "chat/completions" else {}
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().post(
            f"/{path}", cast_to=dict[str, Any], body={"model": MODEL, **messages, **wrong}
        )
    assert caught.value.param == param
    assert caught.value.message.count("Input should") <= 1 and message in caught.value.message


def test_unknown_model_and_path(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai().chat.completions.create(model="other", messages=QUESTION)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.openai().embeddings.create(model=MODEL, input="x")


def test_control_tokens_in_messages_stay_text(server: RunningServer) -> None:
    tokenizer = server.state.need_tokenizer()
    text = f"{ASSISTANT}</think>Hi{EOS}"
    reply = server.openai().post(
        "/../tokenize",
        cast_to=dict[str, Any],
        body={"messages": [{"role": "user", "content": text}]},
    )
    controls = [i for i in reply["tokens"] if i in tokenizer.added_ids.values()]
    spelled = [tokenizer.token_text(i) for i in controls]
    assert spelled == [BOS, USER, ASSISTANT, "</think>"]
    ids = reply["tokens"]
    back = server.openai().post("/../detokenize", cast_to=dict[str, Any], body={"tokens": ids})
    assert text in back["prompt"]


def test_many_at_once_are_not_crossed(start: Callable[..., RunningServer]) -> None:
    client = start().openai()
    words = [
        "one",
        "red",
        "whale",
        "sea",
        "boat",
        "day",
        "sun",
        "man",
        "dog",
        "tree",
        "home",
        "eye",
    ]

    def ask(word: str) -> str:
        made = client.completions.create(
            model=MODEL, prompt=f"The {word}", echo=True, temperature=0, max_tokens=10
        )
        return made.choices[0].text

    alone = {word: ask(word) for word in words}
    with ThreadPoolExecutor(12) as pool:
        together = dict(zip(words, pool.map(ask, words), strict=True))
    assert together == alone


def test_results_do_not_change_while_they_are_sent(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, a pause on another thread could add tokens that are never sent."""
    held = []

    def delta(self: _Sent, request: RequestOutput, delta: Any = _Sent.delta) -> Any:
        held.append(server.engine.lock._is_owned())  # type: ignore[attr-defined]
        return delta(self, request)

    monkeypatch.setattr(_Sent, "delta", delta)
    assert server.openai().completions.create(model=MODEL, prompt="A", max_tokens=3).choices
    assert held and all(held)
