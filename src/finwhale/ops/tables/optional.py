"""Optional packages of kernels: whether a table can use them, and why not.

Asking whether one is there imports nothing; a table that wants it imports it once, and goes on
without it, with one line, where it is too old or fails.
"""

import importlib.metadata
import logging
from functools import cache
from importlib.util import find_spec
from types import ModuleType

logger = logging.getLogger(__name__)

# What builds of DeepGEMM are called on package registries, and the first release with what is used.
DEEPGEMM_NAMES = ("tokenspeed-deepgemm", "deep-gemm", "sgl-deep-gemm")
DEEPGEMM_LEAST = (2, 5)


@cache
def why_no_deepgemm() -> str | None:
    """Why DeepGEMM cannot be used, as far as can be said without importing it; None: it can."""
    if find_spec("deep_gemm") is None:
        return "not installed"
    for name in DEEPGEMM_NAMES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if _release(version) < DEEPGEMM_LEAST:
            least = ".".join(map(str, DEEPGEMM_LEAST))
            return f"{name} {version} is too old, {least} or later is wanted"
    return None


def has_deepgemm() -> bool:
    return why_no_deepgemm() is None


@cache
def deepgemm() -> ModuleType | None:
    """The module ops/linear/linear_deepgemm.py, or None if DeepGEMM cannot be used."""
    reason = why_no_deepgemm()
    if reason is None:
        try:
            return importlib.import_module("finwhale.ops.linear.linear_deepgemm")
        except Exception as error:  # a package that fails while it is imported may raise anything
            said = (str(error).strip() or "no reason given").splitlines()[0]
            reason = f"importing it failed, {type(error).__name__}: {said}"
    if reason != "not installed":
        logger.warning("Triton kernels run instead of DeepGEMM's: %s", reason)
    return None


def notes() -> list[str]:
    """One line for each package that a table does without."""
    if deepgemm() is not None:
        return []
    reason = why_no_deepgemm() or "importing it failed"
    return [f"DeepGEMM is not used: {reason}; Triton kernels run instead"]


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
