"""The grammar of an answer with tools. It enforces what llguidance can of their schemas."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from finwhale.chat.grammar import Matcher, tool_guide
from finwhale.chat.grammar_limits import GrammarError
from finwhale.chat.known_fields import printable
from finwhale.chat.tokenizer import Tokenizer
from finwhale.chat.tool_grammar import ToolGrammar, ToolSignature
from finwhale.request import Guide

logger = logging.getLogger(__name__)

MAX_RELAXED = 8
# llguidance says in which line of a grammar it found a mistake.
_AT_LINE = re.compile(r"not valid: at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)")
# Such a message says that a schema is wrong; any other, that llguidance cannot enforce it.
_WRONG = re.compile(r"Invalid type|Expected |invalid multiple|[\w ]+ must be an? ")


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar of an answer.

    Attributes:
        guide: None: the answer is free.
        places: the part of the request that each line of the grammar enforces, or "".
        strict: the schemas of the request that must be enforced as a whole.
        ignored: parts of the request that the grammar does not enforce.
        optional: the request did not ask for a grammar.
    """

    guide: Guide | None
    places: tuple[str, ...] = ()
    strict: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    optional: bool = False

    def place_beyond(self, error: GrammarError, relaxed: Collection[str]) -> str:
        """The place whose schema llguidance cannot enforce.

        Args:
            relaxed: the places whose schemas the grammar lacks already.

        Raises:
            GrammarError: the schema is wrong, or must hold; or there is another reason.
        """
        found = _AT_LINE.search(str(error))
        place = "".join(self.places[int(found[1]) - 1 : int(found[1])]) if found else ""
        if found is None or not place or place in relaxed or len(relaxed) == MAX_RELAXED:
            raise error
        if _WRONG.match(found[2]) or any(f"{place}.".startswith(f"{s}.") for s in self.strict):
            raise GrammarError("invalid", f"{place}: {found[2]}") from error
        return place


def tools_grammar(
    tokenizer: Tokenizer,
    tools: Sequence[ToolSignature],
    after: int | None,
    relaxed: Collection[str],
    *,
    required: bool = False,
    parallel: bool = True,
    content: tuple[str, str] | None = None,
    optional: bool = False,
) -> AnswerGrammar:
    """The grammar of an answer that may be, or must be, calls of tools.

    Args:
        after: the token after which the grammar begins.
        relaxed: places of the request where only the types of values hold.
        content: the form of an answer without calls, as a Lark item, and its place; None: any
            text.

    Raises:
        GrammarError: the schemas are too large, or a strict one has what cannot be enforced.
    """
    dsml = tokenizer.added_id(recipe.SpecialToken.Dsml.default_str())
    grammar = ToolGrammar(tools, dsml, parallel=parallel, relaxed=relaxed)
    if required:
        text = grammar.required()
    else:
        text = grammar.after_text() if content is None else grammar.instead_of(*content)
    strict = tuple(f"tools.{printable(tool.name)}" for tool in tools if tool.strict)
    guide = tool_guide(text, after)
    return AnswerGrammar(guide, tuple(grammar.places), strict, tuple(grammar.ignored), optional)


def tools_matcher(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], after: int | None
) -> Matcher:
    """The compiled grammar of any text, which calls of OpenAI's function tools may follow.

    Raises:
        GrammarError: a tool's schema is wrong or too large, or cannot be enforced and is strict.
    """
    functions = [tool["function"] for tool in tools]
    signatures = [
        ToolSignature(f["name"], f.get("parameters") or {}, f.get("strict") is True)
        for f in functions
    ]
    relaxed: list[str] = []
    while True:
        grammar = tools_grammar(tokenizer, signatures, after, relaxed)
        assert grammar.guide is not None
        try:
            matcher = Matcher(tokenizer, grammar.guide)
        except GrammarError as error:
            relaxed.append(grammar.place_beyond(error, relaxed))
            continue
        if grammar.ignored:
            logger.warning("tool calls need not hold %s", ", ".join(grammar.ignored))
        return matcher
