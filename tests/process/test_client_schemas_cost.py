"""A client's schema costs deepseek-recipe no more than its size, in any protocol or in LLM.chat."""

import os
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from finwhale.chat.template import ProtocolName, _convert, convert

Fields = dict[str, Any]
ASKED = [{"role": "user", "content": "x"}]


def chain() -> Fields:
    definitions = {str(i): {"properties": {"a": ref(i + 1)}} for i in range(5000)}
    return {"$defs": {**definitions, "5000": {}}}


def fan() -> Fields:
    definitions = {
        str(i): {"allOf": [ref(i + 1)] * 2, "unevaluatedProperties": False} for i in range(40)
    }
    return {"$defs": {**definitions, "40": {}}}


def patterns() -> Fields:
    return {"patternProperties": {rf"(?=a)\w{{150}}{i}": True for i in range(300)}}


def ref(i: int) -> Fields:
    return {"$ref": f"#/$defs/{i}"}


@pytest.mark.parametrize("make", [chain, fan, patterns])
def test_no_schema_costs_more_than_its_size(make: Callable[[], Fields]) -> None:
    """deepseek-recipe would overflow its stack, take hours, or take 3 GiB."""
    schema = {"type": "object", "properties": {"x": ref(0)}, **make()}
    function = {"name": "f", "parameters": schema}
    tool = {"type": "function", "function": function}
    json_format = {"type": "json_schema", "name": "x", "schema": schema}
    space = {"type": "namespace", "name": "n", "description": "d"}
    ways: list[tuple[ProtocolName, Fields]] = [
        ("chat", {"messages": ASKED, "tools": [tool]}),
        ("chat", {"messages": ASKED, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        ("responses", {"input": "x", "tools": [
            {**space, "tools": [{"type": "function", **function}]}]}),
        ("responses", {"input": "x", "text": {"format": json_format}}),
        ("messages", {"messages": ASKED, "max_tokens": 1, "tools": [
            {"name": "f", "input_schema": schema, "strict": True}]}),
    ]  # fmt: skip
    for protocol, body in ways:
        child = partial(convert, protocol, body, default_thinking=False)
        assert in_a_child(child) == 0, (protocol, body.keys())
    assert in_a_child(lambda: _convert(ASKED, True, [tool])) == 0


def in_a_child(work: Callable[[], object]) -> int:
    """The exit code of a forked process that does the work; negative: the signal that ended it."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
