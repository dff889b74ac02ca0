"""Build the kernels of a table's operators ahead, before anything is served.

Triton compiles a kernel once for each launch signature: the constants of its plan, and of each
integer argument whether it is 1 or a multiple of 16. The launch functions themselves say which
signatures a model can meet. `Builds.prepare` calls the operators once for every class of step
without launching anything, compiles in parallel what they asked for, and loads it. The files of
the kernels publish where the classes end (ops/launch/sizes.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from finwhale.ops import Ops
from finwhale.platform import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What preparing did.

    Attributes:
        kernels: variants that are loaded.
        compiled: of them, those that no cache held.
    """

    kernels: int = 0
    compiled: int = 0


class Builds(Protocol):
    """The compilers behind one table, on the device that is current."""

    def expect(self, configuration: object) -> None:
        """Start compiler processes now, if `prepare` of this configuration will need them."""
        ...

    def prepare(self, configuration: object, launch_all: Callable[[], None]) -> Built:
        """Build and load every kernel that `launch_all` launches; nothing is launched.

        Args:
            configuration: plain data that with this source determines what `launch_all` launches.
            launch_all: calls operators with tensors of any contents.
        """
        ...

    def ready(self) -> None:
        """From here on every compilation counts."""
        ...

    def late(self) -> Mapping[str, int]:
        """By compiler: kernels that were compiled or loaded since `ready`."""
        ...


class NothingToBuild:
    """For tables that are compiled already: numpy's and torch's."""

    def expect(self, configuration: object) -> None:
        pass

    def prepare(self, configuration: object, launch_all: Callable[[], None]) -> Built:
        return Built()

    def ready(self) -> None:
        pass

    def late(self) -> Mapping[str, int]:
        return {}


def load_builds(ops: Ops, platform: Platform, device_index: int, directory: str | None) -> Builds:
    """The compilers of a table.

    Args:
        device_index: which GPU.
        directory: of compiled artefacts; None: where they go by default.

    Raises:
        ResourceError: the directory cannot be used.
    """
    if not ops.capabilities.builds_kernels:
        return NothingToBuild()
    from finwhale.ops.builds.kernel_builds import KernelBuilds

    return KernelBuilds(platform, device_index, directory)
