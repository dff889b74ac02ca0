"""Builds the kernels of a table's operators ahead of time, so that no request waits for a compiler.

Triton compiles a kernel once for each launch signature. A class of steps is a range of sizes whose
launches have the same signatures; the kernels' modules publish where each class ends
(ops/launch/sizes.py). `Builds.begin` calls the operators once for every class of steps, records
their launches instead of running them, and compiles the recorded kernels in parallel, before the
weights are loaded. `Builds.prepare` does the same for what is missing, and loads all kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from finwhale.ops import Ops
from finwhale.platform import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The result of `Builds.prepare`.

    Attributes:
        kernels: number of kernel variants that are loaded.
        compiled: how many of them were compiled because no cache had them.
    """

    kernels: int = 0
    compiled: int = 0


class Builds:
    """The compilers of one table, for the current device.

    This class is for tables without kernels of their own: numpy and torch are compiled already.
    """

    def expect(self, configuration: object) -> None:
        """Start compiler processes now if `prepare` will need them for this configuration."""

    def is_complete(self, configuration: object) -> bool:
        """Whether the cache has everything that `prepare` needs."""
        return True

    def begin(self, configuration: object, launch_all: Callable[[], None]) -> None:
        """Build what `prepare` will need, while the GPU's memory is still free for compilers.

        Args:
            launch_all: as for `prepare`, but its tensors need no memory (torch's meta device).
        """

    def prepare(self, configuration: object, launch_all: Callable[[], None]) -> Built:
        """Build and load every kernel that `launch_all` would launch, without launching any.

        Args:
            configuration: plain data that, together with this package's source, determines which
                kernels `launch_all` launches.
            launch_all: calls the operators; the contents of their tensors do not matter.
        """
        return Built()

    def mark_ready(self) -> None:
        """Start to count late compilations: from now on, each one delays a request."""

    def late(self) -> Mapping[str, int]:
        """Number of kernels compiled or loaded since `mark_ready`, by compiler."""
        return {}


def load_builds(ops: Ops, platform: Platform, device_index: int, directory: str | None) -> Builds:
    """Create the compilers of a table.

    Args:
        device_index: number of the GPU.
        directory: where compiled artefacts are stored; None: the default directory.

    Raises:
        ResourceError: the directory cannot be used.
    """
    if not ops.capabilities.builds_kernels:
        return Builds()
    from finwhale.ops.builds.kernel_builds import KernelBuilds

    return KernelBuilds(platform, device_index, directory)
