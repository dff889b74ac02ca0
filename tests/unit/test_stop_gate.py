"""A chat answer's tokens, withheld until no stop string can begin in them."""

import codecs
import random

import pytest

from finwhale.chat.stop_gate import StopGate
from finwhale.chat.stop_strings import StopChecker
from finwhale.chat.tokenizer import Tokenizer

END, CALL = 100, 101
# Pieces of "é" (C3 A9) and of a smiley are tokens of their own.
NEWLINE, PAIR = 10, 11
PIECES = [b"a", b"b", b"ab", b"ba ", b"", b"\xc3", b"\xa9", b"\xc3\xa9a", b"\xf0\x9f", b"\x98\x80b"]
PIECES += [b"\n", b"\n\n"]


class Pieces(Tokenizer):
    def __init__(self) -> None:
        pass

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]


def run(ids: list[int], stop: list[str], min_tokens: int, keep: bool) -> tuple[str, bool]:
    """The answer's text, and whether a stop string has ended it."""
    gate = StopGate(
        Pieces(), stop, end_of_thinking=None, markup={CALL}, min_tokens=min_tokens, keep=keep
    )
    withheld, out = [], b""
    for token_id in ids:
        withheld.append(token_id)
        released, end = gate.feed(token_id)
        assert released <= len(withheld)
        out += b"".join(PIECES[i] for i in withheld[:released])
        del withheld[:released]
        if end is not None:
            return out.decode(errors="replace") + end, True
    assert gate.release() == len(withheld)
    return (out + b"".join(PIECES[i] for i in withheld)).decode(errors="replace"), False


def test_random_tokens_give_the_text_of_the_checker() -> None:
    draw = random.Random(3)
    ended = 0
    for _ in range(3000):
        ids = [draw.choice((0, 1, 2, 3, 4, 7)) for _ in range(draw.randint(1, 12))]
        if draw.random() < 0.5:
            ids += [5, 6, 8, 9]
        stop = ["".join(draw.choice("ab é😀") for _ in range(draw.randint(1, 4))) for _ in range(2)]
        keep, min_tokens = draw.random() < 0.5, draw.choice((0, 0, 3))
        checker = StopChecker(stop, keep=keep)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        texts = [decoder.decode(PIECES[i]) for i in ids]
        text = "".join(texts[:min_tokens]) + checker.feed("".join(texts[min_tokens:]))
        if checker.matched is None:
            text += checker.flush() + decoder.decode(b"", final=True)
        assert run(ids, stop, min_tokens, keep) == (text, checker.matched is not None)
        ended += checker.matched is not None
    assert 500 < ended < 2900


def test_reasoning_and_tool_calls_have_no_stop_strings() -> None:
    gate = StopGate(Pieces(), ["ab"], end_of_thinking=END, markup={CALL}, min_tokens=0, keep=False)
    assert [gate.feed(i) for i in (2, END, 0, CALL, 2)] == [
        (1, None),
        (1, None),
        (0, None),
        (2, None),
        (1, None),
    ]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("newlines", [[PAIR], [NEWLINE, NEWLINE], [PAIR, PAIR]])
def test_no_stop_string_ends_in_the_newlines_before_a_tool_call(
    newlines: list[int], keep: bool
) -> None:
    """As with deepseek-recipe's own stop strings."""

    def ends(stop: str, *ids: int) -> list[str | None]:
        """What each token says about the end of the answer."""
        gate = StopGate(
            Pieces(),
            [stop],
            end_of_thinking=None,
            markup={CALL},
            min_tokens=0,
            keep=keep,
            has_tools=True,
        )
        released, found = 0, []
        for token_id in ids:
            count, end = gate.feed(token_id)
            released += count
            found.append(end)
        assert any(end is not None for end in found) or released + gate.release() == len(ids)
        return found

    for stop in ("\n\n", "\n\na"):
        assert set(ends(stop, *newlines, 0, CALL, 1)) == {None}
    # Other newlines are text.
    assert ends("\n\n", *newlines, 0, PAIR)[-1] is not None
    assert ends("\n", *newlines)[0] is not None
