"""The optional packages: which extra of finwhale installs them, and for what."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from finwhale.errors import FinwhaleError

EXTRAS = {
    "server": (
        "finwhale serve",
        (
            "fastapi", "fastapi_offline", "uvicorn", "prometheus_client", "starlette", "pydantic",
            "h11", "python_multipart",
        ),
    ),
    "trace": ("sending OpenTelemetry traces", ("opentelemetry.sdk", "opentelemetry.exporter.otlp")),
    "events": ("publishing KV events", ("zmq", "msgspec")),
    "hub": ("downloading checkpoints by name", ("huggingface_hub",)),
    "bench": ("finwhale bench serving", ("aiohttp",)),
    "completion": ("completion in shells", ("shtab",)),
    "ray": ("placing ranks on a Ray cluster", ("ray",)),
}  # fmt: skip
# `finwhale doctor` says more about this one.
_NVIDIA = {"nvidia": ("prefill with DeepGEMM", ("deep_gemm",))}


def advice(error: ModuleNotFoundError) -> str | None:
    """Which extra has a missing package, in one line; None: none has it."""
    package = (error.name or "").partition(".")[0]
    for extra, (purpose, modules) in (EXTRAS | _NVIDIA).items():
        if package in {module.partition(".")[0] for module in modules}:
            return f"{purpose} needs {package}: pip install 'finwhale[{extra}]'"
    return None


@contextmanager
def named_extras() -> Iterator[None]:
    """If a package is missing that an extra has, the error of its import names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        text = advice(error)
        if text is None:
            raise
        raise ModuleNotFoundError(text, name=error.name, path=error.path) from error


def import_extra(module: str) -> Any:
    """A module that needs an extra. Raises FinwhaleError if its packages are missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if advice(error) is None:
            raise
        raise FinwhaleError(str(error)) from error


def need(extra: str) -> None:
    """Raises ModuleNotFoundError if a package of an extra is missing. Imports none of them."""
    with named_extras():
        for module in EXTRAS[extra][1]:
            if find_spec(module) is None:
                raise ModuleNotFoundError(name=module)
