"""Lets deepseek-recipe see only tool calls that are well formed.

deepseek-recipe expects the markup of `chat.tool_grammar`. From other output it makes calls whose
arguments are no JSON or contain markup, and it shows control tokens in the text.
"""

import codecs
import json
import re

import deepseek_recipe as recipe

from finwhale.chat.client_schemas import is_nested_deeper
from finwhale.chat.dialect import Dialect
from finwhale.chat.tokenizer import Tokenizer

_CALL, _VALUE = b'[^"]+">', b'(.*?)" string="(?:true|false)">'
MOST_TAG_BYTES = 4096
MOST_LEVELS = 100
_UNSAFE = re.compile(rb'[\x00-\x20"\\]')

Chunks = list[recipe.InferenceChunk]


class CallGuard:
    """Follows the tool calls of one answer, token by token.

    - Once the output leaves the form of a call, nothing more of it belongs to the answer.
    - A parameter that should be JSON and is not becomes a string.
    - Spaces, quotes, backslashes and control characters in the names of parameters are escaped:
      deepseek-recipe copies names into JSON as they are, and cuts them at a space.
    - A control token that begins nothing like a call is left out.

    Args:
        enabled: whether deepseek-recipe parses tool calls; otherwise nothing changes.

    Attributes:
        broken: whether a call is broken, or does not end.
    """

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect, *, enabled: bool) -> None:
        self._tokenizer = tokenizer
        names = ("invoke", "parameter", *dialect.blocks)
        self._words = tuple((dialect.space + name).encode() for name in names)
        invoke, parameter, *blocks = self._words
        call, self._value = invoke + b' name="', parameter + b' name="'
        # The tags that may follow a control token, by whether they close and by what it is in: how
        # a tag begins, how the pattern of the tag ends, and what the tag leads to.
        self._tags: dict[tuple[bool, str], list[tuple[bytes, bytes, str]]] = {
            (False, "text"): [*((b + b">", b"", "block") for b in blocks), (call, _CALL, "call")],
            (False, "block"): [(call, _CALL, "call")],
            (False, "call"): [(self._value, _VALUE, "value")],
            (True, "block"): [(name + b">", b"", "after") for name in blocks],
            (True, "call"): [(invoke + b">", b"", "block")],
            (True, "value"): [(parameter + b">", b"", "call")],
        }
        spelling = recipe.SpecialToken.Dsml.default_str()
        self._dsml = tokenizer.added_ids.get(spelling) if enabled else None
        self.broken = False
        self._inside = "text"  # or block, call, value, after
        self._any_call = False  # whether a call of the block is complete
        self._before = b""  # the last three bytes of text
        self._tag: bytes | None = None  # text since a control token whose tag is not complete
        self._closing = False  # whether that tag closes
        self._held: list[tuple[recipe.InferenceChunk, bytes]] = []
        self._at = 0  # where the text of the tag begins in `_held`
        # The index in `_held` where the head of a parameter that is JSON begins; None: the output
        # is in no such parameter.
        self._json_at: int | None = None

    def feed(self, token_id: int, chunk: recipe.InferenceChunk) -> Chunks:
        """Adds a token, which `chunk` holds; returns the chunks to parse next."""
        if self._dsml is None or self._inside == "after":
            return [chunk]
        if self.broken:
            return [_counted(1)]
        if token_id == self._dsml:
            return self._begin_tag(chunk)
        text = self._tokenizer.token_bytes(token_id)
        before, self._before = self._before, (self._before + text)[-3:]
        if self._tag is not None:
            self._held.append((chunk, text))
            self._tag += text
            return self._match()
        if self._json_at is not None:
            self._held.append((chunk, text))
            return []
        released = [] if text == b"/" and before.endswith(b"<") else self._release()
        self._held.append((chunk, text))
        return released if _edge(self._before) else released + self._release()

    def flush(self) -> Chunks:
        """The last chunks of an answer that ends here."""
        complete = self._inside in ("text", "after") or (self._inside == "block" and self._any_call)
        if self._tag is not None or not complete:
            return self._break()
        if self._dsml is not None and self._before == b"\n\n<":  # as each call begins
            return self._without_edge(len(self._held), 1)
        return self._release()

    def _begin_tag(self, chunk: recipe.InferenceChunk) -> Chunks:
        released = [] if self._tag is None else self._mismatch()
        edge = _edge(self._before)
        self._before = b""
        if self.broken or not edge:
            more = self._break() if self._inside != "text" and not self.broken else [_counted(1)]
            return released + self._release() + more
        self._held.append((chunk, b""))
        self._tag, self._closing, self._at = b"", edge == 2, len(self._held)
        return released

    def _match(self) -> Chunks:
        assert self._tag is not None
        tags = self._tags.get((self._closing, self._inside), [])
        for start, rest, inside in tags:
            if found := re.match(start + rest, self._tag, re.DOTALL):
                return self._accept(found, inside)
        starts = [start for start, _, _ in tags]
        begins = any(start.startswith(self._tag) for start in (*self._words, *starts))
        begins = begins or any(self._tag.startswith(start) for start in starts)
        return [] if begins and len(self._tag) <= MOST_TAG_BYTES else self._mismatch()

    def _accept(self, found: re.Match[bytes], inside: str) -> Chunks:
        tag = found.string
        if inside == "value":
            if b' string="false">' in found[0][-16:]:
                self._json_at = self._at
            elif not self._replace(self._at, len(self._held), tag, found, string=True):
                return []  # The value begins with a character that is not complete.
        elif self._json_at is not None:
            end = self._at - 1
            text = b"".join(text for _, text in self._held[self._json_at : end])
            head = re.match(self._value + _VALUE, text, re.DOTALL)
            assert head is not None
            string = not _is_json(text[head.end() : -2])
            self._replace(self._json_at, end, text, head, string=string)
            self._json_at = None
        self._any_call = inside == "block" and (self._inside == "call" or self._any_call)
        self._inside, self._tag = inside, None
        return [] if self._json_at is not None else self._release()

    def _replace(
        self, start: int, end: int, text: bytes, head: re.Match[bytes], *, string: bool
    ) -> bool:
        """Replaces the held chunks of a parameter if its head must change; False: not yet."""
        name = _UNSAFE.sub(lambda char: b"\\u%04x" % char[0][0], head[1])
        kind = b"true" if string else b"false"
        new = self._value + name + b'" string="' + kind + b'">'
        if new == head[0]:
            return True
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoded = decoder.decode(new + text[head.end() :])
        if decoder.getstate()[0]:
            return False
        chunk = recipe.InferenceChunk.text(decoded, token_count=end - start)
        self._held[start:end] = [(chunk, b"")]
        return True

    def _mismatch(self) -> Chunks:
        """Handles a tag that may not stand here."""
        assert self._tag is not None
        if self._inside != "text" or self._tag.startswith(self._words):
            return self._break()
        self._held[self._at - 1] = _counted(1), b""
        self._tag = None
        return self._release()

    def _break(self) -> Chunks:
        """Ends the answer before the tag, or the value, that is not complete."""
        self.broken = True
        in_text = self._tag is not None and self._json_at is None
        self._tag = None
        return self._without_edge(self._at - 1 if in_text else 0, 1 + self._closing)

    def _without_edge(self, end: int, edge: int) -> Chunks:
        """The text of the first held tokens, without its last bytes; the others only count."""
        text = b"".join(text for _, text in self._held[:end])[:-edge]
        count = len(self._held)
        self._held = []
        return [recipe.InferenceChunk.text(text.decode(errors="ignore"), token_count=count)]

    def _release(self) -> Chunks:
        held, self._held = self._held, []
        return [chunk for chunk, _ in held]


def _counted(num_tokens: int) -> recipe.InferenceChunk:
    return recipe.InferenceChunk.text("", token_count=num_tokens)


def _edge(before: bytes) -> int:
    """The length of what may begin a tag, at the end of text."""
    return 2 if before.endswith(b"</") else int(before.endswith(b"<"))


def _is_json(text: bytes) -> bool:
    """Whether a value is JSON for deepseek-recipe, too.

    It reads no NaN, no number beyond floats, no half of a surrogate pair, and at most 127 levels.
    """
    try:
        value = json.loads(text.decode())
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return False
    return not is_nested_deeper(value, MOST_LEVELS)
