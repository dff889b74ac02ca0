"""Two ranks as processes: their results, and every way in which a rank or its engine can fail."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.tiny import divisible_config, random_weights, write_plain_checkpoint

from finwhale import (
    LLM,
    EngineDeadError,
    FinwhaleError,
    ResourceError,
    SamplingParams,
)
from finwhale.distributed import workers
from finwhale.distributed.worker_messages import CONNECTING
from finwhale.engine.ranks import ranks
from finwhale.engine.start import startup
from finwhale.errors import OtherRankError
from finwhale.validation.language import score

from . import faults

pytestmark = pytest.mark.usefixtures("forked_ranks")
ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KINDS = [
    GREEDY,
    SamplingParams(seed=1, max_tokens=24, ignore_eos=True, n=2),
    SamplingParams(seed=2, max_tokens=24, ignore_eos=True, top_p=0.9, frequency_penalty=0.3),
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3),
]
PROMPTS = [[5, 6, 7], [9] * 140, list(range(2, 40)), [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, config = tmp_path_factory.mktemp("ranks") / "model", divisible_config()
    write_plain_checkpoint(path, config, random_weights(config, 3))
    return path


@pytest.fixture(scope="module")
def four_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model that four ranks can divide."""
    path = tmp_path_factory.mktemp("ranks") / "model"
    config = divisible_config() | {"o_groups": 4}
    write_plain_checkpoint(path, config, random_weights(config, 3))
    return path


def open_llm(path: Path, size: int = 2, **options: Any) -> LLM:
    return LLM(
        path,
        **{
            "device": "cpu",
            "activations": "exact",
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "tensor_parallel_size": size,
            **options,
        },
    )


def tokens(llm: LLM) -> list[list[int]]:
    return [o.token_ids for result in llm.generate(PROMPTS, KINDS) for o in result.outputs]


def assert_equal_prompt_logprobs(one: LLM, other: LLM) -> None:
    """Two ranks, each with a part of the logits, score a prompt as one rank does."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)
    results = (llm.generate(PROMPTS, params) for llm in (one, other))
    for found, wanted in zip(*results, strict=True):
        assert found.prompt_logprobs is not None and wanted.prompt_logprobs is not None
        for table, right in zip(found.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
            assert table is not None and right is not None and table.keys() == right.keys()
            for token, entry in table.items():
                assert entry.rank == right[token].rank
                assert entry.logprob == pytest.approx(right[token].logprob, abs=1e-5)


def assert_equal_routed_experts(one: LLM, other: LLM) -> None:
    """Every rank chooses the same experts, and rank 0 returns them."""
    params = SamplingParams(temperature=0, max_tokens=4, return_routed_experts=True)
    results = (llm.generate(PROMPTS, params) for llm in (one, other))
    for found, wanted in zip(*results, strict=True):
        assert found.prompt_routed_experts is not None
        assert np.array_equal(found.prompt_routed_experts, wanted.prompt_routed_experts)
        pair = found.outputs[0].routed_experts, wanted.outputs[0].routed_experts
        assert pair[0] is not None and np.array_equal(*pair)


def pids(llm: LLM) -> list[int]:
    executor = llm._engine.executor
    assert isinstance(executor, ranks.Ranks)
    return [worker.process.pid for worker in executor.workers.states()]


def is_there(pid: int) -> bool:
    """Whether a process exists, be it a zombie."""
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes workers run a function of faults.py."""

    def use(function: Any) -> None:
        monkeypatch.syspath_prepend(ROOT)
        monkeypatch.setattr(ranks, "run_worker", function)

    return use


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[int]]:
    return tokens(open_llm(path, 1))


@pytest.fixture
def two(path: Path) -> Iterator[LLM]:
    llm = open_llm(path)
    yield llm
    workers = pids(llm)
    del llm
    gc.collect()
    assert not any(map(is_there, workers))


def test_two_ranks_give_the_tokens_and_scores_of_one_and_leave_nothing(
    path: Path, alone: list[list[int]], fault: Callable[[Any], None]
) -> None:
    """Though one rank is slow and its clocks are wrong."""
    fault(faults.wrong_clock)
    llm = open_llm(path, enable_return_routed_experts=True)
    (worker,) = pids(llm)
    assert tokens(llm) == alone
    texts = [([0], PROMPTS[1]), (PROMPTS[0], PROMPTS[2])]
    other = open_llm(path, 1, enable_return_routed_experts=True)
    for wanted, found in zip(score(other, texts), score(llm, texts), strict=True):
        assert abs(found - wanted).max() < 1e-4
    assert_equal_prompt_logprobs(llm, other)
    assert_equal_routed_experts(llm, other)
    assert set(llm._engine.metrics().late_compilations.values()) <= {0}
    del llm
    gc.collect()
    assert not is_there(worker)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_a_signal_ends_or_stops(two: LLM, number: signal.Signals) -> None:
    """Every request gets the error, and the worker is gone, though it was stopped."""
    requests = [two._engine.add_request(str(i), p, GREEDY) for i, p in enumerate(PROMPTS)]
    two._engine.step()
    (worker,) = pids(two)
    os.kill(worker, number)
    wanted = "killed by signal 9" if number == signal.SIGKILL else "stopped by a signal"
    with pytest.raises(EngineDeadError, match=rf"rank 1 \(cpu\) was {wanted}"):
        while True:
            two._engine.step()
    assert all(r.finished and "rank 1 (cpu)" in (r.error or "") for r in requests)
    with pytest.raises(EngineDeadError, match="rank 1"):
        two.generate([1, 2])
    wait_for(lambda: not is_there(worker))


def test_a_signal_is_pending_until_a_process_handles_it() -> None:
    """Stacks are written only then: on a busy host, a process may not run for a while."""
    code = (
        "import signal, sys; "
        "signal.signal(signal.SIGUSR1, lambda *_: print('handled', flush=True)); "
        "print('ready', flush=True); sys.stdin.read()"  # until the test closes it
    )
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGSTOP)
        while not workers.is_stopped(process.pid):
            time.sleep(0.01)
        process.send_signal(signal.SIGUSR1)
        assert workers.is_pending(process.pid, signal.SIGUSR1)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "handled\n"
        assert not workers.is_pending(process.pid, signal.SIGUSR1)
    assert not workers.is_pending(process.pid, signal.SIGUSR1)


def test_a_silent_rank_says_where_it_is(
    path: Path,
    tmp_path: Path,
    fault: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "SILENT_S", 1.0)
    monkeypatch.setenv("STACKS", str(tmp_path / "stacks"))
    fault(faults.keeps_the_lock)
    llm = open_llm(path)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(cpu\) has not answered for 1 s"):
        llm.generate(PROMPTS, GREEDY)
    assert "in _keep_the_lock" in (tmp_path / "stacks").read_text()
    wait_for(lambda: not any(map(is_there, pids(llm))))


def test_a_rank_without_memory_for_a_step(path: Path, fault: Callable[[Any], None]) -> None:
    fault(faults.no_memory_in_a_step)
    llm = open_llm(path)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(cpu\): MemoryError: no memory for the"):
        llm.generate(PROMPTS, GREEDY)
    wait_for(lambda: not any(map(is_there, pids(llm))))


def test_an_error_on_rank_0_ends_the_others(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing waits for a close that is slow."""
    executor = two._engine.executor
    assert isinstance(executor, ranks.Ranks)
    closed, release = threading.Event(), threading.Event()

    def failing(plan: object) -> None:
        raise ValueError("rank 0 has a fault")

    def slow() -> None:
        release.wait(60)
        closed.set()

    monkeypatch.setattr(executor.local, "execute", failing)
    monkeypatch.setattr(executor.local, "close", slow)
    monkeypatch.setattr(ranks, "FAILED_CLOSE_S", 0.1)
    with pytest.raises(EngineDeadError, match=r"rank 0 \(cpu\): ValueError: rank 0 has a fault"):
        two.generate([1, 2], GREEDY)
    wait_for(lambda: not any(map(is_there, pids(two))))
    executor.close()
    assert not closed.is_set()
    release.set()


def test_a_collective_of_rank_0_that_gives_up_ends_the_others(
    two: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = two._engine.executor
    assert isinstance(executor, ranks.Ranks)

    def lost() -> None:
        raise EngineDeadError("rank 0 timed out waiting for rank 1")

    monkeypatch.setattr(executor.local, "check", lost)
    with pytest.raises(EngineDeadError, match="rank 0 timed out waiting for rank 1"):
        two.generate([1, 2], GREEDY)
    wait_for(lambda: not any(map(is_there, pids(two))))


def test_a_slow_close_is_waited_for(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = two._engine.executor
    assert isinstance(executor, ranks.Ranks)
    closed = threading.Event()

    def slow() -> None:
        time.sleep(1)
        closed.set()

    monkeypatch.setattr(executor.local, "close", slow)
    monkeypatch.setattr(ranks, "FAILED_CLOSE_S", 0.1)
    executor.close()
    assert closed.is_set()


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (faults.no_memory, ResourceError, r"^rank 1 \(cpu\): the model does not fit cpu: cannot"),
        (faults.not_connecting, FinwhaleError, r"^rank 1 \(cpu\) has not connected for 1 s: rank"),
    ],
)
def test_a_rank_that_cannot_start(
    path: Path,
    fault: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    function: Any,
    kind: type[Exception],
    message: str,
) -> None:
    check = workers.Workers._check_heartbeat

    def impatient(watching: workers.Workers, worker: Any, spent: float) -> None:
        """A process may take long to begin, and then has 1 s to connect."""
        connects = worker.phase == CONNECTING and function is faults.not_connecting
        monkeypatch.setattr(workers, "CONNECT_S", 1.0 if connects else 120.0)
        check(watching, worker, spent)

    monkeypatch.setattr(workers.Workers, "_check_heartbeat", impatient)
    fault(function)
    with pytest.raises(kind, match=message) as caught:
        open_llm(path)
    assert type(caught.value) is kind


def test_the_rank_that_failed_tells_the_cause(
    four_path: Path, fault: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although all other ranks, in this process and in others, stop before it."""

    def load(start: Any) -> None:
        raise OtherRankError("rank 2: cannot allocate memory")

    monkeypatch.setattr(startup._Start, "_load", load)
    monkeypatch.setattr(ranks, "CAUSE_S", 120.0)
    fault(faults.no_memory_told_last)
    with pytest.raises(ResourceError, match=r"^rank 2 \(cpu\): the model does not fit cpu: cannot"):
        open_llm(four_path, 4)


def test_the_rank_that_was_killed_is_named(four_path: Path, fault: Callable[[Any], None]) -> None:
    """Although another rank has noticed it first, in a step."""
    fault(faults.killed_told_last)
    llm = open_llm(four_path, 4)
    with pytest.raises(EngineDeadError, match=r"rank 2 \(cpu\) was killed by signal 9"):
        llm.generate(PROMPTS, GREEDY)
    wait_for(lambda: not any(map(is_there, pids(llm))))


def test_an_interrupt_waits_for_the_step_so_that_the_ranks_live_on(
    path: Path, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    two = open_llm(path)
    executor = two._engine.executor
    assert isinstance(executor, ranks.Ranks)
    send, before = executor.workers.send, signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(message: bytes) -> None:
        signal.raise_signal(signal.SIGINT)
        send(message)

    with monkeypatch.context() as patch:
        patch.setattr(executor.workers, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            two.generate([5, 6], GREEDY)
    signal.signal(signal.SIGINT, before)
    assert tokens(two) == alone
    two.close()


SCRIPT = """
import signal, sys, threading
from finwhale import LLM, SamplingParams
# A shell's background jobs ignore interrupts, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
llm = LLM(sys.argv[1], device="cpu", activations="exact", tensor_parallel_size=2)
print(*(w.process.pid for w in llm._engine.executor.workers.states()), flush=True)
if sys.argv[2] == "hang":
    llm._engine.executor.local.execute = lambda plan: threading.Event().wait()
llm.generate([1, 2], SamplingParams(max_tokens=400, ignore_eos=True))
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["kill", "interrupt", "hang"])
def test_the_end_of_the_engine_s_process_ends_the_ranks(path: Path, how: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    if how == "kill":
        process.kill()
    elif how == "interrupt":
        process.send_signal(signal.SIGINT)
    elif how == "hang":
        # As a GPU does that waits for the other rank: only another thread can end the process.
        os.kill(worker, signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    wait_for(lambda: not is_there(worker))
    assert process.returncode == {"kill": -9, "interrupt": -2, "hang": 1}[how]
    assert "leaked" not in errors
    if how == "hang":
        assert "rank 1 (cpu) was killed by signal 9" in errors
