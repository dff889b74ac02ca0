"""Optional packages of kernels: whether a table can use them, and if not, why.

`why_no_deepgemm` imports nothing. `deepgemm` imports the package once; if it is too old or its
import fails, the function logs one line and the table uses other kernels.
"""

import importlib.metadata
import logging
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from types import ModuleType

logger = logging.getLogger(__name__)

# The names of DeepGEMM's builds on package registries, and the oldest release that has the
# functions that Finwhale calls.
DEEPGEMM_NAMES = ("tokenspeed-deepgemm", "deep-gemm", "sgl-deep-gemm")
DEEPGEMM_LEAST = (2, 5)


@cache
def why_no_deepgemm() -> str | None:
    """Why DeepGEMM cannot be used, without importing it; None if no reason is known."""
    if find_spec("deep_gemm") is None:
        return "not installed"
    for name, version in _deepgemm_builds():
        numbers = takewhile(str.isdigit, version.split("."))
        if tuple(map(int, numbers)) < DEEPGEMM_LEAST:
            least = ".".join(map(str, DEEPGEMM_LEAST))
            return f"{name} {version} is too old: {least} or later is needed"
    return None


def _deepgemm_builds() -> list[tuple[str, str]]:
    """The names and versions of the installed builds of DeepGEMM."""
    installed = []
    for name in DEEPGEMM_NAMES:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed.append((name, importlib.metadata.version(name)))
    return installed


def packages() -> tuple[str, ...]:
    """Names and versions of the packages that the table uses."""
    if deepgemm() is None:
        return ()
    return tuple(map(" ".join, _deepgemm_builds())) or ("DeepGEMM",)


@cache
def deepgemm() -> ModuleType | None:
    """Import ops/linear/linear_deepgemm.py; None if DeepGEMM cannot be used."""
    reason = why_no_deepgemm()
    if reason is None:
        try:
            return importlib.import_module("finwhale.ops.linear.linear_deepgemm")
        except Exception as error:  # A broken package can raise any exception.
            said = (str(error).strip() or "no reason given").splitlines()[0]
            reason = f"its import failed, {type(error).__name__}: {said}"
    if reason != "not installed":
        logger.warning("Triton kernels replace DeepGEMM's: %s", reason)
    return None


def notes() -> list[str]:
    """One line for each optional package that the table cannot use."""
    if deepgemm() is not None:
        return []
    reason = why_no_deepgemm() or "its import failed"
    return [f"DeepGEMM is not used: {reason}; Triton kernels replace it"]
