"""Finwhale: an inference and serving engine for DeepSeek-V4.

Public names are resolved when they are used; importing the package starts nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finwhale.errors import CheckpointError, FinwhaleError, RequestError, ResourceError
    from finwhale.llm import LLM
    from finwhale.request import CompletionOutput, Logprob, RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "CheckpointError",
    "CompletionOutput",
    "FinwhaleError",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "ResourceError",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "finwhale.llm",
    "CheckpointError": "finwhale.errors",
    "FinwhaleError": "finwhale.errors",
    "RequestError": "finwhale.errors",
    "ResourceError": "finwhale.errors",
    "CompletionOutput": "finwhale.request",
    "Logprob": "finwhale.request",
    "RequestOutput": "finwhale.request",
    "SamplingParams": "finwhale.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'finwhale' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
