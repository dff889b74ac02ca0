"""The progress bar of a model that loads, beside the log of another process."""

import io
import logging
import re
import time

import pytest

from finwhale.progress_bars import loading_bar
from finwhale.server.observe.logs import TextFormatter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(written: str) -> list[str]:
    """The rows of a terminal that has got this text."""
    rows, row, column = [""], 0, 0
    for found in re.finditer(r"\x1b\[(\??\d*)([A-Za-z])|[^\x1b]", written):
        text, number, command = found[0], found[1], found[2]
        if text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif command == "K":
            rows[row] = ""
        elif command == "A":
            row -= int(number or 1)
        elif command is None:
            rows[row] = rows[row].ljust(column)
            rows[row] = rows[row][:column] + text + rows[row][column + 1 :]
            column += 1
    return rows


def test_the_bar_and_the_log_do_not_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    formatter = TextFormatter(terminal=True)

    def log(text: str) -> None:
        record = logging.makeLogRecord({"msg": text, "levelno": logging.INFO})
        terminal.write(formatter.format(record) + "\n")

    def drawn() -> int:
        return len(terminal.getvalue())

    def draw_again() -> None:
        before, end = drawn(), time.monotonic() + 60
        while drawn() == before and time.monotonic() < end:
            time.sleep(0.01)

    with loading_bar() as progress:
        draw_again()
        log("first")
        draw_again()
        assert "starting" in screen(terminal.getvalue())[-1]
        progress(5_000_000, 20_000_000)
        draw_again()
        draw_again()
        assert "5.0/20.0 MB" in screen(terminal.getvalue())[-1]
        log("second")
        progress(20_000_000, 20_000_000)
        draw_again()
    rows = [row for row in screen(terminal.getvalue()) if row]
    assert [row.split(" ", 1)[1] for row in rows] == ["first", "second"]
    assert "?" not in terminal.getvalue().replace("\x1b[?25", "")


def test_no_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    with loading_bar() as progress:
        progress(1, 2)
    assert stderr.getvalue() == ""
    record = logging.makeLogRecord({"msg": "a line", "levelno": logging.INFO})
    assert "\x1b" not in TextFormatter(terminal=False).format(record)
