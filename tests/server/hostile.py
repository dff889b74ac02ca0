"""Grammars that have stopped a server: by the stack they need, or by the time."""

from typing import Any

# Primes: a number that is a multiple of one is matched by an automaton of as many states.
_PRIMES = (999983, 999979, 999961, 999959, 999953, 999931)


def chained_definitions(count: int) -> dict[str, Any]:
    """A schema whose definitions each refer to the next: 94 kB for 1,000."""
    definitions: dict[str, Any] = {
        f"definition_{i}": {
            "type": "object",
            "properties": {"next": {"$ref": f"#/$defs/definition_{i + 1}"}},
        }
        for i in range(count)
    }
    definitions[f"definition_{count}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/definition_0"}


def chained_rules(count: int) -> str:
    """A Lark grammar whose rules each refer to the next."""
    rules = [f'rule_{i}: "a" rule_{i + 1}' for i in range(count)]
    return "\n".join(["start: rule_0", *rules, f'rule_{count}: "b"'])


# How it is refused: a fast machine meets the limit of memory first.
TOO_EXPENSIVE = "takes more than (1 s of CPU time|128 MiB of memory)"


def expensive_schema(which: int) -> dict[str, Any]:
    """A small schema that takes ten seconds and 390 MiB to compile."""
    return {"type": "integer", "multipleOf": _PRIMES[which]}


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def many_properties(count: int) -> dict[str, Any]:
    """A schema of optional properties: each mask considers all of them."""
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


# Schemas of a value, and the status of a request that has one.
HOSTILE_SCHEMAS: dict[str, tuple[dict[str, Any], int]] = {
    "3,000 properties": (many_properties(3000), 400),
    "optional letters": ({"type": "string", "pattern": "^(a?){1000}a{1000}$"}, 200),
    "23 patterns": (
        {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}b.*$"} for i in range(23)]},
        400,
    ),
    "chained definitions": (chained_definitions(1000), 400),
    "a large prime": (expensive_schema(2), 400),
    "nested arrays": (nested_schema(70), 400),
    "a huge enum": ({"enum": list(range(100_000))}, 400),
    "a billion items": ({"type": "array", "minItems": 10**9, "items": {"type": "null"}}, 200),
    "at most a billion items": (
        {"type": "array", "maxItems": 10**9, "items": {"type": "null"}},
        200,
    ),
    "too many items": ({"type": "array", "minItems": 10**30}, 400),
    "a billion letters": ({"type": "string", "pattern": "^a{1000000000}$"}, 200),
    "too many letters": ({"type": "string", "pattern": "^a{99999999999999999999}$"}, 200),
    "a circle": ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, 200),
    "a type that is a number": ({"type": "integer", "minimum": "x"}, 400),
    "half a character": ({"enum": ["\ud800"]}, 400),
}

# Their trials take about a second. These ways give the same grammar, which has one trial.
EXPENSIVE = {"3,000 properties", "a huge enum", "23 patterns", "a large prime"}
ONE_GRAMMAR = {"chat required tool", "responses required tool", "messages any tool"}


def ways_in(schema: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests in whose answers a value must match `schema`: name -> (path, body)."""
    arguments = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    asked = {"messages": [{"role": "user", "content": "json"}], "max_tokens": 2}
    function = {"name": "f", "parameters": arguments}
    chat_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    chat, responses, messages = "/v1/chat/completions", "/v1/responses", "/v1/messages"
    answer = {"input": "json", "max_output_tokens": 2}
    tool = {"name": "f", "input_schema": arguments}
    return {
        "chat format": (chat, {**asked, "response_format": chat_format}),
        "chat required tool": (chat, {**asked, "tool_choice": "required",
            "tools": [{"type": "function", "function": function}]}),
        "chat strict tool": (chat, {**asked,
            "tools": [{"type": "function", "function": {**function, "strict": True}}]}),
        "completions format": (
            "/v1/completions", {"prompt": "x", "max_tokens": 2, "response_format": chat_format}),
        "responses format": (responses, {**answer,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}),
        "responses required tool": (responses, {**answer, "tool_choice": "required",
            "tools": [{"type": "function", **function}]}),
        "responses strict tool": (responses, {**answer,
            "tools": [{"type": "function", **function, "strict": True}]}),
        "messages format": (messages, {**asked,
            "output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        "messages any tool": (messages, {**asked, "tools": [tool], "tool_choice": {"type": "any"}}),
        "messages named tool": (
            messages, {**asked, "tools": [tool], "tool_choice": {"type": "tool", "name": "f"}}),
    }  # fmt: skip
