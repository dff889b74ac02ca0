"""API keys: the lines of a key file, and limits of what a key may use."""

import time
from argparse import Namespace
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from finwhale.cli.serve import _api_keys
from finwhale.errors import FinwhaleError
from finwhale.server.api import gate
from finwhale.server.errors import TRY_AGAIN, ApiError
from finwhale.server.keys import Keys, parse_keys


def test_lines() -> None:
    found = parse_keys(
        [
            "plain-key-1",
            "ann:secret-of-ann concurrent=4 tokens_per_minute=100000 priority=no",
            "ann:ann-s-next-key priority=no tokens_per_minute=100000 concurrent=4",
            "plain-key-2  concurrent=1",
            "plain-key-1",
        ]
    )
    assert [key.name for key in found] == ["key-1", "ann", "ann", "key-4"]
    assert [key.concurrent for key in found] == [None, 4, 4, 1]
    assert (found[1].tokens_per_minute, found[1].priority) == (100000, False)
    assert found[0].priority and found[0].tokens_per_minute is None
    # Keys of one name share limits and prefixes.
    assert found[1].identity == found[2].identity and found[1].use is found[2].use
    assert len({key.identity for key in found}) == 3
    assert "secret" not in repr(found)


def test_an_indented_comment_in_a_file_is_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# Keys\n  ann:secret-of-ann \n\n  #bob:old-key-of-bob\n\t# disabled-key\n")
    args = Namespace(api_key=None, api_keys=[str(file)])
    assert _api_keys(args, {}) == ("ann:secret-of-ann",)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["short"], "at least 8"),
        (["ann:short"], "API key ann: a key must be at least 8"),
        (["schlüssel-schlüssel"], "ASCII"),
        ([":long-enough-key"], "a name has up to 64"),
        (["bad/name:long-enough-key"], "a name has up to 64"),
        (["long-enough-key burst=3"], "concurrent=N, tokens_per_minute=N"),
        (["long-enough-key concurrent=0"], "concurrent=N"),
        (["long-enough-key concurrent=-1"], "concurrent=N"),
        (["long-enough-key priority=maybe"], "priority=yes"),
        (["ann:long-enough-key", "bob:long-enough-key"], "another line has the same key"),
        (["ann:long-enough-key", "ann:other-long-key concurrent=2"], "must have the same limits"),
    ],
)
def test_a_wrong_line_is_one_error_without_the_key(lines: list[str], message: str) -> None:
    with pytest.raises(FinwhaleError, match=message) as caught:
        parse_keys(lines)
    assert "long-enough" not in str(caught.value) and "schl" not in str(caught.value)


def test_find() -> None:
    keys = Keys(["ann:secret-of-ann", "other-secret"])
    ann, other = keys.find("secret-of-ann"), keys.find("other-secret")
    assert ann is not None and ann.name == "ann" and other is not None and other.name == "key-2"
    for wrong in ("", "ann", "secret-of-an", "ann:secret-of-ann", "other-secret "):
        assert keys.find(wrong) is None
    assert keys and not Keys([])


def test_the_name_of_the_scheme_may_have_any_case() -> None:
    """RFC 9110, section 11.1."""
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = Headers({"authorization": f"{scheme} secret-of-ann"})
        assert gate._given_key(headers) == "secret-of-ann"
    basic = Headers({"authorization": "Basic abc", "x-api-key": "secret-of-bob"})
    assert gate._given_key(basic) == "secret-of-bob"


def test_concurrent_requests() -> None:
    keys = Keys(["ann:secret-of-ann concurrent=1", "bob:secret-of-bob"])
    ann, bob = keys.find("secret-of-ann"), keys.find("secret-of-bob")
    assert ann is not None and bob is not None
    with ann.request():
        with pytest.raises(ApiError, match="1 requests at once") as caught, ann.request():
            pass
        assert caught.value.status == 429 and caught.value.code in TRY_AGAIN
        with bob.request(), bob.request():
            pass
        # Running requests still count after the keys are read again.
        keys.replace(["ann:another-key-of-ann concurrent=1"])
        again = keys.find("another-key-of-ann")
        assert again is not None and keys.find("secret-of-ann") is None
        with pytest.raises(ApiError), again.request():
            pass
    with again.request():
        pass


def test_tokens_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    key = Keys(["ann:secret-of-ann tokens_per_minute=60"]).find("secret-of-ann")
    assert key is not None
    key.check(None)
    key.use.tokens -= 50
    key.check(None)
    key.use.tokens -= 20
    with pytest.raises(ApiError, match="60 tokens a minute") as caught:
        key.check(None)
    assert caught.value.status == 429 and caught.value.retry_after_s == 11
    now += 10.5
    with pytest.raises(ApiError):
        key.check(None)
    now += 1
    key.check(None)
    assert key.use.tokens == pytest.approx(-10 + 10.5 + 1)  # no second counts twice
    now += 1000
    key.check(None)
    assert key.use.tokens == 60


def test_priority() -> None:
    key = Keys(["ann:secret-of-ann priority=no"]).find("secret-of-ann")
    assert key is not None
    key.check(None)
    key.check(0)
    for priority in (-1, 1):
        with pytest.raises(ApiError) as caught:
            key.check(priority)
        assert (caught.value.status, caught.value.param) == (403, "priority")
