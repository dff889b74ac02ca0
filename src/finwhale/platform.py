"""The hardware that the process runs on, as plain data. Only this module queries a driver."""

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


def available_memory() -> int | None:
    """Bytes of host memory that processes can still allocate; None: the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return sizes[0] if sizes else None


def existing_folder(path: Path) -> Path:
    """The folder itself or its nearest parent that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())
