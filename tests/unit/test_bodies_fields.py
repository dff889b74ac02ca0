"""Fields of request bodies: what checking them costs."""

import pytest
from pydantic import ValidationError

from finwhale.server.protocols.schemas import ChatBody, CompletionBody


@pytest.mark.parametrize("wrong", [101, "5", True, None, [1], float("nan")])
def test_a_logit_bias_has_one_error(wrong: object) -> None:
    body = {
        "model": "m",
        "prompt": "x",
        "logit_bias": {"1": 2.5, **{str(i): wrong for i in range(2, 999)}},
    }
    with pytest.raises(ValidationError) as refused:
        CompletionBody.model_validate(body)
    (error,) = refused.value.errors()
    assert error["loc"] == ("logit_bias", "2")


def test_a_right_logit_bias_keeps_its_values() -> None:
    bias = {str(i): i / 10 - 50 for i in range(1000)}
    messages = [{"role": "user", "content": "x"}]
    body = ChatBody.model_validate({"model": "m", "messages": messages, "logit_bias": bias})
    assert body.logit_bias == bias
