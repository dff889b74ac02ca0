"""Finwhale: an inference and serving engine for DeepSeek-V4.

Importing the package starts nothing: each public name is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finwhale.async_llm import AsyncLLM
    from finwhale.engine.loop.weight_updates import BroadcastTensors, SharedTensors
    from finwhale.errors import (
        CheckpointError,
        EngineDeadError,
        FinwhaleError,
        RequestError,
        ResourceError,
    )
    from finwhale.llm import LLM
    from finwhale.request import CompletionOutput, Guide, Logprob, RequestOutput, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BroadcastTensors",
    "CheckpointError",
    "CompletionOutput",
    "EngineDeadError",
    "FinwhaleError",
    "Guide",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "ResourceError",
    "SamplingParams",
    "SharedTensors",
    "__version__",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'finwhale' has no attribute {name!r}")
    if name == "LLM":
        return import_module("finwhale.llm").LLM
    if name == "AsyncLLM":
        return import_module("finwhale.async_llm").AsyncLLM
    if name.endswith("Tensors"):
        return getattr(import_module("finwhale.engine.loop.weight_updates"), name)
    home = "errors" if name.endswith("Error") else "request"
    return getattr(import_module(f"finwhale.{home}"), name)
