"""Request bodies to sampling parameters."""

from typing import Any

from finwhale.errors import RequestError
from finwhale.request import Guide, SamplingParams
from finwhale.server.schemas import _OpenAISampling, _Sampling

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "seed",
)


def sampling_params(
    body: _Sampling,
    *,
    max_tokens: int | None,
    stop: tuple[str, ...] = (),
    logprobs: int | None = None,
    guide: Guide | None = None,
    defaults: dict[str, Any] | None = None,
) -> SamplingParams:
    """The parameters that `body` asks for.

    Args:
        defaults: values of fields that the client left out.

    Raises:
        RequestError: a value is out of range.
    """
    given = {name: getattr(body, name, None) for name in _SAME}
    values = (defaults or {}) | {k: v for k, v in given.items() if v is not None}
    bias = _logit_bias(body.logit_bias) if isinstance(body, _OpenAISampling) else None
    return SamplingParams(
        **values,
        max_tokens=max_tokens,
        stop=stop,
        logprobs=logprobs,
        guide=guide,
        logit_bias=bias,
    )


def as_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings as a client may write them. Raises RequestError for an empty one."""
    several = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(several):
        raise RequestError("stop strings must not be empty")
    return several


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    for key in bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise RequestError(f"logit_bias must have token ids as keys, got {key[:40]!r}")
    return {int(key): value for key, value in bias.items()}
