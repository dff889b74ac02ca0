"""A request's parameters and its results. Plain data: no torch."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from finwhale.errors import RequestError
from finwhale.options import check_options, option

FinishReason = Literal["stop", "length", "error", "abort"]
Requests = Literal["recompute", "keep", "abort"]
"""How to treat running requests when weights or memory change.

"recompute": they wait, and the engine computes their tokens so far again. "keep": they continue
with the cache of the old weights. "abort": they end with their tokens so far and the finish reason
"abort".
"""

ExpertIds = NDArray[np.uint8] | NDArray[np.int16]
"""Ids of routed experts [tokens, layers, top-k]: uint8 for models of up to 256 experts."""


MAX_LOGPROBS = 100
# Most log-probabilities of one request's prompt: a result of about 50 MB.
MAX_PROMPT_LOGPROBS = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """A grammar that an output must match; `chat.grammar` creates it.

    Attributes:
        grammar: the grammar in llguidance's dialect of Lark.
        after: the token after which the grammar begins, such as the end of the reasoning; every
            token is allowed before it. None: the grammar begins with the first token.
    """

    grammar: str
    after: int | None = None


# An option whose value is subtracted from logits.
_penalty: Any = partial(option, metavar="R", least=-100, most=100, marks=("command",))
_TEXTS, _IDS = ("stop", "bad_words"), ("stop_token_ids", "allowed_token_ids")


class _Given:
    """Has the names of the fields that the caller gave, which is no field itself."""

    __slots__ = ("given",)
    given: frozenset[str]

    def __new__(cls, **given: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "given", frozenset(given))
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(_Given):
    """How to choose the next token, and when to stop.

    An engine may have other defaults for fields that are left out (generation_config).
    """

    n: int = option(1, "number of continuations of the prompt", least=1, most=4096)
    max_tokens: int | None = option(
        128,
        "maximum number of tokens to generate",
        unset="until the context is full",
        least=1,
        marks=("command",),
    )
    temperature: float = option(
        1.0,
        "sampling temperature; 0 always takes the most likely token",
        metavar="T",
        least=0,
        most=100,
        marks=("command", "checkpoint"),
    )
    top_k: int = option(
        0,
        "keep the K most likely tokens; 0 or -1 keeps all",
        metavar="K",
        least=-1,
        most=2**31 - 1,
        marks=("command", "checkpoint", "all"),
    )
    top_p: float = option(
        1.0,
        "keep the smallest set of most likely tokens whose total probability reaches P",
        metavar="P",
        above=0,
        most=1,
        marks=("command", "checkpoint"),
    )
    min_p: float = option(
        0.0,
        "drop tokens less likely than P times the most likely token",
        metavar="P",
        least=0,
        most=1,
        marks=("command", "checkpoint", "all"),
    )
    # Keskar et al. 2019: https://arxiv.org/abs/1909.05858
    repetition_penalty: float = option(
        1.0,
        "make tokens of the prompt and the output less likely: divide their logits by R, or "
        "multiply negative ones; 1 changes nothing",
        metavar="R",
        least=1e-3,
        most=100,
        marks=("command", "checkpoint", "all"),
    )
    presence_penalty: float = _penalty(
        0.0, "subtract R from the logits of tokens that the output contains"
    )
    frequency_penalty: float = _penalty(
        0.0, "subtract R from a token's logit for each time the output contains it"
    )
    min_tokens: int = option(
        0,
        "generate this many tokens before the end of sequence, a stop token or a stop string may "
        "end the output; a grammar may end it earlier",
        least=0,
        most=2**31 - 1,
        marks=("all",),
    )
    stop: str | Sequence[str] = option(
        (), "stop before this text; the output does not contain it", metavar="TEXT"
    )
    stop_token_ids: Sequence[int] = option(
        (),
        "token ids at which to stop, besides the model's end of sequence",
        items=64,
        marks=("all",),
    )
    include_stop_str_in_output: bool = option(
        False, "keep the stop string, or the text of the stop token, in the output", marks=("vllm",)
    )
    skip_special_tokens: bool = option(
        True, "leave special tokens out of the text", marks=("vllm",)
    )
    ignore_eos: bool = option(False, "continue past the model's end of sequence", marks=("all",))
    seed: int | None = option(
        None,
        "make the draws reproducible, whatever else is in the batch",
        unset="a fresh seed",
        marks=("command",),
    )
    logprobs: int | None = option(
        None,
        "return each generated token's log-probability and those of this many most likely tokens",
        unset="none",
        least=0,
        most=MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = option(
        None,
        "return each prompt token's log-probability (the first has none) and those of this many "
        "most likely tokens; the request then computes its whole prompt, without cached prefixes",
        unset="none",
        least=0,
        most=MAX_LOGPROBS,
        marks=("vllm",),
    )
    return_routed_experts: bool = option(
        False,
        "return the ids of the experts that each layer chose for each token of prompt and output; "
        "needs an engine with enable_return_routed_experts. The request then computes its whole "
        "prompt, without cached prefixes",
        marks=("sglang",),
    )
    logit_bias: Mapping[int, float] | None = option(
        None,
        "values, -100 to 100, to add to the logits of token ids, after the penalties and before "
        "the temperature",
        unset="none",
    )
    allowed_token_ids: Sequence[int] = option(
        (),
        "the only token ids that the output may have; without the end of sequence among them, it "
        "ends at max_tokens or a stop string",
        unset="all",
        items=1 << 17,
        marks=("vllm",),
    )
    bad_words: Sequence[str] = option(
        (),
        "texts that the output must not have, with or without a space before them; a text is "
        "prevented as the tokens in which the tokenizer writes it",
        unset="none",
        items=128,
        marks=("vllm",),
    )
    guide: Guide | None = option(
        None, "a grammar that the output must match (chat.grammar)", unset="any text"
    )

    def __post_init__(self) -> None:
        for name in (*_TEXTS, *_IDS):
            value = getattr(self, name)
            value = (value,) if name == "stop" and isinstance(value, str) else value
            if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
                raise RequestError(f"{name} must be a list, got {value!r}")
            object.__setattr__(self, name, tuple(value or ()))
        check_options(self, RequestError)
        if self.max_tokens is not None and self.max_tokens < self.min_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        for name in _TEXTS:
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                found = list(getattr(self, name))
                raise RequestError(f"{name} must be non-empty strings, got {found!r}")
        for name in _IDS:
            if not all(type(i) is int and i >= 0 for i in getattr(self, name)):
                found = list(getattr(self, name))
                raise RequestError(f"{name} must be token ids (0 or more), got {found!r}")
        if self.guide is not None and not isinstance(self.guide, Guide):
            raise RequestError(f"guide must be a Guide, got {self.guide!r}")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def filters_tokens(self) -> bool:
        """Whether allowed_token_ids or bad_words restrict the output."""
        return bool(self.allowed_token_ids or self.bad_words)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "SamplingParams":
        """The same, with these values of the fields that were left out. Raises RequestError."""
        if not defaults:
            return self
        given = {name: getattr(self, name) for name in self.given}
        return SamplingParams(**{**defaults, **given})

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SamplingParams, **{name: getattr(self, name) for name in self.given}), ()

    def __repr__(self) -> str:
        """The fields that differ from their defaults."""
        given = [
            f"{one.name}={_SHORT.repr(value)}"
            for one in fields(self)
            if (value := getattr(self, one.name)) != one.default
        ]
        return f"SamplingParams({', '.join(given)})"


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


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model, before temperature and filters.

    Attributes:
        logprob: the natural logarithm of the probability.
        rank: the token's rank by probability; 1 is the most likely token.
        decoded_token: the token's text.
    """

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: index among the n continuations.
        text: the generated text; by default without the stop string and without special tokens.
        token_ids: every generated token, including the token that ended the output.
        finish_reason: "stop" (end of sequence, stop string or id), "length" (max_tokens is reached,
            the context is full, or a tool call of a chat is broken or has no end), "error",
            "abort" (the engine was told to end all requests), or None while the request runs.
        stop_reason: the stop string or stop token id that ended the output, if any.
        logprobs: one dict for each generated token, from token id to Logprob; None unless the
            request asked for them.
        message: the parsed answer of a chat: role, content, reasoning_content, tool_calls.
        routed_experts: ids of the experts of all generated tokens except the last, which the model
            never computes: [tokens - 1, layers, top-k]. None while the continuation runs, and
            unless the request asked for them.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    message: dict[str, Any] | None = None
    routed_experts: ExpertIds | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """A short form, which counts the tokens."""
        shown = f"text={_SHORT.repr(self.text)}, token_ids=<{len(self.token_ids)}>"
        shown += f", finish_reason={self.finish_reason!r}"
        if self.stop_reason is not None:
            shown += f", stop_reason={_SHORT.repr(self.stop_reason)}"
        if self.logprobs is not None:
            shown += f", logprobs=<{len(self.logprobs)}>"
        if self.routed_experts is not None:
            shown += f", routed_experts=<{len(self.routed_experts)}>"
        if self.message is not None:
            shown += f", message={_SHORT.repr(self.message)}"
        return f"CompletionOutput(index={self.index}, {shown})"


@dataclass(slots=True)
class RequestTimes:
    """When the engine worked on a request: times of this machine's clock `time.monotonic()`.

    Attributes:
        arrival: the engine received the request.
        admission: continuation 0 got its cache pages. Its prefill began.
        first_token: continuation 0 got its first token.
        last_token: the last token of the continuations that have ended.
    """

    arrival: float
    admission: float
    first_token: float
    last_token: float


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How far the engine has read a prompt.

    Attributes:
        total: number of the prompt's tokens.
        cached: how many of them the prefix cache had.
        processed: number of tokens that are cached, computed or being computed.
        seconds: since the prefill began.
    """

    total: int
    cached: int
    processed: int
    seconds: float


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        request_id: a name that is unique in the process.
        prompt: the prompt's text; None if the caller gave token ids.
        prompt_token_ids: the prompt's token ids.
        outputs: n continuations.
        finished: whether the request has ended.
        error: why the request failed, in one line; None if it did not.
        num_cached_tokens: number of prompt tokens that the prefix cache had.
        prompt_logprobs: for each prompt token, a dict from token id to Logprob: its own and the
            most likely ones; None for the first token. None unless the request asked for them.
            Complete once the first token is generated.
        times: when the engine worked on the request; None before its first token.
        prompt_routed_experts: ids of the experts of each prompt token: [tokens, layers, top-k].
            None before the first token is generated, and unless the request asked for them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    error: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    times: RequestTimes | None = field(default=None, compare=False)
    prompt_routed_experts: ExpertIds | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """A short form, which counts the tokens and shows few of the outputs."""
        shown = (
            f"prompt={_SHORT.repr(self.prompt)}, prompt_token_ids=<{len(self.prompt_token_ids)}>"
        )
        outputs = [repr(output) for output in self.outputs[:_SHOWN_OUTPUTS]]
        if len(self.outputs) > _SHOWN_OUTPUTS:
            outputs.append(f"... {len(self.outputs)} in all")
        shown += f", outputs=[{', '.join(outputs)}], finished={self.finished}"
        if self.error is not None:
            shown += f", error={_SHORT.repr(self.error)}"
        return f"RequestOutput(request_id={self.request_id!r}, {shown})"


_SHOWN_OUTPUTS = 3
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
