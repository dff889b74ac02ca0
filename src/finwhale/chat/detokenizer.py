"""Turns token ids into text while they are generated, for streaming."""

from collections.abc import Iterable
from encodings import utf_8

from finwhale.chat.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into text that is never revised.

    A character whose bytes are spread over several tokens appears with its last byte. The texts of
    all calls, joined, are `Tokenizer.decode` of all ids. The cost is linear in the tokens' bytes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        """Starts an empty stream; `skip_special` as in `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._ascii = tokenizer.ascii_texts
        self._decoder = utf_8.IncrementalDecoder(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; it may be empty."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._decoder.decode(
            b"".join([token_bytes(i) for i in token_ids if i not in skipped])
        )

    def next(self, token_id: int) -> str:
        """`feed` for one id, but faster."""
        text = self._ascii.get(token_id)
        if text is not None and not self._decoder.buffer:
            return text
        data = self._tokenizer.token_bytes(token_id)
        if data.isascii() and token_id not in self._tokenizer.special_ids:
            self._ascii[token_id] = data.decode("ascii")
        return self.feed((token_id,))

    def finish(self) -> str:
        """Ends the stream: U+FFFD if it ends inside a character, otherwise nothing."""
        return self._decoder.decode(b"", final=True)
