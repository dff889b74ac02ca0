"""Compiles a graph to a file and loads it: one form of file for a CPU, one for a GPU.

On a CPU a graph is a shared library (AOTInductor), of which a call costs 2 to 4 us. On a GPU
captured steps hide the cost of a call, so a graph is a Python module, which needs no C++ compiler.
"""

import importlib
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram

from finwhale.errors import ResourceError

# A compiled graph. A call empties the list of its arguments.
Graph = Callable[[list[Tensor]], list[Tensor]]


def _compile_library(program: ExportedProgram, path: Path) -> None:
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs={"cpp.threads": 1}
    )


def _load_library(path: Path) -> Graph:
    """Load a library. The operators that it calls must be registered.

    This calls torch's loader directly: torch._inductor, which wraps it, takes seconds to import.
    """
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    return cast(Graph, loader.boxed_run)


# By default, inductor chooses kernels by timing, which differs from start to start, and compiles
# Triton kernels in other processes, which write them elsewhere.
MODULE_CONFIG = {"deterministic": True, "compile_threads": 1}


def _compile_module(program: ExportedProgram, path: Path) -> None:
    assert not program.constants and not program.state_dict
    nodes = program.graph.nodes
    values = [node.meta["val"] for node in nodes if node.op == "placeholder"]
    context = torch._guards.TracingContext(values[0].fake_mode)
    with torch._guards.tracing(context):
        artefact = torch._inductor.standalone_compile(
            program.graph_module,
            values,
            dynamic_shapes="from_tracing_context",
            aot=True,
            options={"config_patches": MODULE_CONFIG},
        )
    artefact.save(path=str(path))


def _load_module(path: Path) -> Graph:
    """Like _load_library."""
    inductor: Any = importlib.import_module("torch._inductor")
    artefact = inductor.CompiledArtifact.load(path=str(path))

    def run(arguments: list[Tensor]) -> list[Tensor]:
        return list(artefact(*arguments))

    return run


TRIAL = """
import sys, torch
torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", True, 1, -1)
"""
# The package's entry that lists the operators that it calls. The trial process registers none.
OPERATORS = ".wrapper.json"


def _try_to_load(path: Path, name: str) -> None:
    """Load a library in a separate process, which crashes if compiler and torch are incompatible.

    Raises:
        ResourceError: the process died or failed.
    """
    copy = path.with_suffix(".trial")
    try:
        with zipfile.ZipFile(path) as package, zipfile.ZipFile(copy, "w") as code:
            for entry in package.infolist():
                if not entry.filename.endswith(OPERATORS):
                    code.writestr(entry, package.read(entry))
        command = [sys.executable, "-c", TRIAL, str(copy)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        copy.unlink(missing_ok=True)
    if done.returncode < 0:
        how = f"crashes with {signal.Signals(-done.returncode).name}"
    elif done.returncode:
        how = f"fails: {['', *done.stderr.strip().splitlines()][-1]}"
    else:
        return
    raise ResourceError(
        f"the compiled mode does not work here: a process that loads the just compiled graph "
        f'"{name}" {how} (torch {torch.__version__}, and the C++ compiler that CXX names, or g++)'
    )


@dataclass(frozen=True, slots=True)
class Form:
    """A kind of file that holds a graph.

    Attributes:
        compile: compiles a program into a file.
        check: tests the first file that a process compiles, the graph of that name; raises
            ResourceError if it is unusable.
        load: loads a file.
        needs: the programs that a machine needs to compile graphs.
    """

    compile: Callable[[ExportedProgram, Path], None]
    check: Callable[[Path, str], None]
    load: Callable[[Path], Graph]
    needs: str


LIBRARY = Form(_compile_library, _try_to_load, _load_library, "a C++ compiler")
MODULE = Form(_compile_module, lambda path, name: None, _load_module, "Triton and a C compiler")
FORMS = {"cpu": LIBRARY, "cuda": MODULE}
