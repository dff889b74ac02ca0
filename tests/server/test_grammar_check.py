"""The trials of grammars: what they refuse and why, their queue, and their processes' ends."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from finwhale.chat.grammar import json_guide, lark_guide, regex_guide, tool_guide
from finwhale.chat.grammar_limits import GrammarError
from finwhale.demo import DEMO_PATH
from finwhale.errors import QueueFullError
from finwhale.request import Guide
from finwhale.server.grammars import check
from finwhale.server.grammars.check import GrammarChecker

from .hostile import TOO_EXPENSIVE, chained_definitions, chained_rules, expensive_schema


class Counts:
    def __init__(self) -> None:
        self.results: list[str] = []
        self.trials: list[float] = []
        self.grammar_trial = self.trials.append

    def grammar(self, result: str) -> None:
        self.results.append(result)


def with_checker(work: Callable[[GrammarChecker, Counts], Awaitable[None]]) -> None:
    """Runs `work` with a checker whose process has read the tokenizer, and closes it."""

    async def run() -> None:
        counts = Counts()
        checker = GrammarChecker(DEMO_PATH, counts)  # type: ignore[arg-type]
        await checker.check(regex_guide("ready"))
        counts.__init__()  # type: ignore[misc]
        try:
            await work(checker, counts)
        finally:
            await checker.close()

    asyncio.run(run())


def pid_of(checker: GrammarChecker) -> int:
    assert checker._process is not None
    return checker._process.pid


def trials_of(checker: GrammarChecker) -> list[int]:
    """The process ids of the trials that run: children of children."""
    return [i for child in children(pid_of(checker)) for i in children(child)]


def children(pid: int) -> list[int]:
    try:
        return [int(i) for i in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []  # it has ended


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def resident_mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20


def unchecked_json(schema: Any) -> Guide:
    """What `json_guide` would refuse for its size."""
    return tool_guide(f"start: %json {json.dumps(schema)}")


def many_alternatives(count: int) -> str:
    """A grammar that must follow all of its rules at once after the first character."""
    rules = [f'rule_{i}: "b" "c"' for i in range(count)]
    start = " | ".join(f'"a" rule_{i}' for i in range(count))
    return "\n".join([f"start: {start}", *rules])


REFUSED = {
    "definitions": (unchecked_json(chained_definitions(1000)), "crash", "nested too deeply"),
    "rules": (tool_guide(chained_rules(6000)), "crash", "nested too deeply"),
    "expense": (json_guide(expensive_schema(0)), "time", TOO_EXPENSIVE),
    "memory": (tool_guide('start: "a"' + ' | "a"' * 150_000), "memory", "more than 128 MiB"),
    "not valid": (lark_guide("start: missing"), "invalid", "unknown name"),
    "no output": (tool_guide("start: A\nA: /a/ & /b/"), "invalid", "no output matches it"),
    "masks": (tool_guide(many_alternatives(2500)), "masks", "the grammar (failed|is too slow)"),
}


def test_each_refusal_has_its_reason_and_leaves_nothing_behind() -> None:
    async def work(checker: GrammarChecker, counts: Counts) -> None:
        pid, before = pid_of(checker), resident_mib(pid_of(checker))
        for name, (guide, reason, message) in REFUSED.items():
            with pytest.raises(GrammarError, match=message) as caught:
                await checker.check(guide)
            wanted = ("time", "memory") if name == "expense" else (reason,)
            assert caught.value.reason in wanted, name
            assert "\n" not in str(caught.value)
        assert len(counts.trials) == len(REFUSED) and counts.results == []
        await checker.check(json_guide(chained_definitions(400)))
        await checker.check(regex_guide("(a{1,1000}){1,1000}"))
        assert counts.results == ["passed"] * 2
        assert pid_of(checker) == pid and trials_of(checker) == []
        assert resident_mib(pid) < before + 16

    with_checker(work)


def test_a_grammar_is_tried_once() -> None:
    async def work(checker: GrammarChecker, counts: Counts) -> None:
        good, bad = regex_guide("a"), regex_guide("(")
        await checker.check(good)
        await checker.check(Guide(grammar=good.grammar, after=3))
        for _ in range(2):
            with pytest.raises(GrammarError, match="not valid"):
                await checker.check(bad)
        assert counts.results == ["passed", "known"] and len(counts.trials) == 2

    with_checker(work)


def test_the_queue_is_bounded_and_who_leaves_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "NUM_TRIALS", 1)
    monkeypatch.setattr(check, "MAX_WAITING", 1)

    async def work(checker: GrammarChecker, counts: Counts) -> None:
        running, waiting = (
            asyncio.ensure_future(checker.check(json_guide(expensive_schema(i)), user))
            for i, user in enumerate(("ann", "bob"))
        )
        await until(lambda: len(trials_of(checker)) == 1)
        (first,) = trials_of(checker)
        os.kill(first, signal.SIGSTOP)  # it never ends by itself
        with pytest.raises(QueueFullError, match="the server is full: 2 of 2 new grammars"):
            await checker.check(regex_guide("b"))
        assert counts.results == ["full"]
        running.cancel()
        # The trial is killed, and the next one begins.
        await until(lambda: trials_of(checker) not in ([], [first]))
        assert not waiting.done()
        late = asyncio.ensure_future(checker.check(regex_guide("b")))
        await asyncio.sleep(0)
        waiting.cancel()
        await late
        await until(lambda: trials_of(checker) == [])
        assert counts.results == ["full", "passed"] and len(counts.trials) == 1
        assert running.cancelled() and waiting.cancelled()

    with_checker(work)


def test_another_process_follows_one_that_died() -> None:
    async def work(checker: GrammarChecker, counts: Counts) -> None:
        pid = pid_of(checker)
        checking = asyncio.ensure_future(checker.check(json_guide(expensive_schema(0))))
        await until(lambda: len(trials_of(checker)) == 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GrammarError, match=TOO_EXPENSIVE):
            await checking  # its trial goes on
        await until(
            lambda: checker._process is not None and checker._process.returncode is not None
        )
        await checker.check(regex_guide("b"))
        assert counts.results == ["passed"] and pid_of(checker) != pid

    with_checker(work)


def test_its_process_ends_with_its_input() -> None:
    async def work(checker: GrammarChecker, counts: Counts) -> None:
        checking = asyncio.ensure_future(checker.check(json_guide(expensive_schema(0))))
        await until(lambda: len(trials_of(checker)) == 1)
        (trial,), pid = trials_of(checker), pid_of(checker)
        checking.cancel()
        await checker.close()
        await until(lambda: not any(Path(f"/proc/{ended}").exists() for ended in (trial, pid)))

    with_checker(work)


def test_no_user_shuts_out_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One user gets half the room, and a newcomer's grammar is the next to be tried."""
    monkeypatch.setattr(check, "NUM_TRIALS", 1)
    monkeypatch.setattr(check, "MAX_WAITING", 39)

    async def work(checker: GrammarChecker, counts: Counts) -> None:
        schemas = [json_guide({"const": i}) for i in range(22)]
        flood = [asyncio.ensure_future(checker.check(one, "flood")) for one in schemas]
        await asyncio.sleep(0)
        for name in ("a", "b"):
            await checker.check(regex_guide(name), name)
            # Two of the flood may come before: the one that runs, and the next.
            assert counts.results.count("passed") <= (3 if name == "a" else 6)
        results = await asyncio.gather(*flood, return_exceptions=True)
        assert [type(one) for one in results] == [type(None)] * 20 + [QueueFullError] * 2
        assert counts.results.count("passed") == 22 and checker._shares.total == 0

    with_checker(work)


def test_a_verdict_says_nothing_to_other_users() -> None:
    async def work(checker: GrammarChecker, counts: Counts) -> None:
        for user in ("a", "b", "a", "b"):
            await checker.check(regex_guide("x"), user)
        assert counts.results == ["passed", "passed", "known", "known"]
        assert len(counts.trials) == 2
        assert checker.bytes_of(regex_guide("x"), "a") > 0 == checker.bytes_of(regex_guide("x"))

    with_checker(work)
