"""The compiled mode: a model's decoder layers as graphs that a directory keeps for the next start.

A file is known by everything its code depends on: this package's source, torch, the processor or
GPU, and the shapes of what the graph takes. One that is damaged is compiled again.

On a CPU a graph is a library that calls kernels (AOTInductor): next to nothing stands between them.
On a GPU, where a call's time is hidden in captured steps, it is a module in Python that does, and
no C++ compiler is asked for.
"""

import hashlib
import importlib
import logging
import os
import platform
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from finwhale.artefacts import checksum, locked, source_digest, write_whole
from finwhale.errors import ResourceError
from finwhale.models.deepseek_v4.cache_spec import PagedCache
from finwhale.models.deepseek_v4.compiled import CompiledLayer, Graph, LayerTracer, Traceable
from finwhale.models.deepseek_v4.layer import DecoderLayer
from finwhale.models.deepseek_v4.model import DeepseekV4
from finwhale.ops.compiled import TracedTable
from finwhale.ops.compiled.step import StepTensors

logger = logging.getLogger(__name__)

# Tokens of a step that runs compiled; beyond, products take nearly all the time and the graphs,
# which are made for few rows, save nothing.
MAX_TOKENS = {"cpu": 64, "cuda": 512}


def compile_layers(
    model: DeepseekV4, traced: TracedTable, cache: PagedCache, rows_per_page: int, directory: Path
) -> int:
    """Replace the decoder layers of a model and of its MTP layer by compiled ones.

    Args:
        traced: the table to trace.
        rows_per_page: of the window's pages.
        directory: where graphs are kept.

    Returns:
        How many graphs were compiled; the others were loaded.

    Raises:
        ResourceError: there is no compiler, or the directory cannot be used.
    """
    device = model.weights.embed.device
    step = StepTensors(not traced.whole, rows_per_page)
    store = GraphStore(directory, device)

    def compiled(layer: nn.Module, first: bool) -> CompiledLayer:
        assert isinstance(layer, DecoderLayer)
        tracer = LayerTracer(model.config, traced, layer, model.tables, cache, step, first=first)
        select = tracer.select()
        chosen = None if select is None else store.graph(select)
        enter, leave = store.graph(tracer.enter()), store.graph(tracer.leave())
        return CompiledLayer(tracer, enter, chosen, leave, MAX_TOKENS[device.type])

    def all_of(layers: nn.ModuleList) -> nn.ModuleList:
        return nn.ModuleList(compiled(layer, i == 0) for i, layer in enumerate(layers))

    model.layers = all_of(model.layers)
    if model.mtp is not None:
        model.mtp.layers = all_of(model.mtp.layers)
    return store.num_compiled


class GraphStore:
    """Graphs by what they are made of: from memory, from the directory, or compiled now.

    Attributes:
        num_compiled: how many had to be compiled.
    """

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self.num_compiled = 0
        self._device = device
        self._form = FORMS[device.type]
        self._loaded: dict[str, Graph] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"compiled graphs cannot be kept in {directory}: {error.strerror or error}"
            ) from error

    @torch.inference_mode()
    def graph(self, wanted: Traceable) -> Graph:
        """The compiled form of a function."""
        depends = f"{_environment(self._device)}\n{wanted.signature()}"
        key = hashlib.sha256(depends.encode()).hexdigest()[:24]
        if key not in self._loaded:
            path = self.directory / f"{key}.pt2"
            with locked(path.with_suffix(".lock")):
                if not _is_whole(path):
                    self._compile(wanted, path)
                    self.num_compiled += 1
            self._loaded[key] = self._form.load(path)
        return self._loaded[key]

    def _compile(self, wanted: Traceable, path: Path) -> None:
        begin = time.perf_counter()
        dynamic = torch.export.Dim.DYNAMIC
        shapes = [dict.fromkeys(a.open_dims, dynamic) or None for a in wanted.arguments]
        partial = path.with_name(f"{path.stem}-{os.getpid()}.pt2")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about itself
            program = torch.export.export(
                _Module(wanted),
                ([a.sample for a in wanted.arguments],),
                dynamic_shapes={"flat": shapes},
                strict=False,
            )
            try:
                self._form.compile(program, partial)
            except (OSError, RuntimeError) as error:
                raise ResourceError(
                    f"the compiled mode cannot compile, which needs {self._form.needs}: "
                    f"{[*str(error).strip().splitlines(), type(error).__name__][0]}"
                ) from error
        try:
            if not self.num_compiled:
                self._form.check(partial)
            keep(path, partial.read_bytes())
        finally:
            partial.unlink()
        logger.info("compiled %s in %.0f s", wanted.name, time.perf_counter() - begin)


class _Module(nn.Module):
    def __init__(self, wanted: Traceable) -> None:
        super().__init__()
        self._fn = wanted.fn

    def forward(self, flat: list[Tensor]) -> tuple[Tensor, ...]:
        return self._fn(flat)


def _compile_library(program: ExportedProgram, path: Path) -> None:
    torch._inductor.aoti_compile_and_package(
        program, package_path=str(path), inductor_configs={"cpp.threads": 1}
    )


def _load_library(path: Path) -> Graph:
    """Neither traces nor compiles; the operators that it calls must be registered.

    By torch's loader itself: torch._inductor, which wraps it, takes seconds to import.
    """
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    return cast(Graph, loader.boxed_run)


# Of torch's compiler: nothing is chosen by timing it, which would differ from start to start; and
# what Triton compiles is where this process looks for it.
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
    """As _load_library."""
    inductor: Any = importlib.import_module("torch._inductor")
    artefact = inductor.CompiledArtifact.load(path=str(path))

    def run(arguments: list[Tensor]) -> list[Tensor]:
        return list(artefact(*arguments))

    return run


TRIAL = """
import sys, torch
torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], "model", True, 1, -1)
"""
# Of a package: which operators the graph calls. The trial has none registered.
OPERATORS = ".wrapper.json"


def _try_to_load(path: Path) -> None:
    """Load a library's code in a process of its own: where a compiler's code and torch's do not
    fit, that one dies and this one can say so.

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
        how = f"dies of {signal.Signals(-done.returncode).name}"
    elif done.returncode:
        how = f"fails: {['', *done.stderr.strip().splitlines()][-1]}"
    else:
        return
    raise ResourceError(
        f"the compiled mode does not work here: a process that loads a just compiled graph {how} "
        f"(torch {torch.__version__}, and the C++ compiler that CXX names, or g++)"
    )


@dataclass(frozen=True, slots=True)
class Form:
    """What a graph is compiled to.

    Attributes:
        compile: into a file.
        check: the first file that a process compiles; raises ResourceError where it is of no use.
        load: a file.
        needs: what `compile` asks of a machine.
    """

    compile: Callable[[ExportedProgram, Path], None]
    check: Callable[[Path], None]
    load: Callable[[Path], Graph]
    needs: str


LIBRARY = Form(_compile_library, _try_to_load, _load_library, "a C++ compiler")
MODULE = Form(_compile_module, lambda path: None, _load_module, "Triton and a C compiler")
FORMS = {"cpu": LIBRARY, "cuda": MODULE}


def keep(path: Path, code: bytes) -> None:
    """Write a graph and its checksum; what a killed process leaves is not taken for it."""
    write_whole(path, code)
    write_whole(path.with_suffix(".sum"), checksum(code).encode())


def _is_whole(path: Path) -> bool:
    """Whether a file is there as it was written."""
    if not path.exists():
        return False
    try:
        if path.with_suffix(".sum").read_text() == checksum(path.read_bytes()):
            return True
    except OSError:
        pass
    logger.warning("%s is damaged, and compiled again", path)
    return False


@cache
def _environment(device: torch.device) -> str:
    """What code depends on besides a graph's arguments."""
    if device.type == "cuda":
        # A module names the GPU that its kernels run on.
        on = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
        on += f" {device.index or 0}"
    else:
        on = f"{platform.machine()} {_cpu_flags()}"
    return f"{source_digest()} torch {torch.__version__} {on}"


def _cpu_flags() -> str:
    """The code is for this very processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
