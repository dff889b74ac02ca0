"""Escapes the names of tool parameters in the model's output, so that their JSON is valid."""

import codecs
import re

import deepseek_recipe as recipe

from finwhale.chat.tokenizer import Tokenizer

_BEGIN = b'parameter name="'
_HEAD = re.compile(_BEGIN + rb'(.*?)" string="(?:true|false)">', re.DOTALL)
MOST_HEAD_BYTES = 4096  # a longer head passes as it is
_UNSAFE = re.compile(rb'[\x00-\x20"\\]')


class ParameterNames:
    """Replaces characters in the names of tool parameters by their JSON escapes.

    deepseek-recipe copies these names from the markup into the JSON of a call's arguments, and cuts
    them at a space. A name in which spaces, quotes, backslashes and control characters are escaped
    passes through it, and is the right name for any parser of JSON.

    Args:
        enabled: whether deepseek-recipe parses tool calls; otherwise nothing changes.
    """

    def __init__(self, tokenizer: Tokenizer, *, enabled: bool) -> None:
        self._tokenizer = tokenizer
        spelling = recipe.SpecialToken.Dsml.default_str()
        self._dsml = tokenizer.added_ids.get(spelling) if enabled else None
        self._in_head = False  # whether the output may be inside the head of a parameter
        self._head = b""
        self._held: list[recipe.InferenceChunk] = []  # one for each token of the head

    def feed(self, token_id: int, chunk: recipe.InferenceChunk) -> list[recipe.InferenceChunk]:
        """Adds a token, which `chunk` holds; returns the chunks to parse next."""
        if token_id == self._dsml:
            released = self.flush()
            self._in_head = True
            return [*released, chunk]
        if not self._in_head:
            return [chunk]
        self._head += self._tokenizer.token_bytes(token_id)
        self._held.append(chunk)
        if not _BEGIN.startswith(self._head[: len(_BEGIN)]) or len(self._head) > MOST_HEAD_BYTES:
            return self.flush()
        found = _HEAD.match(self._head) if b'">' in self._head else None
        if found is None:
            return []
        name = _UNSAFE.sub(lambda char: b"\\u%04x" % char[0][0], found[1])
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        text = decoder.decode(_BEGIN + name + self._head[found.end(1) :])
        if name == found[1]:
            return self.flush()
        if decoder.getstate()[0]:
            return []  # The value begins with a character that is not complete.
        count = len(self.flush())
        return [recipe.InferenceChunk.text(text, token_count=count)]

    def flush(self) -> list[recipe.InferenceChunk]:
        """The chunks that are held back, as they are."""
        held, self._held, self._head, self._in_head = self._held, [], b"", False
        return held
