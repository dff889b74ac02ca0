"""Stop strings of a chat answer for which DeepSeek's parser has no options."""

import codecs
from collections import deque
from collections.abc import Collection, Sequence

from finwhale.chat.stop_strings import StopChecker
from finwhale.chat.tokenizer import Tokenizer


class StopGate:
    """Withholds the tokens of an answer in which a stop string may begin.

    As in DeepSeek's protocol, stop strings mean nothing in reasoning and in tool calls.

    Args:
        end_of_thinking: the token after which the answer begins; None: it begins at once.
        markup: tokens that begin a tool call.
        has_tools: a tool call may follow two newlines at the beginning of the answer. As in
            deepseek-recipe, which drops such pairs of newlines, no stop string contains them.
        min_tokens: a stop string counts from the token after this many, as in the engine.
        keep: the answer ends after the stop string, not before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        end_of_thinking: int | None,
        markup: Collection[int | None],
        min_tokens: int,
        keep: bool,
        has_tools: bool = False,
    ) -> None:
        self._tokenizer, self._checker = tokenizer, StopChecker(stop, keep=keep)
        self._end_of_thinking, self._markup, self._min_tokens = end_of_thinking, markup, min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_tokens = 0
        self._at_start = has_tools  # whether the answer has only newlines so far
        self._odd_newline = False  # whether their number is odd
        # Groups of tokens that end at whole characters: the number of tokens, and their text. The
        # last character of the last group may lack bytes.
        self._withheld: deque[tuple[int, str]] = deque()
        self._incomplete = False
        self._num_safe = 0  # characters of that text that certainly belong to the answer

    def feed(self, token_id: int) -> tuple[int, str | None]:
        """Add a token.

        Returns:
            How many of the withheld tokens, the oldest first, belong to the answer; and the text
            that follows them if the answer ends here, else None.
        """
        self._num_tokens += 1
        if self._end_of_thinking is not None:
            if token_id == self._end_of_thinking:
                self._end_of_thinking = None
            return 1, None
        if token_id in self._markup:
            self._checker = StopChecker(())
            return self.release() + 1, None
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        count, before = self._withheld.pop() if self._incomplete else (0, "")
        self._withheld.append((count + 1, before + text))
        self._incomplete = bool(self._decoder.getstate()[0])
        if self._num_tokens > self._min_tokens:
            text = self._check(text)
        elif text.strip("\n"):
            self._at_start = False
        self._num_safe += len(text)
        released = 0
        while (
            len(self._withheld) > self._incomplete and len(self._withheld[0][1]) <= self._num_safe
        ):
            if self._checker.matched is not None and not self._num_safe:
                break  # A token without text may follow the end.
            count, text = self._withheld.popleft()
            self._num_safe -= len(text)
            released += count
        if self._checker.matched is None:
            return released, None
        # The stop string's start, or its end, may lie inside a token.
        return released, self._withheld[0][1][: self._num_safe] if self._num_safe else ""

    def _check(self, text: str) -> str:
        """Look for stop strings; returns the text that certainly belongs to the answer."""
        safe = ""
        while self._at_start and text:
            char, text = text[0], text[1:]
            self._at_start = char == "\n"
            if self._at_start and self._odd_newline:
                safe += self._checker.flush() + char
            else:
                safe += self._checker.feed(char)
            self._odd_newline = self._at_start and not self._odd_newline
            if self._checker.matched is not None:
                return safe
        return safe + self._checker.feed(text)

    def release(self) -> int:
        """Stop withholding tokens: no stop string can follow. Returns their number."""
        count = sum(count for count, _ in self._withheld)
        self._withheld.clear()
        self._incomplete, self._num_safe = False, 0
        return count
