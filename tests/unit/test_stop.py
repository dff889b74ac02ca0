"""Stop strings: the result does not depend on how the text is split."""

from hypothesis import example, given
from hypothesis import strategies as st

from finwhale.chat.stop_strings import StopChecker, find_stop


def naive(text: str, stop: list[str]) -> tuple[str, str | None]:
    """Grows the text a character at a time and looks for a stop string at its end."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces: list[str], stop: list[str]) -> tuple[str, str | None]:
    checker = StopChecker(stop)
    out = "".join([checker.feed(piece) for piece in pieces]) + checker.flush()
    keeper = StopChecker(stop, keep=True)
    kept = "".join([keeper.feed(piece) for piece in pieces]) + keeper.flush()
    assert (kept, keeper.matched) == (out + (checker.matched or ""), checker.matched)
    return out, checker.matched


SMALL_TEXT = st.text(alphabet="abé", max_size=8)


@given(
    st.lists(SMALL_TEXT, max_size=8), st.lists(st.text("abé", min_size=1, max_size=5), max_size=4)
)
@example(["aab", "aaab"], ["aaab"])
@example(["abcd"], ["abcd", "bc"])
@example(["xabab", "ac"], ["ababac", "baba"])
def test_any_split_stops_where_the_naive_search_does(pieces: list[str], stop: list[str]) -> None:
    assert run(pieces, stop) == naive("".join(pieces), stop)


@given(SMALL_TEXT, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3))
def test_holds_back_no_more_than_could_be_a_stop_string(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    out = checker.feed(text)
    if checker.matched is None:
        held = text[len(out) :]
        starts = {s[:n] for s in stop for n in range(len(s))}
        assert held in starts
        assert not any(text[i:] in starts for i in range(len(out)))
        assert checker.flush() == held


def test_nothing_comes_after_a_match() -> None:
    checker = StopChecker(["\n\n"])
    assert checker.feed("a\n") == "a"
    assert checker.feed("b\n\nc") == "\nb"
    assert checker.matched == "\n\n"
    assert checker.feed("d") == ""
    assert checker.flush() == ""


def test_no_stop_strings_hold_nothing() -> None:
    checker = StopChecker([])
    assert checker.feed("abc") == "abc"
    assert checker.flush() == "" and checker.matched is None


@given(SMALL_TEXT, st.lists(st.text("abé", min_size=1, max_size=5), max_size=4), st.integers(0, 8))
@example("aaaa", ["aa"], 2)
def test_stop_strings_that_end_before_the_start_are_passed_over(
    text: str, stop: list[str], start: int
) -> None:
    """Also those that overlap with the one that is found."""
    begin, end, found = find_stop(text, stop, start)
    ends = [e for e in range(start + 1, len(text) + 1) if any(text.endswith(s, 0, e) for s in stop)]
    if not ends:
        assert (begin, end, found) == (len(text), len(text), None)
        return
    longest = max((s for s in stop if text.endswith(s, 0, ends[0])), key=len)
    assert (begin, end, found) == (ends[0] - len(longest), ends[0], longest)
