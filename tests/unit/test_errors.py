"""The line that stands for an error of another library."""

import pytest

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
