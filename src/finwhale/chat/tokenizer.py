"""Turns text into token ids and back, with byte-level BPE tokenizers in tokenizer.json format."""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import deepseek_recipe
import llguidance
import numpy as np
import tokenizers
from numpy.typing import NDArray

from finwhale.errors import CheckpointError, RequestError
from finwhale.files import is_file, read_json

BOS = deepseek_recipe.SpecialToken.Bos.default_str()
EOS = deepseek_recipe.SpecialToken.Eos.default_str()

# Several tables have an entry for each id up to the highest. No vocabulary comes near this.
MAX_VOCABULARY = 1 << 24


class Tokenizer:
    """A checkpoint's tokenizer, which never confuses text with control tokens.

    DeepSeek's tokenizer.json lists control tokens (`<think>`, ...) as added tokens, and the usual
    `encode` turns any text that spells one into that token. Here `encode` uses a second copy
    without the added tokens: a user's text stays text, and control tokens enter a prompt by id.

    Attributes:
        path: the tokenizer.json that was read.
        vocab_size: the highest token id plus one.
        added_ids: the id of every added (control) token, by its spelling.
        special_ids: the added tokens that tokenizer.json flags as special; decoding skips them.
        ascii_texts: a cache for Detokenizer: texts of tokens that are ASCII and not special.
        bos_id, eos_id: beginning and end of sequence; None if the vocabulary has no such token.
    """

    def __init__(self, path: Path, spec: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Builds a tokenizer from the parsed tokenizer.json and tokenizer_config.json. Raises
        CheckpointError: the file is not a byte-level BPE, or is not valid."""
        self.path = path
        try:
            model, vocab = spec["model"], spec["model"]["vocab"]
            kinds = (model.get("type", "BPE"), spec["decoder"]["type"])
            added = {str(token["content"]): token for token in spec["added_tokens"]}
            self.added_ids: dict[str, int] = {text: int(t["id"]) for text, t in added.items()}
            self.special_ids = frozenset(int(t["id"]) for t in added.values() if t["special"])
            self._tokens: dict[int, str] = {int(i): text for text, i in vocab.items()}
            for text in added:
                text.encode()
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise CheckpointError(f"{path} is not a tokenizer.json: {error!r}") from error
        ids = [*self._tokens, *self.added_ids.values()]
        if not ids or not 0 <= min(ids) <= max(ids) < MAX_VOCABULARY:
            raise CheckpointError(
                f"{path} is not a tokenizer.json: its token ids must be between 0 and "
                f"{MAX_VOCABULARY - 1}, and there must be one"
            )
        if kinds != ("BPE", "ByteLevel"):
            raise CheckpointError(
                f"{path}: wanted a BPE model with a ByteLevel decoder, "
                f"found {kinds[0]} with {kinds[1]}"
            )
        # An added token may also be in the model's vocabulary. Remove it there, so that no text is
        # ever merged into it.
        plain_vocab = {text: i for text, i in vocab.items() if text not in added}
        plain = {**spec, "added_tokens": [], "model": {**model, "vocab": plain_vocab}}
        self._plain = _build(plain, path)
        self._added_texts = {i: text for text, i in self.added_ids.items()}
        self._tokens.update(self._added_texts)
        self.ascii_texts: dict[int, str] = {}
        self.vocab_size = max(self._tokens) + 1
        self.bos_id = self.added_ids.get(_spelling(config.get("bos_token"), BOS))
        self.eos_id = self.added_ids.get(_spelling(config.get("eos_token"), EOS))
        self._spec = spec

    @classmethod
    def open(cls, directory: str | Path) -> "Tokenizer":
        """Reads `tokenizer.json` and, if it exists, `tokenizer_config.json`. Raises
        CheckpointError: tokenizer.json is missing, broken or not a byte-level BPE."""
        path = Path(directory) / "tokenizer.json"
        if not is_file(path):
            raise CheckpointError(f"no tokenizer: {path} does not exist")
        config_path = path.with_name("tokenizer_config.json")
        config = read_json(config_path) if is_file(config_path) else {}
        return cls(path, read_json(path), config)

    @classmethod
    def find(cls, directory: Path) -> "Tokenizer | None":
        """`open`; None: the directory has no tokenizer.json."""
        return cls.open(directory) if is_file(directory / "tokenizer.json") else None

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; text that spells a control token stays text. Raises
        RequestError: `text` is not a string, or not valid Unicode."""
        return self._plain.encode(_checked(text), add_special_tokens=False).ids

    def added_id(self, spelling: str) -> int:
        """The id of a control token. Raises CheckpointError: the vocabulary has no such token."""
        if spelling not in self.added_ids:
            raise CheckpointError(f"{self.path} has no control token {spelling}")
        return self.added_ids[spelling]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none if the id is outside the vocabulary."""
        text = self._tokens.get(token_id, "")
        if token_id in self._added_texts:
            return text.encode()
        try:
            return text.translate(_BYTE_OF_CHAR).encode("latin-1")
        except UnicodeEncodeError:
            return text.encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, with U+FFFD for partial UTF-8. Spells out control tokens."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def spelling(self, token_id: int) -> str:
        """A token as tokenizer.json spells it: byte-level characters, or a control token's text."""
        return self._tokens.get(token_id, "")

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids; invalid UTF-8 becomes U+FFFD.

        Args:
            token_ids: ids outside the vocabulary decode to nothing.
            skip_special: leave out special tokens (beginning and end of sequence, ...). DeepSeek's
                tokenizer does not flag `<think>` and similar tokens as special.
        """
        skipped = self.special_ids if skip_special else frozenset()
        parts = [self.token_bytes(i) for i in token_ids if i not in skipped]
        return b"".join(parts).decode("utf-8", errors="replace")

    @cached_property
    def longest_token(self) -> int:
        """The number of bytes of the longest token."""
        return max(len(self.token_bytes(i)) for i in self._tokens)

    @cached_property
    def recipe(self) -> deepseek_recipe.Tokenizer:
        """deepseek-recipe's tokenizer of the same file; its output parser needs it."""
        return deepseek_recipe.Tokenizer.from_str(json.dumps(self._spec))

    @cached_property
    def guidance(self) -> llguidance.LLTokenizer:
        """llguidance's view of the vocabulary, for structured output."""
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(self)))

    @cached_property
    def words_but_end(self) -> NDArray[np.int32]:
        """A bit mask as 32-bit words: every token is allowed but the end of sequence."""
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[: self.vocab_size] = 1
        if self.eos_id is not None:
            bits[self.eos_id] = 0
        return np.packbits(bits, bitorder="little").view(np.int32)


class _Vocabulary:
    """A tokenizer in the form that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.added_ids.values())
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8", errors="replace"))


def _build(spec: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec))
    # The library raises a bare Exception for every error in a file.
    except Exception as error:
        raise CheckpointError(f"{path} is not a usable tokenizer.json: {error}") from error


def _spelling(token: Any, default: str) -> str:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else default


def _checked(text: str) -> str:
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text is not valid Unicode: a lone surrogate at character {error.start}"
        ) from error
    return text


def _byte_of_char() -> dict[int, int]:
    """The byte of each of the 256 characters in the byte-level alphabet (GPT-2's).

    Latin-1 characters outside the alphabet map beyond Latin-1, so that encoding them fails.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    table = {i: 0x110000 - 1 for i in range(256) if i not in printable}
    table.update({i: i for i in printable})
    others = [i for i in range(256) if i not in printable]
    table.update({0x100 + n: byte for n, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()
