"""`finwhale doctor`: say what works on this machine, what is missing and what to install."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.markup import escape

import finwhale
from finwhale import platform as machine
from finwhale.artefacts import default_directory
from finwhale.engine.store.opening import parse
from finwhale.errors import FinwhaleError, first_line
from finwhale.extras import EXTRAS
from finwhale.ops import table_name
from finwhale.ops.tables.optional import why_no_deepgemm
from finwhale.options import Parser
from finwhale.printing import new_console, print_table
from finwhale.request import SamplingParams

STYLES = {"ok": "green", "missing": "yellow", "failed": "bold red"}
GIB = 2**30
TABLES = {
    "nvidia_sm90": "Hopper kernels",
    "nvidia": "portable Triton kernels",
    "amd": "portable Triton kernels",
    "reference": "slow reference operators only",
    "cpu": "CPU operators",
}
SHM = Path("/dev/shm")
MIN_SHM_BYTES = GIB  # NCCL and the ranks' plans take some hundred MiB at most.
MIN_CACHE_BYTES = GIB  # Compiled kernels of one configuration take about 100 MiB.
# To measure a prefix store's directory, doctor writes and reads a file of this size, in pieces.
MEASURED_BYTES, PIECE_BYTES = 2**28, 2**20
MOUNTS = Path("/proc/mounts")
PROMPT = "Once upon a time"
DRIVER = Path("/proc/driver/nvidia/version")
GPU_TORCH = "2.11.0"  # the newest that has run on a GPU, with its Triton; also in pyproject.toml


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `advice` says what to do; empty: nothing is to be done."""

    subject: str
    found: str
    verdict: Literal["ok", "missing", "failed"] = "ok"
    advice: str = ""

    @classmethod
    def unless(cls, lacking: bool, subject: str, found: str, advice: str) -> "Finding":
        """A finding whose advice counts only if something is lacking."""
        return cls(subject, found, "missing", advice) if lacking else cls(subject, found)


Findings = Callable[[], Iterator[Finding]]


def run(argv: Sequence[str]) -> int:
    """Returns 1 if a check failed, so that no model can run; otherwise 0."""
    args = _parser().parse_args(argv)
    checks: list[Findings] = [_software, _processor, _gpus, _peers, _disk, _extras]
    if args.prefix_store is not None:
        checks.append(partial(_prefix_store, args.prefix_store))
    if not args.no_run:
        checks.append(_demo)
    findings = [finding for check in checks for finding in _attempt(check)]
    rows = []
    for one in findings:
        verdict = f"[{STYLES[one.verdict]}]{one.verdict}[/]"
        rows.append((one.subject, escape(one.found), verdict, escape(one.advice)))
    columns = ("what", "found", "", "what to do")
    print_table(new_console(160), "finwhale doctor", columns, rows, num_texts=4)
    return int(any(one.verdict == "failed" for one in findings))


def _attempt(check: Findings) -> Iterator[Finding]:
    """The findings of a check. A broken driver or package can raise any exception."""
    try:
        yield from check()
    except Exception as error:
        name = getattr(check, "__name__", "prefix store").strip("_")
        yield Finding(name, f"{type(error).__name__}: {first_line(error)}", "failed")


def _software() -> Iterator[Finding]:
    yield Finding("finwhale", f"{finwhale.__version__}, Python {platform.python_version()}")
    build = "CPU"
    if torch.version.cuda is not None:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip is not None:
        build = f"ROCm {torch.version.hip}"
    tested = torch.__version__.partition("+")[0] == GPU_TORCH
    advice = "" if tested else f"on a GPU, only torch {GPU_TORCH} was tested: finwhale[nvidia]"
    yield Finding("torch", f"{torch.__version__}, {build}", advice=advice)
    compiler = os.environ.get("CXX", "g++")
    path = shutil.which(compiler.split()[0]) if compiler.strip() else None
    advice = "only --compile on a CPU needs it: install g++, or set CXX"
    yield Finding.unless(path is None, "C++ compiler", path or f"no {compiler}", advice)


def _processor() -> Iterator[Finding]:
    memory = machine.available_memory()
    amount = "" if memory is None else f", {memory / GIB:,.0f} GiB of memory available"
    yield Finding(
        "processor", f"{machine.processor_name()}, {machine.usable_cores()} cores{amount}"
    )


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield _no_gpu()
        return
    if DRIVER.exists():
        yield Finding("NVIDIA driver", _driver_version())
    for index in range(torch.cuda.device_count()):
        here = machine.Platform.detect(index)
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        kernels = TABLES[table_name(here)]
        found = f"{name} ({here.arch}), {free / GIB:,.1f} of {total / GIB:,.1f} GiB free, {kernels}"
        advice = ""
        if table_name(here) == "reference":
            advice = "a Hopper GPU (H100, H200) is what Finwhale is made for"
        elif free < total // 2:
            advice = "another process uses this GPU: nvidia-smi shows which"
        yield Finding.unless(bool(advice), f"GPU {index}", found, advice)
    if table_name(machine.Platform.detect()) == "nvidia_sm90":
        reason = why_no_deepgemm()
        advice = "prefill is slower without it: pip install 'finwhale[nvidia]' (Python 3.12)"
        yield Finding.unless(reason is not None, "DeepGEMM", reason or "installed", advice)


def _no_gpu() -> Finding:
    if not DRIVER.exists():
        advice = "the embedded model runs on a CPU; a released checkpoint needs GPUs"
        return Finding("GPU", "none", "missing", advice)
    found = f"NVIDIA driver {_driver_version()}, but torch sees no GPU"
    if torch.version.cuda is None:
        advice = "this torch is a build without CUDA: pip install torch for CUDA"
    else:
        advice = (
            f"the driver must support CUDA {torch.version.cuda}, and CUDA_VISIBLE_DEVICES must "
            "name a GPU"
        )
    return Finding("GPU", found, "failed", advice)


def _driver_version() -> str:
    words = DRIVER.read_text().split()
    return next((word for word in words if word[0].isdigit() and "." in word), "of unknown version")


def _peers() -> Iterator[Finding]:
    """Whether the GPUs reach each other's memory, and processes can share memory."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    cut = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    listed = ", ".join(f"{i} to {j}" for i, j in cut[:4])
    found = f"not from GPU {listed}" if cut else f"between all {count} GPUs"
    advice = "tensor parallelism uses NCCL between these GPUs, which is slower"
    yield Finding.unless(bool(cut), "peer access", found, advice)
    if SHM.is_dir():
        free = shutil.disk_usage(SHM).free
        advice = "several GPUs need shared memory: docker run --ipc=host or --shm-size=8g"
        yield Finding.unless(free < MIN_SHM_BYTES, str(SHM), f"{free / GIB:,.1f} GiB free", advice)


def _disk() -> Iterator[Finding]:
    cache = default_directory(os.environ.get("XDG_CACHE_HOME"))
    exists = machine.existing_folder(cache)
    free = shutil.disk_usage(exists).free
    if os.access(exists, os.W_OK):
        found = f"{cache}, {free / GIB:,.1f} GiB free"
        advice = "make room, or choose --cache-dir"
        yield Finding.unless(free < MIN_CACHE_BYTES, "cache directory", found, advice)
    else:
        advice = "nothing compiled is kept for the next start: choose another --cache-dir"
        yield Finding("cache directory", f"{cache}, not writable", "missing", advice)


def _prefix_store(option: str) -> Iterator[Finding]:
    """How fast a prefix store's directory is, and whether its files take memory."""
    path, limit = parse(option)
    folder = machine.existing_folder(path)
    free = shutil.disk_usage(folder).free
    written, read = _speed(folder)
    found = (
        f"{path}, {free / 1e9:,.0f} GB free, writes {written / 1e9:,.2f} GB/s, reads "
        f"{read / 1e9:,.2f} GB/s"
    )
    if _file_system(folder) in ("tmpfs", "ramfs"):
        memory = machine.available_memory() or free
        most = min(memory, free) // 2
        advice = f"its files take memory: give it a size of at most {most / 1e9:,.0f}GB"
        yield Finding.unless(limit is None or limit > most, "prefix store", found, advice)
    else:
        advice = "make room, or give it a smaller size (DIR:SIZE)"
        yield Finding.unless(limit is not None and limit > free, "prefix store", found, advice)


def _speed(folder: Path) -> tuple[float, float]:
    """The bytes per second that a folder's disk writes, and reads without the page cache."""
    piece = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        began = time.perf_counter()
        for _ in range(MEASURED_BYTES // PIECE_BYTES):
            file.write(piece)
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        into = bytearray(PIECE_BYTES)
        again = time.perf_counter()
        while file.readinto(into):
            pass
        end = time.perf_counter()
    return MEASURED_BYTES / (written - began), MEASURED_BYTES / (end - again)


def _file_system(folder: Path) -> str:
    """The kind of file system that a folder is in; empty: unknown."""
    mounts = [line.split()[1:3] for line in machine.lines_of(MOUNTS)]
    inside = [(place, kind) for place, kind in mounts if folder.resolve().is_relative_to(place)]
    return max(inside, key=lambda mount: len(mount[0]), default=("", ""))[1]


def _extras() -> Iterator[Finding]:
    for extra, (purpose, modules) in EXTRAS.items():
        absent = [name for name in modules if not _is_installed(name)]
        found = f"{modules[0]} {_version(modules[0])}".strip()
        if absent:
            found = f"no {', '.join(absent)}"
        advice = f"for {purpose}: pip install 'finwhale[{extra}]'"
        yield Finding.unless(bool(absent), f"extra {extra}", found, advice)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _demo() -> Iterator[Finding]:
    try:
        llm = finwhale.LLM(device="cpu", max_num_seqs=1, max_model_len=64)
        (result,) = llm.generate(
            PROMPT, SamplingParams(max_tokens=8, temperature=0), show_progress=False
        )
        if result.error is not None:
            raise FinwhaleError(result.error)
    except FinwhaleError as error:
        yield Finding("embedded model", str(error), "failed")
        return
    text = " ".join((PROMPT + result.outputs[0].text).split())
    yield Finding("embedded model", f'writes "{text}" on the CPU')


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale doctor",
        description="Check software, processor, GPUs, memory, disk and extras, and run the demo "
        "model. `finwhale inspect PATH` says which GPUs and what host memory a checkpoint needs.",
    )
    about = "measure the directory of a prefix store with a file of 256 MiB"
    parser.add_argument("--prefix-store", metavar="DIR[:SIZE]", help=about)
    parser.add_argument("--no-run", action="store_true", help="do not run the embedded model")
    return parser
