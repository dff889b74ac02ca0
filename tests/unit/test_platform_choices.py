"""Only tables choose by platform: no code below them asks for a GPU's vendor or capability."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import finwhale

ROOT = Path(finwhale.__file__).parent
# Tables choose. What compiles kernels ahead has to name the GPU that it compiles for.
CHOOSING = ("ops/__init__.py", "ops/tables/", "ops/builds/")
ASKING = {
    "get_device_capability",
    "get_device_properties",
    "get_device_name",
    "get_current_target",
    "cuda_capability_geq",
    "is_hopper",
    "is_hip",
    "hip",
    "vendor",
    "arch",
    "portable",
}


def sources() -> Iterator[tuple[str, Path]]:
    for package in ("ops", "models"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(CHOOSING):
                yield name, path


def guards_import(node: ast.AST) -> bool:
    """Whether a module is imported only if a condition or another import allows it."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return False
    if not isinstance(node, ast.If | ast.Try):
        return False
    return any(isinstance(part, ast.Import | ast.ImportFrom) for part in node.body)


def asks(node: ast.AST) -> str | None:
    """The name by which a node asks for the platform."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
            return name if name in ASKING else None
        case ast.keyword(arg=str(name)) | ast.alias(name=name):
            return name if name in ASKING else None
    return None


def faults(code: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(code)):
        name = asks(node)
        if name is not None:
            found.append(f"line {getattr(node, 'lineno', '?')} asks for {name}")
        if guards_import(node):
            found.append(f"line {getattr(node, 'lineno', '?')} guards an import")
    return found


@pytest.mark.parametrize("name, path", list(sources()), ids=lambda value: str(value))
def test_code_below_the_tables_does_not_ask(name: str, path: Path) -> None:
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    "code",
    [
        "plan = a if torch.cuda.get_device_capability(x.device) == (9, 0) else b",
        "FAST = torch.version.hip is None",
        "def experts(x, *, portable=False): pass",
        "experts(x, portable=True)",
        "if platform.vendor == 'nvidia': run()",
        "from finwhale.ops.attention.hopper import is_hopper",
        "if FAST:\n    from finwhale.ops.attention import hopper",
        "try:\n    import deep_gemm\nexcept ImportError:\n    deep_gemm = None",
    ],
)
def test_code_that_asks_is_found(code: str) -> None:
    assert faults(code)


def test_code_that_does_not_ask_is_not_found() -> None:
    assert not faults("if TYPE_CHECKING:\n    from torch import Tensor")
    assert not faults("options = {'maxnreg': 128} if inline_asm else {}")
