"""SamplingParams: absurd values give one clear line."""

import math
from typing import Any

import pytest

from finwhale.errors import RequestError
from finwhale.request import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("n", v) for v in (0, -1, 5000, 1.0, 1.5, True, None, "2", list[int]())],
        *[("max_tokens", v) for v in (0, -1, 1.5, True, "8")],
        *[("temperature", v) for v in (-0.1, 101, math.nan, math.inf, None, "hot", True, 1j)],
        *[("top_k", v) for v in (-2, 1.5, 2**31, None, "5", False)],
        *[("top_p", v) for v in (0, -0.5, 1.0001, math.nan, None, "1")],
        *[("min_p", v) for v in (-0.1, 1.1, math.nan, None)],
        *[("repetition_penalty", v) for v in (0, 0.0, 5e-324, -1, 101, math.inf, math.nan)],
        *[("presence_penalty", v) for v in (-101, 101, math.nan, None)],
        *[("frequency_penalty", v) for v in (-101, 101, math.inf, "x")],
        *[("stop", v) for v in ("", ["a", ""], [1], ["a", None], 7, b"x", {"a": 1}.items())],
        *[("stop_token_ids", v) for v in ([-1], ["1"], [1.0], [None], [True], 5, "12")],
        *[("seed", v) for v in (1.5, "7", True)],
        *[("logprobs", v) for v in (-1, 101, 1.5, True, "3")],
        *[("ignore_eos", v) for v in ("no", 1, None)],
    ],
)
def test_absurd_values(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as error:
        SamplingParams(**{name: value})
    message = str(error.value)
    assert message.startswith(name)
    assert "\n" not in message


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"n": 4096, "max_tokens": None, "temperature": 0, "top_k": -1, "top_p": 1, "min_p": 0},
        {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1e-9, "min_p": 1, "logprobs": 0},
        {"repetition_penalty": 1e-3, "presence_penalty": -100, "frequency_penalty": 100},
        {"seed": -(2**70), "logprobs": 100, "stop_token_ids": (0, 129279)},
    ],
)
def test_extreme_values_that_are_fine(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        assert getattr(params, name) == value


def test_stop_is_a_tuple() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_params_are_frozen_and_hashable() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    with pytest.raises(AttributeError):
        params.n = 2  # type: ignore[misc]
    assert hash(params) == hash(SamplingParams(stop=["a"], stop_token_ids=[1]))
