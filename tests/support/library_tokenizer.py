"""The tokenizers library's own tokenizer of a file, in which control tokens are no plain text."""

from functools import cache
from pathlib import Path

import tokenizers

from finwhale.chat.tokenizer import Tokenizer


@cache
def library_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json."""
    return tokenizers.Tokenizer.from_file(str(path))


def encode_with_special(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text; a control token that the text spells becomes that token."""
    return library_tokenizer(tokenizer.path).encode(text, add_special_tokens=False).ids
