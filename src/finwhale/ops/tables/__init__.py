"""One table of operators a platform."""

from collections.abc import Callable
from functools import wraps
from typing import Any

# Prefixes outlive the requests that computed them: 65 GB for Flash.
PREFIX_CACHE_TOKENS = 2**24


def always(fn: Callable[..., Any], **options: Any) -> Any:
    """`fn` with these options."""

    @wraps(fn)
    def call(*args: Any) -> Any:
        return fn(*args, **options)

    return call
