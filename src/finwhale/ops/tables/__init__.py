"""The operator tables, one for each platform."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any


def bind(fn: Callable[..., Any], **options: Any) -> Any:
    """Bind keyword arguments to an operator. `__qualname__` has them for `finwhale ops`."""

    @wraps(fn)
    def call(*args: Any) -> Any:
        return fn(*args, **options)

    call.__qualname__ = f"{fn.__qualname__}({', '.join(_shown(options))})"
    return call


def _shown(options: Mapping[str, Any]) -> Iterator[str]:
    """The options as text; a dataclass shows only the fields that differ from their defaults."""
    for name, value in options.items():
        if is_dataclass(value):
            for field in fields(value):
                if getattr(value, field.name) != field.default:
                    yield f"{field.name}={_text(getattr(value, field.name))}"
        else:
            yield f"{name}={_text(value)}"


def _text(value: Any) -> str:
    """The value as text that is the same in every process: a function's name, not its address."""
    if callable(value):
        return f"{value.__module__.rpartition('.')[2]}.{value.__qualname__}"
    return repr(value)
