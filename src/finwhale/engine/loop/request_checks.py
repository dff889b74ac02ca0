"""Checks a request's prompt and parameters before the engine begins work on it."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from finwhale.chat.grammar import Matcher
from finwhale.chat.tokenizer import Tokenizer
from finwhale.engine.plan.executor import RankDescription
from finwhale.engine.plan.token_filter import TokenFilter
from finwhale.errors import RequestError
from finwhale.request import MAX_PROMPT_LOGPROBS, SamplingParams


def checked_prompt(
    prompt: Sequence[int],
    params: SamplingParams,
    rank: RankDescription,
    vocab: int,
    *,
    has_tokenizer: bool,
) -> list[int]:
    """Check a prompt and return its ids as plain integers.

    Raises:
        RequestError: the prompt or a parameter is not valid for this model.
    """
    if not prompt:
        raise RequestError("the prompt is empty: give at least one token")
    tokens = list(prompt)
    ids = list(map(_index, tokens)) if {*map(type, tokens)} != {int} else tokens
    if min(ids) < 0 or max(ids) >= vocab:
        position = next(i for i, number in enumerate(ids) if not 0 <= number < vocab)
        raise RequestError(
            f"prompt token {position} is {tokens[position]!r}: token ids are integers in "
            f"0..{vocab - 1}"
        )
    if len(prompt) >= rank.max_model_len:
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, but prompt and output together have room "
            f"for {rank.max_model_len}: shorten it, or raise max_model_len or the cache's memory"
        )
    if params.prompt_logprobs is not None:
        wanted = len(prompt) * (1 + params.prompt_logprobs)
        if wanted > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt_logprobs {params.prompt_logprobs} of {len(prompt)} tokens are {wanted} "
                f"values, and a request may have {MAX_PROMPT_LOGPROBS}: ask for fewer, or shorten "
                "the prompt"
            )
    if params.stop and not has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and this checkpoint has none")
    _check_ids("stop_token_ids", params.stop_token_ids, vocab)
    _check_ids("logit_bias", params.logit_bias or (), vocab)
    if params.return_routed_experts and rank.routed_experts is None:
        raise RequestError(
            "return_routed_experts needs an engine that was started with "
            "enable_return_routed_experts (--enable-return-routed-experts)"
        )
    return ids


def _check_ids(name: str, token_ids: Iterable[int], vocab: int) -> None:
    wrong = next((i for i in token_ids if i >= vocab), None)
    if wrong is not None:
        raise RequestError(f"{name}: token id {wrong} is not in 0..{vocab - 1}")


def _index(token: Any) -> int:
    """A token id as a plain integer; -1 if the value is not an integer."""
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        return -1
    return operator.index(token)


def end_tokens(params: SamplingParams, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The token ids that end an output."""
    return frozenset((*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)))


def new_filter(
    params: SamplingParams, tokenizer: Tokenizer | None, vocab: int
) -> TokenFilter | None:
    """The filter of a request's tokens; None: it removes none. Raises RequestError.

    128 words take up to 50 ms, so call it beside the step loop.
    """
    if not params.filters_tokens:
        return None
    _check_ids("allowed_token_ids", params.allowed_token_ids, vocab)
    bad: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        if tokenizer is None:
            raise RequestError("bad_words needs a tokenizer, and this checkpoint has none")
        for text in (word, f" {word}"):
            bad[tuple(tokenizer.encode(text))] = None
    return TokenFilter(params.allowed_token_ids, list(bad), vocab)


def new_matcher(params: SamplingParams, tokenizer: Tokenizer | None) -> Matcher | None:
    """Compile the guide that the output must match; None: no guide. Raises RequestError."""
    if params.guide is None:
        return None
    if tokenizer is None:
        raise RequestError("a guide needs a tokenizer, and this checkpoint has none")
    return Matcher(tokenizer, params.guide)
