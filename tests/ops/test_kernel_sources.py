"""What no kernel's source may hold, for Triton compiles it to something else, or twice."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .kernel_sources import SOURCES, kernels

LOST = """
@gluon.jit
def load(rings, ahead, blocks, TILES):
    slot = 0
    start = ahead
    for t in range(TILES):
        for k in range(start, blocks):
            slot = use(rings, slot, t, k)
        start = 0
    return slot
"""


def names(nodes: list[ast.AST], context: type[ast.expr_context]) -> set[str]:
    found = (node for one in nodes for node in ast.walk(one))
    return {n.id for n in found if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


def lost(kernel: ast.FunctionDef) -> set[str]:
    """Variables that a `for` carries and that nothing reads but the bounds of `for`s in it.

    Triton 3.6 takes their first value for each iteration.
    """
    found: set[str] = set()
    for loop in ast.walk(kernel):
        if not isinstance(loop, ast.For) or "static_range" in ast.unparse(loop.iter):
            continue
        inner = [node for one in loop.body for node in ast.walk(one) if isinstance(node, ast.For)]
        bounds = {id(node) for one in inner for node in ast.walk(one.iter)}
        carried = names([*loop.body], ast.Store)
        # An update of the variable itself is no other use of it.
        updates = {
            id(node)
            for one in loop.body
            for statement in ast.walk(one)
            if isinstance(statement, ast.Assign | ast.AugAssign)
            and (targets := names([statement], ast.Store))
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and node.id in targets
        }
        elsewhere = {
            node.id
            for node in ast.walk(kernel)
            if isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and id(node) not in bounds | updates
            and node.lineno > loop.lineno
        }
        found |= carried & names([one.iter for one in inner], ast.Load) - elsewhere
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_loop_carries_what_only_bounds_read(path: Path) -> None:
    assert {kernel.name: lost(kernel) for kernel in kernels(path.read_text()) if lost(kernel)} == {}


def test_a_variable_that_only_bounds_read_is_found() -> None:
    assert [lost(kernel) for kernel in kernels(LOST)] == [{"start"}]


@pytest.mark.kernels
def test_a_kernel_s_key_does_not_depend_on_the_order_of_kernels() -> None:
    """Else what one process compiled is compiled again by the next: a constant of a module that
    a function reads, which kernels share, is a part of the key or not.
    """
    pytest.importorskip("triton", reason="needs triton, which is installed with the GPU packages")
    script = str(Path(__file__).parent / "kernel_keys.py")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    printed = subprocess.check_output([sys.executable, script], env=env, text=True)
    forward, backward = map(json.loads, printed.splitlines())
    assert len(forward) > 30
    assert {name for name in forward if forward[name] != backward[name]} == set()
