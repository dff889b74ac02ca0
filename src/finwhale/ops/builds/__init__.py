"""What a table's operators compile when they are first called: built before anything is served.

A kernel is compiled once for each combination of what its launch fixes: constants of its plan, and
of each argument whether it is 1 or a multiple of 16. Which of them a model can meet follows from
the launch functions themselves: `Builds.prepare` has every class of step walked through the layers
without launching anything, compiles in parallel what is asked for, and loads it.
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
        """Begin what can be done at once for `prepare` of a configuration: start compilers."""
        ...

    def prepare(self, configuration: object, walk: Callable[[], None]) -> Built:
        """Build and load all that `walk` launches, which it then does not.

        Args:
            configuration: plain data that with this source determines what `walk` launches.
            walk: calls operators with tensors of any contents.
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

    def prepare(self, configuration: object, walk: Callable[[], None]) -> Built:
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
    from finwhale.ops.builds.kernels import KernelBuilds

    return KernelBuilds(platform, device_index, directory)
