"""API keys: their names and their limits.

A line of a key file is KEY, or NAME:KEY, and limits, for example:

    ann:9f0c7d6a5b4e concurrent=4 tokens_per_minute=100000 priority=no

Several keys may have one name, for example while a key is replaced by another. They share limits
and cached prefixes.
"""

import hashlib
import hmac
import math
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from finwhale.errors import FinwhaleError
from finwhale.server.errors import ApiError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_COUNT = re.compile("[1-9][0-9]{0,11}")
_MIN_KEY = 8


class Use:
    """The current use of all keys with one name.

    Attributes:
        in_flight: number of requests.
        tokens: tokens that the name may still use; it grows to tokens_per_minute within a minute,
            and is negative after a request that took more.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.tokens = math.inf
        self._seen = time.monotonic()

    def refill(self, per_minute: int) -> None:
        now = time.monotonic()
        self.tokens = min(per_minute, self.tokens + (now - self._seen) * per_minute / 60)
        self._seen = now


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One API key.

    Attributes:
        name: its name in the log.
        digest: a hash of the key.
        identity: equal for keys that share limits and cached prefixes.
        concurrent: maximum number of requests at once; None: no limit.
        tokens_per_minute: maximum number of tokens of prompts and outputs; None: no limit.
        priority: whether its requests may set `priority`.
    """

    name: str = field(compare=False)
    digest: bytes
    identity: str
    concurrent: int | None = None
    tokens_per_minute: int | None = None
    priority: bool = True
    use: Use = field(default_factory=Use, compare=False)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request. Raises ApiError (429) if the key has too many."""
        use = self.use
        if self.concurrent is not None and use.in_flight >= self.concurrent:
            message = f"the API key may have {self.concurrent} requests at once; try again"
            raise ApiError(429, message, code="key_concurrency")
        use.in_flight += 1
        try:
            yield
        finally:
            use.in_flight -= 1

    def check(self, priority: int | None) -> None:
        """Checks a request before it runs. Raises ApiError (403, 429)."""
        if priority and not self.priority:
            message = "the API key may not set priority"
            raise ApiError(403, message, code="priority_not_allowed", param="priority")
        if self.tokens_per_minute is None:
            return
        self.use.refill(self.tokens_per_minute)
        if self.use.tokens < 1:
            wait_s = math.ceil((1 - self.use.tokens) * 60 / self.tokens_per_minute)
            allowed = f"the API key may use {self.tokens_per_minute} tokens a minute"
            message = f"{allowed}; try again in {wait_s} s"
            raise ApiError(429, message, code="key_tokens", retry_after_s=wait_s)


class Keys:
    """The keys that the server accepts now; empty: requests need none."""

    def __init__(self, lines: Sequence[str]) -> None:
        """Raises FinwhaleError."""
        self._keys: list[ApiKey] = []
        self.replace(lines)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def replace(self, lines: Sequence[str]) -> None:
        """Accepts only these keys from now on. Running requests go on and count for their names.
        Raises FinwhaleError: a line is wrong; the keys stay as they are."""
        uses = {key.identity: key.use for key in self._keys}
        self._keys = parse_keys(lines, uses)

    def find(self, given: str) -> ApiKey | None:
        digest = _digest(given)
        # Compare every key, each in constant time, so that the time reveals nothing.
        found = [hmac.compare_digest(digest, key.digest) for key in self._keys]
        return self._keys[found.index(True)] if any(found) else None


def parse_keys(lines: Sequence[str], uses: dict[str, Use] | None = None) -> list[ApiKey]:
    """The keys that lines of key files describe.

    Args:
        uses: the current use of each identity.

    Raises:
        FinwhaleError: a line is wrong. The error does not contain the line, which is a secret.
    """
    uses = dict(uses or {})
    keys: dict[bytes, ApiKey] = {}
    for number, line in enumerate((line for line in lines if line.strip()), 1):
        first, *limits = line.split()
        name, colon, secret = first.partition(":")
        if not colon:
            name, secret = f"key-{number}", first
        what = f"API key {name}" if colon and _NAME.fullmatch(name) else f"API key {number}"
        if not _NAME.fullmatch(name):
            raise FinwhaleError(
                f"{what}: a name has up to 64 letters, digits, dots, dashes and underscores"
            )
        if len(secret) < _MIN_KEY or not secret.isascii():
            raise FinwhaleError(f"{what}: a key must be at least {_MIN_KEY} ASCII characters")
        digest = _digest(secret)
        identity = f"name:{name}" if colon else f"key:{digest.hex()}"
        use = uses.setdefault(identity, Use())
        key = ApiKey(name, digest, identity, **_limits(limits, what), use=use)
        if keys.setdefault(digest, key) != key:
            raise FinwhaleError(f"{what}: another line has the same key")
        same = next(other for other in keys.values() if other.identity == identity)
        if replace(same, digest=digest) != key:
            raise FinwhaleError(f"{what}: all keys of one name must have the same limits")
    return list(keys.values())


def _limits(words: Sequence[str], what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name == "priority" and value in ("yes", "no"):
            found[name] = value == "yes"
        elif name in ("concurrent", "tokens_per_minute") and _COUNT.fullmatch(value):
            found[name] = int(value)
        else:
            raise FinwhaleError(
                f"{what}: after the key may come concurrent=N, tokens_per_minute=N, "
                "priority=yes and priority=no"
            )
    return found


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
