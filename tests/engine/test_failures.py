"""Steps that hang, engines that die, and the counters that tell of it."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from finwhale import LLM, FinwhaleError, SamplingParams
from finwhale.config import EngineConfig
from finwhale.engine.loop import watchdog
from finwhale.engine.loop.engine import Engine
from finwhale.engine.loop.metrics import BOUNDS, Clock, Meter
from finwhale.engine.loop.watchdog import Watchdog
from finwhale.engine.ranks.ranks import first_rank
from finwhale.errors import EngineDeadError

from .plans import completing

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


# --- Watchdog -------------------------------------------------------------------------------------


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def test_a_step_that_hangs_shows_every_stack_once(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with path.open("w+") as file:
        dogs = [Watchdog(0.2, file)]
        release = threading.Event()

        def hanging_step() -> None:
            with dogs[0]:
                release.wait()

        thread = threading.Thread(target=hanging_step)
        thread.start()
        wait_for(lambda: "hanging_step" in path.read_text())
        assert dogs[0].elapsed >= 0.2
        time.sleep(0.3)
        release.set()
        thread.join()
        written = path.read_text()
        assert written.count("a step has taken 0.2 seconds") == 1
        assert "wait_for" in written or "test_a_step_that_hangs" in written
        assert dogs[0].elapsed == 0
        dogs.clear()
        wait_for(lambda: not any(t.name == "watchdog" for t in threading.enumerate()))


def test_steps_that_are_quick_or_idle_show_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that the test moves. The watchdog's own thread never checks."""
    now, path, quit_ = 1000.0, tmp_path / "stacks", threading.Event()
    clock = SimpleNamespace(monotonic=lambda: now, sleep=lambda _: quit_.wait())
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)
    with path.open("w+") as file:
        dog, reported = Watchdog(10, file), None
        for _ in range(5):
            with dog:
                now += 9
                reported = dog._check(reported, file.fileno())
            now += 100
            reported = dog._check(reported, file.fileno())
        assert path.read_text() == "" and reported is None
        with dog:
            now += 10
            assert dog._check(reported, file.fileno()) == now - 10
        assert "a step has taken 10 seconds" in path.read_text()
        quit_.set()
        del dog
        wait_for(lambda: not any(t.name == "watchdog" for t in threading.enumerate()))
    assert Watchdog(None).elapsed == 0


STANDING_STILL = """
import ctypes, sys
from finwhale.engine.loop import watchdog
watchdog.STANDSTILL_S = 2.0
with watchdog.Watchdog(0.5):
    ctypes.PyDLL(None).sleep(60)  # PyDLL: with the interpreter's lock held
"""


def test_stacks_are_written_when_no_thread_of_python_can_run() -> None:
    command = [sys.executable, "-c", STANDING_STILL]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        line = process.stderr.readline()  # Blocks until the timer fires, or the process has ended.
        process.kill()
    assert line.startswith("Timeout (0:00:03)"), line


def test_the_timer_never_fires_while_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the stacks without the interpreter's lock, which can crash the process."""
    delays: list[float] = []
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, **_: delays.append(seconds)
    )
    dog = Watchdog(0.002)
    wait_for(lambda: bool(delays))
    assert dog.elapsed == 0 and min(delays) >= 30


def test_an_engine_s_step_is_watched(new_llm: Callable[..., LLM], tmp_path: Path) -> None:
    engine = new_llm()._engine
    logits = first_rank(engine.executor).runner.logits
    path = tmp_path / "stacks"
    seen: list[float] = []

    def slow(chunks: Any) -> Any:
        if not seen:
            wait_for(lambda: "slow" in path.read_text())
            seen.append(engine.metrics().step_seconds)
        return logits(chunks)

    first_rank(engine.executor).runner.logits = slow  # type: ignore[assignment,method-assign]
    with path.open("w+") as file:
        engine._watchdog = Watchdog(0.2, file)
        engine.add_request("a", [5, 6], GREEDY)
        while engine.has_work:
            engine.step()
    assert seen[0] >= 0.2 and engine.metrics().step_seconds == 0


@pytest.mark.parametrize("seconds", [0, -1, True, "5"])
def test_a_watchdog_time_that_is_not_a_number_is_refused(seconds: Any) -> None:
    with pytest.raises(FinwhaleError, match=r"watchdog_seconds must be (above 0|a number)"):
        EngineConfig(watchdog_seconds=seconds)


# --- A launch that fails --------------------------------------------------------------------------


def test_the_plan_after_a_failed_launch_frees_the_same_slots(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_path, device="cpu")
    llm.generate([[5, 6, 7], [8, 9]], GREEDY)
    engine, freed = llm._engine, list[list[int]]()
    engine.add_request("next", [5, 6, 7], GREEDY)
    chunks = engine.scheduler.schedule()

    def failing(plan: Any) -> None:
        freed.append(sorted(plan.freed))
        raise torch.AcceleratorError("CUDA error: out of memory")

    monkeypatch.setattr(engine.executor, "execute", failing)
    launcher = engine.lanes[0].launcher
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError):
            launcher.execute(chunks, None)
    assert freed[0] and freed[0] == freed[1]


# --- Death ----------------------------------------------------------------------------------------


def doomed(llm: LLM, monkeypatch: pytest.MonkeyPatch, where: str, ahead: int) -> Engine:
    """An engine whose third step fails, on the device or when its tokens are read."""
    engine = llm._engine
    engine.steps_ahead = ahead
    reader: Any = engine.lanes[0].results._reader
    owner: Any = first_rank(engine.executor).runner if where == "logits" else reader
    real, count = getattr(owner, where), [0]

    def failing(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            raise torch.AcceleratorError("CUDA error: an illegal memory access\nmore lines")
        return real(*args)

    monkeypatch.setattr(owner, where, failing)
    return engine


@pytest.mark.parametrize("where", ["logits", "read"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_dead_engine_fails_every_request(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, ahead: int
) -> None:
    llm = LLM(tiny_path, device="cpu")
    engine = doomed(llm, monkeypatch, where, ahead)
    results = [engine.add_request(str(i), [5, 6, 7 + i], GREEDY) for i in range(2)]
    with pytest.raises(EngineDeadError) as death:
        while engine.has_work:
            engine.step()
    text = str(death.value)
    assert "the engine died (AcceleratorError: CUDA error: an illegal memory access)" in text
    assert "\n" not in text
    for result in results:
        assert result.finished and result.error == text
        assert result.outputs[0].finish_reason == "error"
        assert len(result.outputs[0].token_ids) == 2 - (where == "logits" and ahead)
    assert not engine.has_work
    for use in (
        engine.step,
        lambda: engine.add_request("more", [5], GREEDY),
        lambda: llm.generate("more", GREEDY),
        lambda: next(llm.stream("more", GREEDY)),
    ):
        with pytest.raises(EngineDeadError, match="the engine died"):
            use()
    engine.abort("0")


def test_a_thread_that_waits_for_a_request_gets_the_error(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(tiny_path, device="cpu")
    doomed(llm, monkeypatch, "read", 0)
    ends: list[str] = []

    def generate(number: int) -> None:
        try:
            (result,) = llm.generate([[5, 6, 7 + number]], GREEDY)
            ends.append(str(result.error))
        except EngineDeadError as error:
            ends.append(str(error))

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(ends) == 3 and all("the engine died" in end for end in ends)


# --- Counters -------------------------------------------------------------------------------------


def test_counters(new_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four requests: one ends by length, one by a stop id, one is aborted, one fails."""
    llm = new_llm(max_num_seqs=8)
    engine = llm._engine
    blank = engine.metrics()
    assert (blank.running, blank.waiting, blank.requests, blank.output_tokens) == (0, 0, 0, 0)
    assert all(use.used == 0 and use.total > 0 for use in blank.pages.values())
    logits = first_rank(engine.executor).runner.logits

    def spoilt(plan: Any) -> Any:
        out = logits(plan).clone()
        for row, sequence in enumerate(completing(engine, plan)):
            if sequence.request_id == "fails":
                out[row, 3] = torch.nan
            if sequence.request_id == "stops":
                out[row, 99] = 1000
        return out

    monkeypatch.setattr(first_rank(engine.executor).runner, "logits", spoilt)
    engine.add_request("long", [5, 6, 7], GREEDY)
    stops = SamplingParams(temperature=0, stop_token_ids=[99], n=2)
    engine.add_request("stops", [5, 6], stops)
    engine.add_request("fails", [8, 9], GREEDY)
    engine.add_request("aborted", [4] * 20, GREEDY)
    assert (engine.metrics().waiting, engine.metrics().running) == (5, 0)
    engine.step()
    now = engine.metrics()
    assert (now.waiting, now.running) == (0, 2)
    assert now.pages["window"].used >= 2
    engine.abort("aborted")
    while engine.has_work:
        engine.step()
    done = engine.metrics()
    assert done.endings == {"length": 1, "stop": 2, "error": 1, "abort": 1}
    assert done.requests == 4 and done.running == done.waiting == 0
    assert done.output_tokens == 8 + 2 * 1 + 1
    assert done.prompt_tokens == 3 + 2 * 2 + 2 + 20 and done.cached_tokens == 0
    assert done.steps == 8 and done.preemptions == 0
    assert done.time_to_first_token.count == 4
    assert done.time_between_tokens.count == 7
    assert done.time_per_output_token.count == 1


def test_cached_tokens_are_counted(new_llm: Callable[..., LLM]) -> None:
    llm = new_llm(max_model_len=512)
    prompt = [7 + i % 300 for i in range(400)]
    for _ in range(2):
        llm.generate([prompt], GREEDY)
    done = llm._engine.metrics()
    assert done.prompt_tokens == 800 and 128 <= done.cached_tokens < 400
    assert done.idle_blocks >= 1
    llm._engine.reset_prefix_cache()
    assert llm._engine.metrics().idle_blocks == 0


def test_durations_are_counted_in_their_buckets() -> None:
    meter = Meter()
    one, other = Clock(began=10.0), Clock(began=10.5)
    meter.record_step([one, other], 11.0)
    meter.record_step([one, other], 11.04)
    meter.record_step([one], 11.1)
    first = meter.time_to_first_token
    assert first.count == 2 and first.total == pytest.approx(1.5)
    assert first.counts[BOUNDS.index(0.5)] == 1 and first.counts[BOUNDS.index(1.0)] == 1
    between = meter.time_between_tokens
    assert between.count == 3 and between.counts[BOUNDS.index(0.05)] == 2
    assert between.counts[BOUNDS.index(0.075)] == 1
    meter.record_end("length", one, 3)
    meter.record_end("stop", other, 1)
    mean = meter.time_per_output_token
    assert mean.count == 1 and mean.total == pytest.approx(0.05)


def test_tokens_of_one_verification_share_its_time() -> None:
    meter, clock = Meter(2), Clock(began=10.0)
    for now, count in ((11.0, 2), (11.6, 3), (11.9, 0)):
        clock.tick(now)
        meter.record_tokens(clock, count)
    first, between = meter.time_to_first_token, meter.time_between_tokens
    assert first.count == 1 and first.total == pytest.approx(1.0)
    assert between.count == 1 + 3 and between.total == pytest.approx(0.6)
    assert between.counts[0] == 1 and between.counts[BOUNDS.index(0.25)] == 3
    assert meter.output_tokens == 5
