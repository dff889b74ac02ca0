"""The sources of all kernels, and the functions in them that Triton compiles."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import finwhale

OPS = Path(finwhale.__file__).parent / "ops"
SOURCES = sorted(OPS.rglob("*.py"))


def kernels(source: str) -> Iterator[ast.FunctionDef]:
    """Functions that Triton compiles."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            if "jit" in decorators or "kernel" in decorators:
                yield node


@cache
def kernel_names() -> set[str]:
    """What is launched, such as "norm.rms_norm_triton._rms_norm_kernel"."""
    found = set()
    for path in SOURCES:
        module = ".".join(path.relative_to(OPS).with_suffix("").parts)
        for function in kernels(path.read_text()):
            if function.name.endswith("_kernel"):
                found.add(f"{module}.{function.name}")
    return found
