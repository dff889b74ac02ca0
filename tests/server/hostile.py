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
