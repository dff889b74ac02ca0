"""The hardware that the process runs on, as plain data. Only this module queries a driver."""

import contextlib
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Vendor = Literal["cpu", "nvidia", "amd"]


@dataclass(frozen=True, slots=True)
class Platform:
    """A kind of CPU or GPU.

    Attributes:
        arch: the name of the architecture: "cpu", "sm90", "sm100", "gfx942", "gfx950".
        num_multiprocessors: number of a GPU's multiprocessors. The default is an H200's.
    """

    vendor: Vendor
    arch: str
    num_multiprocessors: int = 132

    @property
    def device_type(self) -> Literal["cpu", "cuda"]:
        """The torch device type; AMD GPUs are "cuda" to torch."""
        return "cpu" if self.vendor == "cpu" else "cuda"

    @classmethod
    def cpu(cls) -> "Platform":
        return cls("cpu", "cpu")

    @classmethod
    def detect(cls, device_index: int = 0) -> "Platform":
        """Query the driver. Call once, from the process that runs the model, never at import."""
        import torch

        if not torch.cuda.is_available():
            return cls.cpu()
        properties = torch.cuda.get_device_properties(device_index)
        count = properties.multi_processor_count
        if torch.version.hip is not None:
            return cls("amd", properties.gcnArchName.split(":")[0], count)
        return cls("nvidia", f"sm{properties.major}{properties.minor}", count)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process can still allocate; None: the system does not say.

    The limits of its control groups count, for a container may have less than its host has. `root`
    is the directory of proc and sys.
    """
    lines = lines_of(root / "proc/meminfo")
    host = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*host, *_free_in_control_groups(root)], default=None)


def lines_of(path: Path) -> list[str]:
    """The lines of a file of the system; none if the system has no such file."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _free_in_control_groups(root: Path) -> Iterator[int]:
    """Yield the bytes that each control group of this process still allows it to allocate."""
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = root / "sys/fs/cgroup", _VERSION_2
        elif "memory" in controllers.split(","):
            top, files = root / "sys/fs/cgroup/memory", _VERSION_1
        else:
            continue
        # The limits of its parents hold, too. In a container, the path may be that of the host, and
        # only the container's own group is there, at the top.
        group = Path(path.lstrip("/"))
        for part in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                yield _free_in_control_group(top / part, files)


# The files of a control group with its limit and its use, and the entries of memory.stat with its
# page cache, which the system frees when a process needs memory.
_VERSION_1 = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_VERSION_2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))


def _free_in_control_group(group: Path, files: tuple[str, str, tuple[str, str]]) -> int:
    limit_file, use_file, cache = files
    limit, used = (int((group / name).read_text()) for name in (limit_file, use_file))
    lines = (group / "memory.stat").read_text().splitlines()
    cached = [int(line.split()[1]) for line in lines if line.split()[0] in cache]
    return max(0, limit - used + sum(cached))


def process_memory(
    pid: int | str = "self", kind: Literal["virtual", "resident"] = "resident"
) -> int | None:
    """Bytes of memory of a process; None: it has ended, or the system has no /proc."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return None
    return int(pages[kind == "resident"]) * os.sysconf("SC_PAGE_SIZE")


def processor_name() -> str:
    """The model of the CPU; where the system does not say, its architecture."""
    for line in lines_of(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int | None:
    """Number of CPU cores that this process may use; None: the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def max_files(wanted: int) -> int:
    """The number of files that this process may open, raised to `wanted` if the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return min(soft, wanted)


def existing_folder(path: Path) -> Path:
    """The folder itself or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
