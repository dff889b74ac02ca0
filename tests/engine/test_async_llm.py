"""AsyncLLM: the outputs of LLM, many coroutines, cancelling, failures and closing."""

import asyncio
import contextlib
import gc
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.integrity import check_engine

from finwhale import LLM, AsyncLLM, EngineDeadError, FinwhaleError, RequestError, SamplingParams
from finwhale.async_llm import _extended, _Running
from finwhale.chat.grammar import regex_guide
from finwhale.engine.loop import control
from finwhale.engine.loop.step_loop import StepLoop
from finwhale.request import CompletionOutput, Logprob, RequestOutput, RequestTimes

TEXT = "The fin whale is"
HELLO = [{"role": "user", "content": "Hello, who sings too low?"}]
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def greedy(max_tokens: int = 16, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | more)


@pytest.fixture(scope="module")
def shared_async(tiny_path: Path) -> AsyncLLM:
    return new_async(tiny_path)


@pytest.fixture
def async_llm(shared_async: AsyncLLM, one_thread: None) -> Iterator[AsyncLLM]:
    yield shared_async
    run(idle(shared_async))
    engine = shared_async._engine
    check_engine(engine)
    engine.reset_prefix_cache()
    for name, pool in engine.scheduler.pages.pools.items():
        assert pool.num_free == pool.num_pages - 1, f"pages of {name} are still held"


def new_async(path: Path) -> AsyncLLM:
    return AsyncLLM(path, device="cpu", activations="exact", max_num_seqs=8)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 300))


async def idle(llm: AsyncLLM) -> None:
    """Waits until the engine has no request; fails after some seconds."""
    async with asyncio.timeout(120):
        while llm._engine.has_work:
            await asyncio.sleep(0.005)


def aborted(llm: AsyncLLM) -> int:
    """The number of continuations that were aborted."""
    return llm._engine.metrics().endings["abort"]


def plain(results: list[Any]) -> list[Any]:
    return [(r.prompt, r.prompt_token_ids, r.outputs, r.error, r.finished) for r in results]


def test_the_outputs_of_llm(llm: LLM, async_llm: AsyncLLM) -> None:
    """Batches, refused prompts, chats, guides, log-probabilities."""
    prompts = [TEXT, "", [5, 6, 7], [5] * 600, "other"]
    params = [
        greedy(),
        greedy(),
        SamplingParams(temperature=1.1, seed=3, n=3, max_tokens=9, logprobs=2, prompt_logprobs=1),
        greedy(),
        greedy(9, guide=regex_guide("[a-z ]{2,9}")),
    ]

    async def both() -> tuple[list[Any], list[Any]]:
        return await asyncio.gather(
            async_llm.generate(prompts, params),
            async_llm.chat([HELLO, [5]], greedy(12), thinking=True),  # type: ignore[list-item]
        )

    found, answers = run(both())
    assert plain(found) == plain(llm.generate(prompts, params))
    assert [result.error is None for result in found] == [True, False, True, False, True]
    wanted = llm.chat([HELLO, [5]], greedy(12), thinking=True)  # type: ignore[list-item]
    assert plain(answers) == plain(wanted)
    assert answers[0].outputs[0].message is not None


def test_the_same_names_and_arguments_as_llm() -> None:
    for name in ("generate", "chat", "stream", "encode", "chat_template"):
        ours, theirs = (
            dict(inspect.signature(getattr(one, name)).parameters) for one in (AsyncLLM, LLM)
        )
        theirs.pop("show_progress", None)
        assert ours == theirs


def test_many_streams_at_once(llm: LLM, async_llm: AsyncLLM) -> None:
    """More than the engine runs at once; each grows to what LLM makes of its prompt."""
    params = SamplingParams(
        temperature=1.0, seed=5, n=2, max_tokens=10, logprobs=1, prompt_logprobs=0
    )
    prompts = [[5 + i, 6, 7] for i in range(12)]

    async def read(prompt: list[int]) -> Any:
        seen: list[int] = []
        first = None
        async for result in async_llm.stream(prompt, params):
            first = first or result
            assert result is first
            seen.append(sum(len(output.token_ids) for output in result.outputs))
            for output in result.outputs:
                assert output.logprobs is not None
                assert len(output.logprobs) == len(output.token_ids)
        assert seen[0] > 0 and seen == sorted(seen)
        return first

    async def everything() -> list[Any]:
        return await asyncio.gather(*(read(prompt) for prompt in prompts))

    assert plain(run(everything())) == plain(llm.generate(prompts, params))


def test_a_slow_reader_gets_several_tokens_at_once(async_llm: AsyncLLM) -> None:
    """The engine does not wait, and a result changes only between two readings."""

    async def read() -> list[int]:
        counts = []
        async for result in async_llm.stream(TEXT, greedy(60)):
            counts.append(len(result.outputs[0].token_ids))
            if len(counts) == 1:
                await idle(async_llm)
                assert len(result.outputs[0].token_ids) == counts[0]
        return counts

    first, *_, last = run(read())
    assert first < 60 and last == 60


def test_a_stream_has_times_when_continuation_1_begins_first(
    tiny_path: Path, one_thread: None
) -> None:
    """Continuation 1 reuses the cached prompt, which continuation 0 computes again."""
    llm = AsyncLLM(tiny_path, device="cpu", activations="exact", max_num_batched_tokens=64)
    prompt = [7 * i % 400 for i in range(300)]

    async def read() -> Any:
        await llm.generate([prompt], greedy(1))
        stream = llm.stream(prompt, greedy(6, n=2, prompt_logprobs=0))
        *_, result = [result async for result in stream]
        await llm.aclose()
        return result

    result = run(read())
    times = result.times
    assert times is not None and times.arrival < times.first_token < times.last_token
    assert None not in result.prompt_logprobs[1:]


def test_an_update_shares_nothing_that_the_engine_changes() -> None:
    request: Any = SimpleNamespace(streams=True)
    output = CompletionOutput(0, text="a", token_ids=[5])
    result = RequestOutput("one", None, [1, 2], [output], prompt_logprobs=[None, None])
    running = _Running(request, result)
    first = running.update()
    assert first is not None and first.times is None and first.prompt_logprobs == [None, None]
    assert result.prompt_logprobs is not None
    result.prompt_logprobs[1] = {2: Logprob(-1.0, 1, "b")}
    result.times = RequestTimes(1.0, 2.0, 3.0, 3.0)
    output.token_ids.append(6)
    second = running.update()
    assert first.prompt_logprobs == [None, None]
    result.times.last_token = 4.0
    assert second is not None and second.times == RequestTimes(1.0, 2.0, 3.0, 3.0)
    whole = _extended(first, second)
    assert whole is first and whole.outputs[0].token_ids == [5, 6]
    assert whole.times == second.times and whole.prompt_logprobs == result.prompt_logprobs


def test_results_do_not_change_while_they_are_read(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause on another thread, which collects further tokens, waits."""
    engine, waited = async_llm._engine, []

    def pause(begun: threading.Event) -> None:
        begun.set()
        control.pause(engine)
        control.resume(engine)

    def read(self: Any, update: Any = _Running.update) -> Any:
        begun = threading.Event()
        thread = threading.Thread(target=pause, args=(begun,))
        thread.start()
        begun.wait()
        thread.join(0.01)
        waited.append(thread.is_alive())
        return update(self)

    monkeypatch.setattr(_Running, "update", read)
    run(async_llm.generate([[5, 9]], SamplingParams(max_tokens=4, ignore_eos=True)))
    assert waited and all(waited)


def test_bad_prompts_of_streams_raise(async_llm: AsyncLLM) -> None:
    async def read(prompt: Any) -> None:
        async for _ in async_llm.stream(prompt):
            pass

    with pytest.raises(RequestError, match="empty"):
        run(read(""))
    with pytest.raises(RequestError, match="room for"):
        run(read([5] * 600))
    with pytest.raises(RequestError, match="2 prompts, but 1"):
        run(async_llm.generate([TEXT, TEXT], [greedy()]))


# --- Ends before the end --------------------------------------------------------------------------


def test_cancelling_a_batch_aborts_its_requests_only(llm: LLM, async_llm: AsyncLLM) -> None:
    async def cancel() -> Any:
        kept = asyncio.ensure_future(async_llm.generate([TEXT], greedy(40)))
        lost = [asyncio.ensure_future(async_llm.generate([[5] * 9] * 3, LONG)) for _ in range(3)]
        talk = asyncio.ensure_future(async_llm.chat(HELLO, LONG))
        async for _ in async_llm.stream([8, 9], greedy(3)):
            pass
        for task in (*lost, talk):
            task.cancel()
        for task in (*lost, talk):
            with pytest.raises(asyncio.CancelledError):
                await task
        return await kept

    before = aborted(async_llm)
    assert plain(run(cancel())) == plain(llm.generate([TEXT], greedy(40)))
    run(idle(async_llm))
    assert aborted(async_llm) == before + 10


def test_breaking_out_of_a_stream_aborts_it(async_llm: AsyncLLM) -> None:
    async def leave() -> None:
        async for result in async_llm.stream(TEXT, LONG):
            if len(result.outputs[0].token_ids) >= 3:
                break
        await idle(async_llm)
        stream = async_llm.stream(TEXT, LONG)
        assert isinstance(stream, AsyncGenerator)
        async with contextlib.aclosing(stream):
            await anext(stream)
        await idle(async_llm)

    before = aborted(async_llm)
    run(leave())
    assert aborted(async_llm) == before + 2


def test_a_timeout_aborts(async_llm: AsyncLLM) -> None:
    async def late() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(async_llm.generate([TEXT] * 8, LONG), 0.05)
        await idle(async_llm)

    run(late())


def test_several_event_loops(llm: LLM, async_llm: AsyncLLM) -> None:
    found = []

    def own_loop() -> None:
        found.append(run(async_llm.generate([TEXT], greedy())))

    threads = [threading.Thread(target=own_loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    wanted = plain(llm.generate([TEXT], greedy()))
    assert [plain(results) for results in found] == [wanted] * 3


def test_a_loop_that_is_closed_while_its_request_runs(async_llm: AsyncLLM) -> None:
    """Nobody cancelled the task, but nobody can wait for it any more."""
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # of the task that never ends
    stream = async_llm.stream(TEXT, LONG)
    loop.run_until_complete(anext(stream))
    before = aborted(async_llm)
    loop.close()
    run(idle(async_llm))
    assert aborted(async_llm) == before + 1
    del stream


# --- Failures and closing -------------------------------------------------------------------------


def test_an_engine_that_dies_ends_every_coroutine(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    llm = new_async(tiny_path)

    async def stream() -> None:
        async for _ in llm.stream(TEXT, LONG):
            pass

    async def die() -> None:
        tasks = [
            asyncio.ensure_future(one) for one in (stream(), stream(), llm.generate("a", LONG))
        ]
        async for _ in llm.stream("b", greedy(2)):
            pass

        def broken(*_: Any) -> Any:
            raise torch.AcceleratorError("the device is gone")

        monkeypatch.setattr(llm._engine._loop, "launch", broken)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        with pytest.raises(EngineDeadError):
            await llm.generate("c")
        await llm.aclose()

    run(die())


def test_a_step_that_cannot_begin_fails_its_requests_only(
    async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = StepLoop.launch

    def once(*_: Any) -> None:
        monkeypatch.undo()
        raise ValueError("no plan")

    async def fail() -> None:
        monkeypatch.setattr(StepLoop, "launch", once)
        with pytest.raises(ValueError, match="no plan"):
            await async_llm.generate(TEXT, greedy(3))
        assert StepLoop.launch is launch
        (result,) = await async_llm.generate(TEXT, greedy(3))
        assert len(result.outputs[0].token_ids) == 3

    run(fail())


def test_closing_ends_requests_and_the_thread(tiny_path: Path, one_thread: None) -> None:
    before = threading.active_count()

    async def close() -> AsyncLLM:
        async with new_async(tiny_path) as llm:
            task = asyncio.ensure_future(llm.generate([TEXT], LONG))
            async for _ in llm.stream("b", greedy(2)):
                pass
        with pytest.raises(FinwhaleError, match="was closed"):
            await task
        with pytest.raises(FinwhaleError, match="is closed"):
            await llm.generate([TEXT])
        await llm.aclose()
        return llm

    llm = run(close())
    with pytest.raises(FinwhaleError, match="this AsyncLLM is closed"):
        llm.metrics()
    assert "closed" in repr(llm)
    assert threading.active_count() == before


def test_a_collected_model_ends_its_thread(tiny_path: Path, one_thread: None) -> None:
    llm = new_async(tiny_path)
    thread = llm._stepper._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_may_not_use_it(async_llm: AsyncLLM) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                asyncio.run(async_llm.generate([[5, 6]], greedy(2)))
            except FinwhaleError as error:
                code = 0 if "forked" in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
