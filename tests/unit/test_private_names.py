"""A name that begins with an underscore is used in its own file only."""

import ast
from pathlib import Path

import finwhale

ROOT = Path(finwhale.__file__).parent


def test_no_file_imports_a_private_name_of_another() -> None:
    """Triton kernels are named `_..._kernel`; the files of an operator family may share them."""
    found = []
    for path in ROOT.rglob("*.py"):
        family = "finwhale." + ".".join(path.parent.relative_to(ROOT).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "finwhale"
            ):
                continue
            shared = family.startswith("finwhale.ops.") and (node.module or "").startswith(family)
            for alias in node.names:
                private = alias.name.startswith("_") and not alias.name.startswith("__")
                if private and not (shared and alias.name.endswith("_kernel")):
                    found.append(f"{path.relative_to(ROOT)}: {node.module}.{alias.name}")
    assert found == []
