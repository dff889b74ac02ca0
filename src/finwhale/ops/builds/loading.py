"""Chooses the compilers of a table."""

from finwhale.ops import Ops
from finwhale.ops.builds import Builds
from finwhale.platform import Platform


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
