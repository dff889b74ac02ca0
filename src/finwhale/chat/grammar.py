"""Structured output: which tokens may come next, by llguidance."""

import json
from collections.abc import Mapping
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from finwhale.chat.tokenizer import Tokenizer
from finwhale.errors import RequestError
from finwhale.request import Guide

# Between the parts of a JSON text a space, or a line's end and an indent; never white space without
# end, with which a model that is unsure likes to go on.
_JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": r"( |\n {0,16})?"}
MAX_GRAMMAR_CHARS = 1 << 20

Words = NDArray[np.int32]


def json_lark(schema: Mapping[str, Any] | bool) -> str:
    """A JSON Schema as an item of a Lark rule."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def json_guide(schema: Mapping[str, Any], after: int | None = None) -> Guide:
    """Output that is one JSON text of `schema`."""
    return Guide(grammar=f"start: {json_lark(schema)}", after=after)


def regex_guide(regex: str, after: int | None = None) -> Guide:
    """Output that `regex` matches as a whole."""
    return Guide(grammar=llguidance.LLMatcher.grammar_from_regex(regex), after=after)


def lark_guide(grammar: str, after: int | None = None) -> Guide:
    """Output of a context-free grammar in llguidance's dialect of Lark."""
    return Guide(grammar=llguidance.LLMatcher.grammar_from_lark(grammar), after=after)


class Matcher:
    """Where one output stands in its grammar.

    Before `Guide.after` has come, everything is allowed but the end of the output.

    Attributes:
        error: why the grammar cannot be followed any more; None while it can.
    """

    def __init__(self, tokenizer: Tokenizer, guide: Guide) -> None:
        """Raises RequestError: the grammar is not valid, too large or of a kind not supported."""
        if len(guide.grammar) > MAX_GRAMMAR_CHARS:
            raise RequestError(f"a grammar may have {MAX_GRAMMAR_CHARS} characters at most")
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._after = guide.after
        self._matcher = llguidance.LLMatcher(tokenizer.guidance, guide.grammar, log_level=0)
        if self._matcher.is_error():
            raise RequestError(
                f"the grammar is not valid: {_first_line(self._matcher.get_error())}"
            )

    def copy(self) -> "Matcher":
        """A matcher of its own at the same place."""
        other = object.__new__(Matcher)
        other.error, other._tokenizer, other._after = self.error, self._tokenizer, self._after
        other._matcher = self._matcher.deep_copy()
        return other

    def allow(self, words: Words) -> None:
        """Writes which tokens may come next: none where there is an `error`.

        Args:
            words: [ceil(V/32)] int32, contiguous; token i is bit i % 32 of word i // 32. Tokens
                past the tokenizer's vocabulary are not allowed.
        """
        own = -(-self._tokenizer.vocab_size // 32)
        words[own:] = 0
        if self._after is not None:
            words[:own] = self._tokenizer.words_but_end[: len(words)]
            return
        if len(words) >= own:
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * own)
        else:  # a model with fewer tokens than its tokenizer
            words[:] = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(words)]
        if self._matcher.is_error():
            self.error = f"the grammar failed: {_first_line(self._matcher.get_error())}"
            words[:] = 0

    def accept(self, token_id: int) -> None:
        """The output goes on with a token, one that `allow` allowed."""
        if self._after is not None:
            if token_id == self._after:
                self._after = None
        elif not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "unknown"
