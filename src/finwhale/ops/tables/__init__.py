"""The operator tables, one for each platform."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any

# Default capacity of the prefix cache on GPUs. Flash needs 65 GB for it.
PREFIX_CACHE_TOKENS = 2**24


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
                    yield f"{field.name}={getattr(value, field.name)!r}"
        else:
            yield f"{name}={value!r}"
