"""The directory of compiled graphs: each is compiled once, and later processes load it.

A graph's file is named by a hash of everything its code depends on: this package's source, torch,
the processor or GPU, the operators that it calls, and the types and fixed sizes of its arguments. A
damaged file is compiled again.
"""

import hashlib
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from finwhale.artefacts import checksum, locked, open_private, source_digest, write_whole
from finwhale.compiled.graph_forms import FORMS, Graph
from finwhale.errors import ResourceError, first_line

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Argument:
    """A sample argument for tracing, and the dimensions whose sizes stay dynamic."""

    sample: Tensor
    open_dims: tuple[int, ...] = ()

    def signature(self) -> str:
        """The properties of the argument that a graph's code depends on."""
        t = self.sample
        shape = ["*" if i in self.open_dims else str(n) for i, n in enumerate(t.shape)]
        # Ignore a pool's row stride, which depends on the number of layers in the cache.
        strides = [] if len(self.open_dims) > 1 else list(t.stride())
        return f"{t.dtype} {t.device.type} {','.join(shape)} {strides}"


@dataclass(frozen=True, slots=True)
class Traceable:
    """A function of flat tensors, and its sample arguments for tracing.

    Attributes:
        name: the names of graph and kind of layer, for log and errors.
        constants: all other values that the function reads.
    """

    name: str
    fn: Callable[[list[Tensor]], tuple[Tensor, ...]]
    arguments: list[Argument]
    constants: tuple[Any, ...]

    def __post_init__(self) -> None:
        # The tracer would merge two arguments that are the same tensor.
        assert len({id(a.sample) for a in self.arguments}) == len(self.arguments)

    def signature(self) -> str:
        constants = [repr(value) for value in self.constants]
        return "\n".join([self.name, *constants, *(a.signature() for a in self.arguments)])


class GraphStore:
    """Finds graphs in memory or in the directory, and compiles the missing ones.

    Args:
        operators: the namespace of the custom operators that the graphs call.

    Attributes:
        num_compiled: number of compiled graphs.

    Raises:
        ResourceError: the directory cannot be created, or (from `graph`) a graph is missing and
            cannot be traced, compiled or kept there, or it cannot be loaded.
    """

    def __init__(self, directory: Path, device: torch.device, operators: str) -> None:
        self.directory = directory
        self.num_compiled = 0
        self._environment = f"{_environment(device)} {operators}"
        self._form = FORMS[device.type]
        self._loaded: dict[str, Graph] = {}
        try:
            open_private(directory.parent, directory.name)
        except OSError as error:
            raise self._cannot_keep(error) from error

    @torch.inference_mode()
    def graph(self, wanted: Traceable) -> Graph:
        """The compiled form of a function."""
        depends = f"{self._environment}\n{wanted.signature()}"
        key = hashlib.sha256(depends.encode()).hexdigest()[:24]
        if key not in self._loaded:
            path = self.directory / f"{key}.pt2"
            # A filled directory may be read-only, and then has no room for a lock.
            if not _is_whole(path):
                self._fill(wanted, path)
            with _naming(wanted, "load"):
                self._loaded[key] = self._form.load(path)
        return self._loaded[key]

    def _fill(self, wanted: Traceable, path: Path) -> None:
        try:
            with locked(path.with_suffix(".lock")):
                # Another process may have compiled it while this one waited.
                if not _is_whole(path):
                    if path.exists():
                        logger.warning("%s is damaged and is compiled again", path)
                    self._compile(wanted, path)
                    self.num_compiled += 1
        except OSError as error:
            raise self._cannot_keep(error) from error

    def _cannot_keep(self, error: OSError) -> ResourceError:
        return ResourceError(
            f"compiled graphs cannot be kept in {self.directory}: {error.strerror or error}"
        )

    def _compile(self, wanted: Traceable, path: Path) -> None:
        begin = time.perf_counter()
        partial = path.with_name(f"{path.stem}-{os.getpid()}.pt2")
        program = trace(wanted)
        try:
            with _naming(wanted, "compile", f", which needs {self._form.needs}"):
                self._form.compile(program, partial)
            if not self.num_compiled:
                self._form.check(partial, wanted.name)
            keep(path, partial.read_bytes())
        finally:
            partial.unlink(missing_ok=True)
        logger.info("compiled %s in %.0f s", wanted.name, time.perf_counter() - begin)


def trace(wanted: Traceable) -> ExportedProgram:
    """Trace a function for every size of its dynamic dimensions.

    Raises:
        ResourceError: the tracer fails, for example because the function fixes a dynamic size.
    """
    dynamic = torch.export.Dim.DYNAMIC
    shapes = [dict.fromkeys(a.open_dims, dynamic) or None for a in wanted.arguments]
    with _naming(wanted, "trace"):
        return torch.export.export(
            _Module(wanted),
            ([a.sample for a in wanted.arguments],),
            dynamic_shapes={"flat": shapes},
            strict=False,
        )


@contextmanager
def _naming(wanted: Traceable, what: str, needs: str = "") -> Iterator[None]:
    """Turn any failure of torch into one line that names the graph."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code
            yield
    except Exception as error:  # what torch's tracer and compilers raise is not documented
        raise ResourceError(
            f'the compiled mode cannot {what} the graph "{wanted.name}"{needs} (torch '
            f"{torch.__version__}): {type(error).__name__}: {first_line(error)}"
        ) from error


class _Module(nn.Module):
    def __init__(self, wanted: Traceable) -> None:
        super().__init__()
        self._fn = wanted.fn

    def forward(self, flat: list[Tensor]) -> tuple[Tensor, ...]:
        return self._fn(flat)


def keep(path: Path, code: bytes) -> None:
    """Write a graph, then its checksum. A file without a checksum is incomplete."""
    write_whole(path, code)
    write_whole(path.with_suffix(".sum"), checksum(code).encode())


def _is_whole(path: Path) -> bool:
    """Whether a file exists and has the checksum that was written after it."""
    try:
        return path.with_suffix(".sum").read_bytes() == checksum(path.read_bytes()).encode()
    except OSError:
        return False


def _environment(device: torch.device) -> str:
    """The environment that a graph's code depends on besides its function and arguments."""
    if device.type == "cuda":
        # A module names the GPU that its kernels run on.
        on = f"{torch.cuda.get_device_name(device)} {torch.cuda.get_device_capability(device)}"
        on += f" {device.index or 0}"
    else:
        on = f"{platform.machine()} {_cpu_flags()}"
    return f"{source_digest()} torch {torch.__version__} {on}"


def _cpu_flags() -> str:
    """The processor's features: inductor compiles for the processor that it runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
