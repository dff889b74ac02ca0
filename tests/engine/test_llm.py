"""LLM: prompts of every form, when generation ends, log-probabilities, streams, chats."""

import dataclasses
import io
import itertools
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepseek_recipe as recipe
import numpy as np
import pytest
import torch
from tests.support.integrity import check_engine
from tests.support.library_tokenizer import encode_with_special
from tests.support.stepping import Stepper

from finwhale import (
    LLM,
    EngineDeadError,
    FinwhaleError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from finwhale.demo import DEMO_PATH
from finwhale.engine.ranks.ranks import first_rank
from finwhale.interrupts import interrupts_wait
from finwhale.loaded_model import add_job
from finwhale.weights.tree import tensors_of

TEXT = "The fin whale is"


def greedy(max_tokens: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | more)


def decode(llm: LLM, ids: list[int]) -> str:
    return llm.get_tokenizer().decode(ids)


def tokens(result: RequestOutput, index: int = 0) -> list[int]:
    return result.outputs[index].token_ids


# --- Prompts --------------------------------------------------------------------------------------


def test_forms_of_prompts(llm: LLM) -> None:
    ids = llm.encode(TEXT)
    assert ids[0] == 0 and decode(llm, ids[1:]) == TEXT
    (text,) = llm.generate(TEXT, greedy())
    assert (text.prompt, text.prompt_token_ids) == (TEXT, ids)
    (flat,) = llm.generate(ids, greedy())
    assert (flat.prompt, flat.prompt_token_ids) == (None, ids)
    assert tokens(flat) == tokens(text)
    mixed = llm.generate([TEXT, ids, tuple(ids[:3])], greedy())
    assert [r.prompt_token_ids for r in mixed] == [ids, ids, ids[:3]]
    assert tokens(mixed[0]) == tokens(mixed[1]) == tokens(text)
    assert llm.generate([], greedy()) == []
    assert len({r.request_id for r in [text, flat, *mixed]}) == 5
    assert [o.index for o in text.outputs] == [0]


def test_spelled_control_tokens_are_text(llm: LLM) -> None:
    control = set(llm.get_tokenizer().added_ids.values())
    for spelling in llm.get_tokenizer().added_ids:
        (result,) = llm.generate(f"a{spelling}b", greedy(1))
        assert not control & set(result.prompt_token_ids[1:])


def test_params_one_for_all_or_one_each(llm: LLM) -> None:
    each = llm.generate([TEXT, TEXT], [greedy(2), greedy(5)])
    assert [len(tokens(r)) for r in each] == [2, 5]
    (default,) = llm.generate([TEXT])
    assert default.outputs[0].finish_reason in ("length", "stop")
    with pytest.raises(RequestError, match="2 prompts, but 1 sampling_params"):
        llm.generate([TEXT, TEXT], [greedy()])


@pytest.mark.parametrize(
    "prompts",
    [5, None, 1.5, b"abc", [b"abc"], [None], {"text": TEXT}, {"prompt": 5}, [{"prompt": None}],
     {"prompt": TEXT, "prompt_token_ids": TEXT}, {}],
)  # fmt: skip
def test_prompts_of_a_wrong_form_are_refused(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate(prompts, greedy(1))
    assert "prompt" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 3, [{"temperature": 0}], [None]])
def test_params_of_a_wrong_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate([TEXT], params)


# --- Ends -----------------------------------------------------------------------------------------


def test_max_tokens(llm: LLM) -> None:
    for count in (1, 2, 7):
        (result,) = llm.generate([TEXT], greedy(count))
        assert len(tokens(result)) == count
        assert (result.outputs[0].finish_reason, result.outputs[0].stop_reason) == ("length", None)


def with_eos(path: Path, tiny_path: Path, eos: int | list[int]) -> Path:
    """The tiny checkpoint with other end-of-sequence ids."""
    path.mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (path / name).symlink_to(tiny_path / name)
    config = json.loads((tiny_path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"eos_token_id": eos}))
    return path


@pytest.mark.parametrize("several", [False, True])
def test_the_end_of_sequence(
    llm: LLM, new_llm: Callable[..., LLM], tiny_path: Path, tmp_path: Path, several: bool
) -> None:
    whole = tokens(llm.generate([TEXT], greedy(20))[0])
    end = next(i for i in range(3, 20) if whole[i] not in whole[:i])
    eos = [1, whole[end]] if several else whole[end]
    other = new_llm(with_eos(tmp_path / "eos", tiny_path, eos))
    (stopped,) = other.generate([TEXT], greedy(20, ignore_eos=False))
    assert tokens(stopped) == whole[: end + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", None)
    assert stopped.outputs[0].text == decode(llm, whole[:end])
    (ignored,) = other.generate([TEXT], greedy(20))
    assert tokens(ignored) == whole
    assert ignored.outputs[0].finish_reason == "length"


def test_stop_token_ids(llm: LLM) -> None:
    whole = tokens(llm.generate([TEXT], greedy(20))[0])
    end = next(i for i in range(4, 20) if whole[i] not in whole[:i])
    (result,) = llm.generate([TEXT], greedy(20, stop_token_ids=[1, whole[end]]))
    output = result.outputs[0]
    assert output.token_ids == whole[: end + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", whole[end])
    assert output.text == decode(llm, whole[:end])


def test_stop_strings(llm: LLM) -> None:
    """Every substring of the text stops it where it first stands, also across tokens."""
    ids = tokens(llm.generate([TEXT], greedy(24))[0])
    whole = decode(llm, ids)
    for begin in range(0, len(whole) - 4, 3):
        for size in (1, 2, 4):
            stop = whole[begin : begin + size]
            if "\ufffd" in stop:
                continue
            output = llm.generate([TEXT], greedy(24, stop=["never this", stop]))[0].outputs[0]
            assert output.text == whole[: whole.index(stop)]
            assert (output.finish_reason, output.stop_reason) == ("stop", stop)
            # As many tokens as complete the stop string, and no more.
            assert stop in decode(llm, output.token_ids)
            assert stop not in decode(llm, output.token_ids[:-1])


def test_a_stop_string_that_does_not_come(llm: LLM) -> None:
    """What was held back, because it might have been one, is given in the end."""
    ids = tokens(llm.generate([TEXT], greedy(24))[0])
    whole = decode(llm, ids)
    output = llm.generate([TEXT], greedy(24, stop=[whole[-3:] + "never"]))[0].outputs[0]
    assert output.text == whole
    assert (output.finish_reason, output.stop_reason) == ("length", None)


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    """Also where characters are spread over tokens or broken: nothing is lost or added."""
    params = SamplingParams(temperature=3.0, seed=1, n=4, max_tokens=60, ignore_eos=True)
    for result in llm.generate([TEXT, "你好 🐋"], params):
        for output in result.outputs:
            assert output.text == decode(llm, output.token_ids)
            assert len(output.token_ids) == 60


# --- Several, seeds -------------------------------------------------------------------------------


def test_seeds(llm: LLM) -> None:
    """A seed fixes a request's tokens, alone, in a batch and one by one of its n."""
    params = SamplingParams(
        temperature=1.2, top_k=50, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5,
        seed=-7, n=3, max_tokens=15, ignore_eos=True,
    )  # fmt: skip
    (first,) = llm.generate([TEXT], params)
    again = llm.generate(["other", TEXT, "The"], [greedy(30), params, SamplingParams(seed=1)])[1]
    runs = [tokens(first, i) for i in range(3)]
    assert [tokens(again, i) for i in range(3)] == runs
    assert len({tuple(run) for run in runs}) == 3
    (other,) = llm.generate([TEXT], SamplingParams(temperature=1.2, seed=8, max_tokens=15))
    assert tokens(other) not in runs


def test_without_a_seed_draws_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=15, ignore_eos=True)
    first, second = llm.generate([TEXT, TEXT], params)
    assert tokens(first) != tokens(second)


def test_times(new_llm: Callable[..., LLM]) -> None:
    llm = new_llm(max_num_seqs=1)
    begin = time.monotonic()
    params = SamplingParams(n=2, max_tokens=4, ignore_eos=True)
    first, second = llm.generate(["The fin whale", "sings"], params)
    end = time.monotonic()
    assert first.times is not None and second.times is not None
    for times in (first.times, second.times):
        edges = [begin, *dataclasses.astuple(times), end]
        assert edges == sorted(edges) and len(set(edges)) == len(edges)
    # The second request waits for both continuations of the first one.
    assert second.times.arrival < first.times.first_token
    assert second.times.admission > first.times.last_token


def test_more_continuations_than_run_at_once(new_llm: Callable[..., LLM]) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=7, max_tokens=4, ignore_eos=True)
    (few,) = new_llm(max_num_seqs=2).generate([TEXT], params)
    (many,) = new_llm(max_num_seqs=7).generate([TEXT], params)
    assert [tokens(few, i) for i in range(7)] == [tokens(many, i) for i in range(7)]


# --- Log-probabilities ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs(llm: LLM, count: int) -> None:
    """Against the log-softmax of logits computed apart, before temperature and penalties."""
    params = SamplingParams(
        temperature=1.5, repetition_penalty=1.5, seed=2, max_tokens=10, ignore_eos=True,
        logprobs=count,
    )  # fmt: skip
    (result,) = llm.generate([TEXT], params)
    output = result.outputs[0]
    stepper = Stepper(llm._engine)
    known = [*result.prompt_token_ids, *output.token_ids]
    rows = stepper.logits(stepper.read(known))[len(result.prompt_token_ids) - 1 : -1]
    expected = torch.log_softmax(rows.double(), -1)
    assert output.logprobs is not None and len(output.logprobs) == 10
    for token, entries, row in zip(output.token_ids, output.logprobs, expected, strict=True):
        best = row.topk(max(count, 1)).indices.tolist()[:count]
        assert list(entries) == [token, *(i for i in best if i != token)]
        for i, entry in entries.items():
            assert math.isclose(entry.logprob, row[i].item(), abs_tol=2e-5)
            assert entry.rank == int((row > row[i]).sum()) + 1
            assert entry.decoded_token == llm.get_tokenizer().token_text(i)


def test_no_logprobs_unless_asked_for(llm: LLM) -> None:
    plain, asked = llm.generate([TEXT, TEXT], [greedy(3), greedy(3, logprobs=2)])
    assert plain.outputs[0].logprobs is None
    assert asked.outputs[0].logprobs is not None
    assert [len(entry) for entry in asked.outputs[0].logprobs] == [2, 2, 2]


# --- Streams --------------------------------------------------------------------------------------


def test_a_stream_grows_to_the_whole(llm: LLM) -> None:
    (whole,) = llm.generate([TEXT], greedy(20, logprobs=1))
    texts, counts = [], []
    for result in llm.stream(TEXT, greedy(20, logprobs=1)):
        texts.append(result.outputs[0].text)
        counts.append(len(tokens(result)))
        assert result.outputs[0].logprobs is not None
        assert len(result.outputs[0].logprobs) == counts[-1]
        assert result.finished == (counts[-1] == 20)
    assert counts == list(range(1, 21))
    assert all(b.startswith(a) for a, b in pairwise(texts))
    assert texts[-1] == whole.outputs[0].text and tokens(result) == tokens(whole)


@pytest.mark.parametrize("seen", [1, 4])
def test_closing_a_stream_aborts_it(llm: LLM, seen: int) -> None:
    stream: Any = llm.stream(TEXT, greedy(100))
    for _ in range(seen):
        result = next(stream)
    assert llm._engine.has_work
    stream.close()
    assert not llm._engine.has_work and not result.finished
    check_engine(llm._engine)


def test_streams_and_batches_at_once(llm: LLM) -> None:
    """Each stream shows its last token, whoever made the engine step."""
    (long,), (short,) = llm.generate([TEXT], greedy(9)), llm.generate(["a"], greedy(5))
    first, second = llm.stream(TEXT, greedy(9)), llm.stream("a", greedy(5))
    next(first)
    next(second)
    llm.generate(["between"], greedy(30))
    for stream, wanted in ((first, long), (second, short)):
        *_, last = stream
        assert last.finished and tokens(last) == tokens(wanted)


def test_a_stream_of_a_bad_prompt_raises(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        next(llm.stream(""))
    with pytest.raises(RequestError, match="room for"):
        next(llm.stream([5] * 600))


# --- Chats ----------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello, who sings too low?"}]


def test_chat_one_conversation(llm: LLM) -> None:
    (result,) = llm.chat(HELLO, greedy(30))
    template = llm.chat_template()
    assert result.prompt_token_ids[0] == llm.get_tokenizer().bos_id
    assert "Hello, who sings too low?" in decode(llm, result.prompt_token_ids)
    assert result.prompt is not None and "Hello" in result.prompt
    (same,) = llm.generate([result.prompt_token_ids], greedy(30))
    assert tokens(result) == tokens(same)
    message = result.outputs[0].message
    assert message is not None and message["role"] == "assistant"
    # The answer can be added to the conversation and rendered again.
    template.render([*HELLO, message, {"role": "user", "content": "And then?"}])


def test_chat_several_conversations(llm: LLM) -> None:
    talk = [{"role": "system", "content": "Be short."}, *HELLO]
    alone = [llm.chat(messages, greedy(12))[0] for messages in (HELLO, talk)]
    together = llm.chat([HELLO, talk], [greedy(12), greedy(12)])
    assert [tokens(r) for r in together] == [tokens(r) for r in alone]
    assert [r.outputs[0].message for r in together] == [r.outputs[0].message for r in alone]
    (both,) = llm.chat(HELLO, SamplingParams(n=2, temperature=2.0, seed=1, max_tokens=12))
    assert len({json.dumps(o.message) for o in both.outputs}) == 2


@pytest.fixture
def scripted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes the model say a given text next, control tokens included."""
    return partial(say, monkeypatch, llm)


def say(monkeypatch: pytest.MonkeyPatch, llm: LLM, text: str) -> None:
    script = iter([*encode_with_special(llm.get_tokenizer(), text), 1])
    runner = first_rank(llm._engine.executor).runner
    logits = type(runner).logits

    def speak(chunks: Any) -> torch.Tensor:
        out = logits(runner, chunks).clone()
        for row in out:
            row[next(script)] += 1000
        return out

    monkeypatch.setattr(runner, "logits", speak)


def chat(llm: LLM, **more: Any) -> tuple[RequestOutput, dict[str, Any]]:
    thinking = more.pop("thinking", False)
    params = SamplingParams(temperature=0, max_tokens=200, **more)
    (result,) = llm.chat(HELLO, params, thinking=thinking)
    message = result.outputs[0].message
    assert message is not None
    return result, message


def test_an_answer_is_parsed(llm: LLM, scripted: Callable[[str], None]) -> None:
    scripted("Let me see.</think>The fin whale 🐋.")
    result, message = chat(llm, thinking=True)
    assert message["reasoning_content"] == "Let me see."
    assert message["content"] == "The fin whale 🐋."
    assert result.outputs[0].finish_reason == "stop"


def test_a_stop_token_is_no_part_of_the_answer(llm: LLM, scripted: Callable[[str], None]) -> None:
    """As in the output's text."""
    (bang,) = llm.get_tokenizer().encode("!")
    scripted("The fin whale! And more.")
    result, message = chat(llm, stop_token_ids=[bang])
    assert result.outputs[0].stop_reason == bang
    assert result.outputs[0].text == "The fin whale"
    assert message["content"] == "The fin whale"


def test_a_stop_string_ends_the_answer(llm: LLM, scripted: Callable[[str], None]) -> None:
    scripted("The fin whale. And more.")
    result, message = chat(llm, stop="ale. A")
    assert result.outputs[0].text == message["content"] == "The fin wh"


def test_a_conversation_that_is_too_long_fails_alone(llm: LLM) -> None:
    long = [{"role": "user", "content": "whale " * 2000}]
    good, bad, other = llm.chat([HELLO, long, HELLO], greedy(6))
    assert len(tokens(good)) == len(tokens(other)) == 6
    assert bad.error is not None and "room for" in bad.error
    assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].message is None


@pytest.mark.parametrize("messages", ["Hello", {}, [], None])
def test_messages_of_a_wrong_form_are_refused(llm: LLM, messages: Any) -> None:
    """One line, and nothing is left running."""
    with pytest.raises(RequestError) as error:
        llm.chat(messages, greedy(2))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "conversation",
    [
        [{"role": "robot", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user"}],
        [],
        [5],
        5,
    ],
)
def test_a_malformed_conversation_fails_alone(llm: LLM, conversation: Any) -> None:
    good, bad, other = llm.chat([HELLO, conversation, HELLO], greedy(4))
    assert len(tokens(good)) == len(tokens(other)) == 4
    assert bad.error is not None and "\n" not in bad.error and "messages" in bad.error
    assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].message is None


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ([{"role": "usr", "content": "x"}], "messages"),
        ([{"role": "user", "content": "whale " * 2000}], "room for"),
    ],
)
def test_a_single_bad_conversation_raises(llm: LLM, conversation: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.chat(conversation, greedy(4))
    (result,) = llm.chat([conversation], greedy(4))
    assert result.error is not None and message in result.error


def test_stop_strings_count_after_the_reasoning(llm: LLM, scripted: Callable[[str], None]) -> None:
    scripted("I stop and think.</think>The fin whale. And more.")
    params = greedy(64, stop=("stop", "whale"))
    (result,) = llm.chat(HELLO, params, thinking=True)
    message = result.outputs[0].message
    assert message is not None
    assert message["reasoning_content"] == "I stop and think."
    assert message["content"] == "The fin "
    assert result.outputs[0].stop_reason == "whale"


DSML = recipe.SpecialToken.Dsml.default_str()
CALL = (
    f'\n\n<{DSML}tool_calls>\n<{DSML}invoke name="weather">\n'
    f'<{DSML}parameter name="city" string="true">Paris</{DSML}parameter>\n'
    f"</{DSML}invoke>\n</{DSML}tool_calls>"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def test_stop_strings_and_tools(
    new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the server, stop strings end the content only, and as early as without tools."""
    llm = new_llm(DEMO_PATH, max_model_len=2048)
    for stop in ("Par", "\n\n"):
        say(monkeypatch, llm, CALL)
        params = SamplingParams(temperature=0, stop=stop)
        (output,) = llm.chat(HELLO, params, tools=TOOLS)[0].outputs
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        assert output.message is not None
        (call,) = output.message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    ends = ((False, "ale. A", "wh"), (True, "ale. A", "whale. A"), (True, ".", "whale."))
    for keep, stop, kept in ends:
        params = SamplingParams(
            temperature=0,
            stop=("stop", stop),
            include_stop_str_in_output=keep,
            logprobs=0,
        )
        outputs = []
        for tools in ((), TOOLS):
            say(monkeypatch, llm, "I stop</think>The fin whale. And more.")
            (output,) = llm.chat(HELLO, params, thinking=True, tools=tools)[0].outputs
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids)
            outputs.append(dataclasses.replace(output, logprobs=None))
        assert outputs[0] == outputs[1]
        assert output.text.endswith(kept) and output.stop_reason == stop


def test_threads_share_one_model(llm: LLM) -> None:
    """Each thread gets its own results; the tokens are those of a run alone."""
    prompts = [[5 + i, 9, 7 + i] for i in range(4)]
    alone = [tokens(llm.generate([prompt], greedy(12))[0]) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda prompt: tokens(llm.generate([prompt], greedy(12))[0]), prompts)
        )
    assert found == alone


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_while_a_request_begins(
    llm: LLM, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C beside the queue leaves nothing of the request in the engine."""
    admission = llm._engine.scheduler.admission
    add, calls = admission.add, itertools.count()

    def interrupted(sequence: Any) -> None:
        third = next(calls) == 2
        if third and when == "before":
            raise KeyboardInterrupt
        add(sequence)
        if third:
            raise KeyboardInterrupt

    wanted = tokens(llm.generate([[5, 9]], greedy())[0])
    with monkeypatch.context() as patch:
        patch.setattr(admission, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 9], [6, 9]], greedy(n=2))
    assert not llm._engine.has_work
    check_engine(llm._engine)
    assert tokens(llm.generate([[5, 9]], greedy())[0]) == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_an_interrupt_after_a_request_began(
    llm: LLM, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any) -> None:
        add_job(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr("finwhale.llm.add_job", interrupted)
    with pytest.raises(KeyboardInterrupt):
        if stream:
            next(llm.stream([5, 9], greedy()))
        else:
            llm.generate([[5, 9]], greedy())
    assert not llm._engine.has_work


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """The handler of a program in the foreground: a job in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["schedule", "record_computed", "finish"])
def test_ctrl_c_waits_for_the_end_of_a_step(
    llm: LLM, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any line of the scheduler, so that nothing is half changed."""
    scheduler, changed = llm._engine.scheduler, 0
    run = getattr(scheduler, name)

    def interrupted(*args: Any) -> Any:
        nonlocal changed
        signal.raise_signal(signal.SIGINT)
        result = run(*args)
        changed += 1
        return result

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            if stream:
                list(llm.stream([5, 9], greedy()))
            else:
                llm.generate([[5, 9]], greedy())
    assert changed and not llm._engine.has_work
    check_engine(llm._engine)
    llm.generate([[5, 9]], greedy())


@pytest.mark.usefixtures("ctrl_c")
def test_a_second_ctrl_c_does_not_wait() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_integers_of_other_types_are_token_ids(llm: LLM) -> None:
    plain, other = llm.generate([[5, 6], list(np.array([5, 6]))], greedy(4))
    assert tokens(plain) == tokens(other)
    assert all(type(token) is int for token in other.prompt_token_ids)


def test_chat_needs_a_tokenizer(new_llm: Callable[..., LLM], no_tokenizer_path: Path) -> None:
    llm = new_llm(no_tokenizer_path)
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        llm.chat(HELLO)
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        llm.encode(TEXT)
    ids, text, stops = llm.generate(
        [[5, 6], "text", [5, 6]], [greedy(3), greedy(3), greedy(3, stop="x")]
    )
    assert len(tokens(ids)) == 3 and ids.outputs[0].text == ""
    assert text.error is not None and "give token ids" in text.error
    assert stops.error is not None and "tokenizer" in stops.error


# --- Closing --------------------------------------------------------------------------------------


def test_closing_frees_the_memory_and_ends_requests(tiny_path: Path, one_thread: None) -> None:
    """Also that of weights and cache to which a traceback refers, as in a notebook."""
    with LLM(model=tiny_path, device="cpu") as llm:
        assert len(tokens(llm.generate(TEXT, greedy(2))[0])) == 2
        runner = first_rank(llm._engine.executor).runner
        frames = (runner.model, runner.cache)
        held = [*tensors_of(runner.model.weights), *runner.cache.pages.values()]
        assert all(tensor.untyped_storage().nbytes() for tensor in held)
        begun, waiting = llm.stream(TEXT, greedy(50)), llm.stream(TEXT, greedy(50))
        result = next(begun)
    assert frames and not any(tensor.untyped_storage().nbytes() for tensor in held)
    assert not vars(runner)
    assert result.finished and result.outputs[0].finish_reason == "abort"
    llm.close()
    assert repr(llm) == f"<LLM {str(tiny_path)!r}: closed>"
    for call in (
        lambda: llm.generate(TEXT),
        lambda: llm.chat(HELLO),
        lambda: next(waiting),
        lambda: llm.encode(TEXT),
        llm.get_tokenizer,
        llm.metrics,
        llm.pause,
        lambda: llm.update_weights(tiny_path),
    ):
        with pytest.raises(FinwhaleError, match="this LLM is closed: make a new one"):
            call()
    del begun


def test_closing_while_another_thread_generates(tiny_path: Path, one_thread: None) -> None:
    """The request ends: with its tokens so far, or with an error."""
    llm = LLM(tiny_path, device="cpu", max_model_len=512)
    stream = llm.stream(TEXT, greedy(400))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(list, stream)
        llm.close()
        try:
            assert rest.result()[-1].outputs[0].finish_reason in ("abort", "length")
        except FinwhaleError as error:
            assert "closed" in str(error)


def test_closing_an_engine_that_died(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    llm = LLM(tiny_path, device="cpu")

    def broken(*_: object) -> None:
        raise torch.AcceleratorError("the device is gone")

    monkeypatch.setattr(llm._engine._loop, "launch", broken)
    with pytest.raises(EngineDeadError):
        llm.generate(TEXT, greedy(2))
    llm.close()
    with pytest.raises(FinwhaleError, match="is closed"):
        llm.generate(TEXT)


# --- What a person sees ---------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_progress_bar_on_a_terminal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stderr: io.StringIO, **options: bool) -> str:
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setenv("TERM", "xterm")
        llm.generate([TEXT, "a", ""], greedy(3), **options)
        llm.chat([HELLO], greedy(3), **options)
        return stderr.getvalue()

    text = shown(Terminal())
    assert "3/3" in text and "1/1" in text and "tokens/s" in text
    assert shown(Terminal(), show_progress=False) == shown(io.StringIO()) == ""


def test_reprs_are_short(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, n=9, max_tokens=100, stop_token_ids=range(1000), ignore_eos=True
    )
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(greedy(3)) == "SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)"
    assert len(repr(params)) < 200
    (result,) = llm.generate([[5] * 300], greedy(40, n=9, logprobs=3))
    assert len(repr(result)) < 1500
    assert "prompt_token_ids=<300>" in repr(result) and "9 in all" in repr(result)
    (bad,) = llm.generate("")
    assert "error='the prompt is empty" in repr(bad)
    (answer,) = llm.chat(HELLO, greedy(40))
    assert "role" in repr(answer) and len(repr(answer)) < 600
    assert "cpu" in repr(llm) and "512 tokens" in repr(llm)
