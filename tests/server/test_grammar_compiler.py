"""The engine's compiler of grammars: once for each user, in turns, within a budget of memory."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from finwhale.chat.grammar import Matcher, regex_guide
from finwhale.chat.tokenizer import Tokenizer
from finwhale.demo import DEMO_PATH
from finwhale.errors import QueueFullError
from finwhale.request import SamplingParams
from finwhale.server.link import grammar_compiler
from finwhale.server.link.grammar_compiler import GrammarCompiler
from finwhale.server.link.wire import Add

MIB = 1 << 20


class Counted(Matcher):
    """A matcher that waits for the test, and notes what was compiled."""

    made: list[str]
    go: threading.Event

    def __init__(self, *args: Any) -> None:
        assert self.go.wait(60)
        super().__init__(*args)
        self.made.append(args[1].grammar)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarCompiler]:
    Counted.made, Counted.go = [], threading.Event()
    monkeypatch.setattr(grammar_compiler, "Matcher", Counted)
    monkeypatch.setattr(grammar_compiler, "BUDGET_BYTES", 100 * MIB)
    made = GrammarCompiler(Tokenizer.open(DEMO_PATH))
    yield made
    made.close()


def add(name: str, regex: str, user: str = "", mib: int = 1) -> Add:
    params = SamplingParams(guide=regex_guide(regex))
    return Add(name, [1], params, user=user, grammar_bytes=mib * MIB)


def results(compiler: GrammarCompiler, *commands: Add) -> list[Any]:
    """What becomes of the commands, in the order in which it is known."""
    for command in commands:
        compiler.submit(command)
    Counted.go.set()
    found: list[Any] = []
    while len(found) < len(commands):
        assert compiler.done.poll(60)
        found += compiler.take()
    return found


def test_a_grammar_is_compiled_once(compiler: GrammarCompiler) -> None:
    """128 prompts of one request have one compilation, and each its own state."""
    found = results(compiler, *(add(f"r{i}", "ab|ba", "a") for i in range(128)))
    assert len(Counted.made) == 1
    assert [seconds is None for _, _, seconds in found] == [False] + [True] * 127
    assert len(results(compiler, add("b", "ab|ba", "b"))) == 1
    assert len(Counted.made) == 2, "users share nothing"
    first, second = found[0][1], found[1][1]
    words, others = np.zeros((2, 128), np.int32)
    first.allow(words)
    first.accept(int(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0]))
    second.allow(others)
    assert (words == others).all()
    first.allow(words)
    assert (words != others).any()


def test_users_take_turns(compiler: GrammarCompiler) -> None:
    flood = [add(f"r{i}", f"a{{{i}}}b", "flood") for i in range(1, 30)]
    found = results(compiler, *flood, add("other", "x", "other"))
    order = [command.request_id for command, _, _ in found]
    assert order.index("other") <= 2


def test_a_budget_of_memory(compiler: GrammarCompiler) -> None:
    """A user's running requests get half, and a grammar that is not in use makes room."""
    found = results(compiler, *(add(f"r{i}", f"a{i}", "a", 30) for i in range(4)))
    assert all(isinstance(result, Matcher) for _, result, _ in found[:2])
    assert [type(result) for _, result, _ in found[2:]] == [QueueFullError] * 2
    assert isinstance(results(compiler, add("o", "x", "other", 30))[0][1], Matcher)
    del found
    again = results(compiler, add("again", "a9", "a", 30))
    assert isinstance(again[0][1], Matcher)
