"""Structured output: llguidance computes which tokens may come next.

Two limits bound the cost of masks. llguidance gives up on a mask that needs more than `_LIMITS`
allow, after 10 to 20 ms. All masks of a request may take
MASK_BURST_SECONDS of CPU time, and MASK_SECONDS more for each mask. A matcher that exceeds this has
an `error`, which ends its request alone.
"""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from time import thread_time
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from finwhale.chat import grammar_limits
from finwhale.chat.schema_document import SchemaDocument
from finwhale.chat.tokenizer import Tokenizer
from finwhale.request import Guide

# Between the parts of a JSON text, allow a space, or a line break and an indent. An unsure model
# tends to continue unlimited white space.
_JSON_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r"( |\n {0,16})?",
    "coerce_one_of": True,  # `SchemaDocument` names a oneOf that differs from anyOf
}
# A quarter and a fifth of llguidance's defaults. With DeepSeek-V4's vocabulary, a mask that needs
# all of these items takes 10 to 20 ms; a state of the lexer takes 1 to 2 KiB. Less fuel for the
# lexer than the default would refuse ordinary patterns such as `\p{L}{1,100}`.
_LIMITS = llguidance.LLParserLimits(step_max_items=12_000, max_lexer_states=50_000)
# llguidance would look for text that the grammar forces, to allow only its usual tokens. The last
# directive of a grammar counts. Without it, a mask before `a{1000000}` takes 90 ms, not 0.2.
_NO_FORCING = '\n%llguidance {"no_forcing": true}'
MASK_SECONDS = 0.005
MASK_BURST_SECONDS = 0.25

Words = NDArray[np.int32]


def json_lark(schema: Mapping[str, Any]) -> str:
    """A JSON Schema as an item of a Lark rule, such as a part of a `SchemaDocument`. Raises
    GrammarError: the schema exceeds the limits of `chat.grammar_limits`."""
    grammar_limits.check_schema(schema)
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"


def json_guide(schema: Mapping[str, Any]) -> Guide:
    """Output that is one JSON text of `schema`. Raises GrammarError: the schema is too large, or
    has a keyword that cannot be enforced."""
    document = SchemaDocument(schema, "schema")
    part = document.part(schema)
    document.check_strict()
    return Guide(grammar=f"start: {json_lark(part)}")


def regex_guide(regex: str, after: int | None = None) -> Guide:
    """Restrict output to texts that `regex` matches as a whole. Raises GrammarError."""
    grammar_limits.check_regex(regex)
    (found,) = json.loads(llguidance.LLMatcher.grammar_from_regex(regex))["grammars"]
    return Guide(grammar=found["lark_grammar"], after=after)


def lark_guide(grammar: str, after: int | None = None) -> Guide:
    """Restrict output to a grammar in llguidance's dialect of Lark. Raises GrammarError."""
    grammar_limits.check_lark(grammar)
    return tool_guide(grammar, after)


def tool_guide(grammar: str, after: int | None = None) -> Guide:
    """Restrict output to a grammar that `chat.tool_grammar` made. It may have any number of rules.

    Raises GrammarError.
    """
    grammar_limits.check_text(grammar)
    return Guide(grammar=llguidance.LLMatcher.grammar_from_lark(grammar), after=after)


@dataclass(slots=True)
class _Allowance:
    """The CPU time left for one request's masks; all copies of its matcher share it."""

    seconds: float = MASK_BURST_SECONDS


class Matcher:
    """The state of one output in its grammar.

    Until the token `Guide.after`, every token is allowed but the end of sequence.

    Attributes:
        error: why the output cannot follow the grammar any more; None while it can.
    """

    def __init__(self, tokenizer: Tokenizer, guide: Guide) -> None:
        """Compiles the grammar, without holding Python's lock (GIL). Raises GrammarError: the
        grammar is not valid, too large or of a kind not supported."""
        grammar_limits.check_text(guide.grammar)
        self.error: str | None = None
        self._tokenizer = tokenizer
        self._after = guide.after
        self._allowance = _Allowance()
        self._compiled: Matcher | None = None  # lives as long as a matcher that shares with it
        self._matcher = llguidance.LLMatcher(
            tokenizer.guidance, guide.grammar + _NO_FORCING, log_level=0, limits=_LIMITS
        )
        if self._matcher.is_error():
            reason = _first_line(self._matcher.get_error())
            raise grammar_limits.GrammarError("invalid", f"the grammar is not valid: {reason}")

    def copy(self) -> "Matcher":
        """An independent matcher in the same state, for the same request."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def for_request(self, guide: Guide | None = None) -> "Matcher":
        """An independent matcher at the beginning of another request of the same grammar.

        `self` must not have accepted a token. The two share the automaton, and so its memory.

        Args:
            guide: has the token after which the grammar begins; None: the same as for `self`.
        """
        other = self.copy()
        other._after = self._after if guide is None else guide.after
        other._allowance, other._compiled = _Allowance(), self
        return other

    def allow(self, words: Words) -> None:
        """Writes which tokens may come next; none if there is an `error`.

        Args:
            words: [ceil(V/32)] int32, contiguous; token i is bit i % 32 of word i // 32. Tokens
                past the tokenizer's vocabulary are not allowed.
        """
        own = -(-self._tokenizer.vocab_size // 32)
        words[own:] = 0
        if self._after is not None:
            words[:own] = self._tokenizer.words_but_end[: len(words)]
            return
        if self.error is None:
            left, began = self._allowance, thread_time()
            if len(words) >= own:
                self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, 4 * own)
            else:  # a model with fewer tokens than its tokenizer
                mask = self._matcher.compute_bitmask()
                words[:] = np.frombuffer(mask, np.int32)[: len(words)]
            left.seconds -= thread_time() - began
            if self._matcher.is_error():
                self.error = f"the grammar failed: {_first_line(self._matcher.get_error())}"
            elif left.seconds < 0:
                self.error = (
                    "the grammar is too slow: finding the tokens that it allows takes more than "
                    f"{1000 * MASK_SECONDS:g} ms of CPU time a token; use a simpler grammar, with "
                    "fewer alternatives that begin alike"
                )
            left.seconds = min(left.seconds + MASK_SECONDS, MASK_BURST_SECONDS)
        if self.error is not None:
            words[:] = 0

    def accept(self, token_id: int) -> None:
        """Continues the output with a token that `allow` allowed."""
        if self._after is not None:
            if token_id == self._after:
                self._after = None
        elif not self._matcher.is_stopped():
            began = thread_time()
            self._matcher.consume_token(token_id)
            self._allowance.seconds -= thread_time() - began


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "unknown"
