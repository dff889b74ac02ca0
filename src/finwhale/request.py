"""What a caller asks for and what it gets back. Plain data: no torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from finwhale.errors import RequestError

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """What an output must match; `chat.grammar` makes them.

    Attributes:
        grammar: a grammar as the grammar engine reads it (llguidance: Lark or its JSON form).
        after: the token after which the grammar begins, such as the end of the reasoning; until
            it has come, everything is allowed. None: the grammar holds from the first token.
    """

    grammar: str
    after: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    Attributes:
        n: continuations of the prompt.
        max_tokens: tokens to generate at most; None: until the context is full.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
        min_p: drop tokens less likely than min_p times the most likely one.
        repetition_penalty: divides (or multiplies, where negative) the logits of tokens that
            stand in the prompt or the output; 1 is none (Keskar et al. 2019).
        presence_penalty: subtracted from the logits of tokens that stand in the output.
        frequency_penalty: subtracted once for each time that a token stands in the output.
        stop: strings at which to stop; the text returned ends before them.
        stop_token_ids: token ids at which to stop, besides the model's end of sequence.
        ignore_eos: go on past the model's end of sequence.
        seed: makes a request's draws the same whatever else is in the batch; None: a fresh one.
        logprobs: for each generated token, the log-probabilities of this many most likely
            tokens beside its own; None: none at all.
        logit_bias: token id to what is added to its logit, -100 to 100, after the penalties and
            before temperature.
        guide: a grammar that the output must match; None: any text.
    """

    n: int = 1
    max_tokens: int | None = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    guide: Guide | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if value is not None and not isinstance(value, Iterable):
                raise RequestError(f"{name} must be a list, got {value!r}")
            object.__setattr__(self, name, tuple(value or ()))
        for name, low, high, wanted in _RANGES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
                raise RequestError(f"{name} must be a number, got {value!r}")
            if not low <= value <= high:
                raise RequestError(f"{name} must be {wanted}, got {value!r}")
        for name in ("n", "top_k"):
            if not isinstance(getattr(self, name), int):
                raise RequestError(f"{name} must be an integer, got {getattr(self, name)!r}")
        for name in ("max_tokens", "logprobs", "seed"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise RequestError(f"{name} must be an integer or None, got {value!r}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise RequestError(f"logprobs must be 0 to {MAX_LOGPROBS}, got {self.logprobs}")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(f"stop must be non-empty strings, got {list(self.stop)!r}")
        if not all(type(i) is int and i >= 0 for i in self.stop_token_ids):
            raise RequestError(
                f"stop_token_ids must be token ids (0 or more), got {list(self.stop_token_ids)!r}"
            )
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.guide is not None and not isinstance(self.guide, Guide):
            raise RequestError(f"guide must be a Guide, got {self.guide!r}")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))


def _checked_bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias must be a mapping, got {bias!r}")
    for token_id, value in bias.items():
        if type(token_id) is not int or token_id < 0:
            raise RequestError(f"logit_bias must be of token ids, got the key {token_id!r}")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not -100 <= value <= 100:
            raise RequestError(f"logit_bias must be -100 to 100, got {value!r} for {token_id}")
    return dict(bias) or None


MAX_LOGPROBS = 100
_RANGES = (
    ("n", 1, 4096, "1 to 4096"),
    ("temperature", 0.0, 100.0, "0 (greedy) to 100"),
    ("top_k", -1, 2**31 - 1, "-1 or 0 (all tokens) or more"),
    ("top_p", 1e-9, 1.0, "above 0 and at most 1"),
    ("min_p", 0.0, 1.0, "0 to 1"),
    ("repetition_penalty", 1e-3, 100.0, "0.001 to 100"),
    ("presence_penalty", -100.0, 100.0, "-100 to 100"),
    ("frequency_penalty", -100.0, 100.0, "-100 to 100"),
)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model, before temperature and filters.

    Attributes:
        logprob: natural logarithm of the probability.
        rank: 1 for the most likely token.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the n continuations.
        text: without the stop string and without special tokens.
        token_ids: every generated token, the one that stopped it included.
        finish_reason: "stop" (end of sequence, stop string or id), "length" (max_tokens or the
            context is full), "error", or None while it is running.
        stop_reason: the stop string or stop token id that was met, if any.
        logprobs: one dict a generated token, token id to Logprob; None unless asked for.
        message: for a chat, the answer parsed: role, content, reasoning_content, tool_calls.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    message: dict[str, Any] | None = None


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt.

    Attributes:
        request_id: unique in the process.
        prompt: the text, or None where token ids were given.
        prompt_token_ids: what the model read.
        outputs: n continuations.
        finished: nothing more will come.
        error: why the request failed, one line; None where it did not.
        num_cached_tokens: tokens of the prompt that were not read again, because the state of an
            earlier request with the same beginning was still there.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    error: str | None = None
    num_cached_tokens: int = 0
