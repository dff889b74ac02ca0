"""The grammar of an answer: what llguidance can enforce of the schemas of a format and of tools."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import deepseek_recipe as recipe

from finwhale.chat.dialect import V4, Dialect
from finwhale.chat.grammar import Matcher, json_lark, lark_guide, regex_guide, tool_guide
from finwhale.chat.grammar_limits import GrammarError
from finwhale.chat.known_fields import printable
from finwhale.chat.schema_document import SchemaDocument
from finwhale.chat.tokenizer import Tokenizer
from finwhale.chat.tool_grammar import ToolGrammar, ToolSignature
from finwhale.errors import RequestError
from finwhale.request import Guide

logger = logging.getLogger(__name__)

MAX_RELAXED = 8
# llguidance says in which line of a grammar it found a mistake.
_AT_LINE = re.compile(r"not valid: at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*)")
# Such a message says that a schema is wrong; any other, that llguidance cannot enforce it.
_WRONG = re.compile(r"Invalid type|Expected |invalid multiple|[\w ]+ must be an? ")

Format = tuple[Literal["json", "regex", "grammar"], Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tool calls that a request allows or requires in its answer.

    Attributes:
        required: the answer must be a tool call.
        parallel: the answer may have several tool calls.
    """

    required: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class WantedFormat:
    """The format that an answer must have.

    Attributes:
        name: what the request calls it.
        strict: whether all of a schema must hold.
    """

    format: Format
    name: str = "response_format"
    strict: bool = False


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The texts and tool calls that a request allows as its answer.

    Attributes:
        tokenizer: None: there are no tools.
        wanted: the format of an answer without tool calls; None: any text.
        after: the token after which the grammar begins.
        hold: when tool calls are held to their schemas: if the request asks for that, as far as
            possible otherwise, or always.
    """

    tokenizer: Tokenizer | None
    wanted: WantedFormat | None
    tools: Sequence[ToolSignature] = ()
    choice: ToolChoice = ToolChoice()
    after: int | None = None
    hold: Literal["asked", "possible", "always"] = "asked"
    dialect: Dialect = V4

    @property
    def asked(self) -> bool:
        """Whether the request asks for a grammar."""
        choice, strict = self.choice, any(tool.strict for tool in self.tools)
        one_call = not choice.parallel and bool(self.tools)
        return self.wanted is not None or choice.required or one_call or strict

    def grammar(self, relaxed: tuple[str, ...] = ()) -> "AnswerGrammar | None":
        """The grammar of the answer; None: the answer may be anything.

        Args:
            relaxed: places of the request where only the types of values hold.

        Raises:
            RequestError: the format is not valid, or the grammar is too large.
        """
        if self.choice.required and not self.tools:
            raise RequestError("tool_choice asks for a tool, but there are no tools")
        if not self.asked and (self.hold == "asked" or not self.tools):
            return None
        try:
            guide, places, ignored = self._made(relaxed)
        except GrammarError as error:
            return self.without(error)
        return AnswerGrammar(guide, self, tuple(places), tuple(ignored), relaxed)

    def without(self, error: GrammarError) -> "AnswerGrammar":
        """No grammar if the request does not ask for one; otherwise raises the error."""
        if self.asked or self.hold == "always":
            raise error
        return AnswerGrammar(None, self, ignored=("tools",))

    def _made(self, relaxed: tuple[str, ...]) -> tuple[Guide, list[str], list[str]]:
        """Returns the guide, where each of its lines comes from, and what it does not enforce."""
        wanted, text = self.wanted, ""
        ignored: list[str] = []
        if wanted is not None and wanted.format[0] == "json":
            text, ignored = _json_item(wanted, relaxed)
        elif wanted is not None and self.tools:
            kind = wanted.format[0]
            raise RequestError(f"a response_format of type {kind} cannot be combined with tools")
        elif wanted is not None:
            make = regex_guide if wanted.format[0] == "regex" else lark_guide
            return make(wanted.format[1], self.after), [], []
        if not self.tools:
            assert wanted is not None
            return tool_guide(f"start: {text}", self.after), [wanted.name], ignored
        assert self.tokenizer is not None
        dsml = self.tokenizer.added_id(recipe.SpecialToken.Dsml.default_str())
        parallel = self.choice.parallel
        grammar = ToolGrammar(self.tools, dsml, self.dialect, parallel=parallel, relaxed=relaxed)
        if self.choice.required:
            text, ignored = grammar.required(), []
        elif wanted is None:
            text = grammar.after_text()
        else:
            text = grammar.instead_of(text, wanted.name)
        return tool_guide(text, self.after), grammar.places, [*grammar.ignored, *ignored]


def _json_item(wanted: WantedFormat, relaxed: tuple[str, ...]) -> tuple[str, list[str]]:
    """The Lark item of a JSON Schema, and what it leaves out of the schema."""
    document = SchemaDocument(wanted.format[1], wanted.name)
    part = document.part(document.root)
    if wanted.strict:
        document.check_strict()
    if wanted.name in relaxed:
        return json_lark(document.types()), [wanted.name]
    return json_lark(part), document.ignored


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """The grammar of an answer.

    Attributes:
        guide: None: the answer is free.
        places: the part of the request that each line of the grammar enforces, or "".
        ignored: parts of the request that the grammar does not enforce.
        relaxed: the places whose schemas the grammar lacks.
    """

    guide: Guide | None
    form: AnswerForm
    places: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    relaxed: tuple[str, ...] = ()

    def relax(self, error: GrammarError) -> "AnswerGrammar | None":
        """The grammar without the schema that llguidance cannot enforce.

        Args:
            error: what llguidance says of the grammar.

        Raises:
            GrammarError: the schema is wrong, or must hold; MAX_RELAXED are left out already; or
                there is another reason.
        """
        found = _AT_LINE.search(str(error))
        place = "".join(self.places[int(found[1]) - 1 : int(found[1])]) if found else ""
        if not found or not place or place in self.relaxed or len(self.relaxed) == MAX_RELAXED:
            return self.form.without(error)
        wanted = self.form.wanted
        strict = [f"tools.{printable(tool.name)}" for tool in self.form.tools if tool.strict]
        strict += [wanted.name] if wanted is not None and wanted.strict else []
        if _WRONG.match(found[2]) or any(f"{place}.".startswith(f"{s}.") for s in strict):
            return self.form.without(GrammarError("invalid", f"{place}: {found[2]}"))
        return self.form.grammar((*self.relaxed, place))


def tools_matcher(
    tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]], after: int | None, dialect: Dialect
) -> Matcher:
    """The compiled grammar of any text, which calls of OpenAI's function tools may follow. Raises
    GrammarError: a tool's schema is wrong or too large, or cannot be enforced and is strict."""
    signatures = [
        ToolSignature(f["name"], f.get("parameters") or {}, f.get("strict") is True)
        for f in (tool["function"] for tool in tools)
    ]
    form = AnswerForm(tokenizer, None, signatures, ToolChoice(), after, "always", dialect)
    grammar = form.grammar()
    while True:
        assert grammar is not None and grammar.guide is not None
        try:
            matcher = Matcher(tokenizer, grammar.guide)
        except GrammarError as error:
            grammar = grammar.relax(error)
            continue
        if grammar.ignored:
            logger.warning("tool calls need not hold %s", ", ".join(grammar.ignored))
        return matcher
