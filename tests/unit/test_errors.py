"""The line that stands for an error of another library."""

import pickle

import pytest

from finwhale.chat.grammar_limits import GrammarError
from finwhale.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("out of memory\nat line 7"), "out of memory"),
        (RuntimeError("\n  no route \n"), "no route"),
        (MemoryError(), "MemoryError"),
        (OSError(" \n "), "OSError"),
    ],
)
def test_first_line(error: BaseException, line: str) -> None:
    assert first_line(error) == line


def test_an_error_of_a_grammar_can_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(GrammarError("size", "too long")))
    assert (error.reason, str(error)) == ("size", "too long")
