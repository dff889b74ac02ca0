"""The operators, as one table that is chosen once per process (`Ops`)."""

import logging
from functools import cache
from typing import Literal

from finwhale.errors import ResourceError
from finwhale.ops.table import Capabilities, Ops
from finwhale.platform import Platform

__all__ = ["Capabilities", "Ops", "load_ops", "table_name"]

logger = logging.getLogger(__name__)

TableName = Literal["cpu", "nvidia_sm90", "nvidia", "amd", "reference"]
# NVIDIA GPUs besides sm90 for which all Triton kernels compile and fit. WHY_REFERENCE says what the
# other GPUs lack (tests/ops/test_arch_compile.py).
PORTABLE_ARCHS = ("sm100", "sm103")
NO_E4M3 = "the Triton kernels need E4M3 arithmetic, which this GPU lacks"
LITTLE_SHARED_MEMORY = "the Triton kernels need 226 KiB of shared memory a block, this GPU has 99"
WHY_REFERENCE = {
    "sm80": NO_E4M3,
    "sm86": NO_E4M3,
    "sm87": NO_E4M3,
    "sm89": LITTLE_SHARED_MEMORY,
    "sm120": LITTLE_SHARED_MEMORY,
    "sm121": LITTLE_SHARED_MEMORY,
}
UNKNOWN_ARCH = "the Triton kernels were not checked on this GPU"


def table_name(platform: Platform) -> TableName:
    """The table of a platform (`ops/tables/`). Raises ResourceError if none covers it."""
    match platform:
        case Platform(vendor="cpu"):
            return "cpu"
        case Platform(vendor="nvidia", arch="sm90"):
            return "nvidia_sm90"
        case Platform(vendor="nvidia", arch=arch) if arch in PORTABLE_ARCHS:
            return "nvidia"
        case Platform(vendor="nvidia", arch=arch) if int(arch.removeprefix("sm")) >= 80:
            return "reference"
        case Platform(vendor="amd", arch="gfx942" | "gfx950"):
            return "amd"
        case _:
            raise ResourceError(
                f"no operator table for {platform.vendor} {platform.arch}: Finwhale runs on CPUs, "
                "NVIDIA GPUs from sm80 on and AMD gfx942 and gfx950; --device cpu works everywhere"
            )


def load_ops(
    platform: Platform, reference: bool = False, batch_invariant: bool = False, group: int = 128
) -> Ops:
    """Import the table for `platform`, or the references. Raises ResourceError if none covers it.

    Args:
        batch_invariant: choose operators with which a token's bits do not depend on the batch.
        group: values that share a scale, in inputs and blocks of FP8 weights: 128, or 32 for
            DeepSeek-V4.1.

    The CPU table computes in float32 only; the references take any dtype and device. The function
    logs one warning if the table was not measured on the platform.
    """
    return _load_ops(platform, reference, batch_invariant, group)


@cache
def _load_ops(platform: Platform, reference: bool, batch_invariant: bool, group: int) -> Ops:
    name: TableName = "reference" if reference else table_name(platform)
    if group != 128 and name in ("nvidia", "amd"):
        name = "reference"
    if batch_invariant and (name, group) not in (("nvidia_sm90", 128), ("cpu", 128), ("cpu", 32)):
        raise ResourceError(
            "batch_invariant needs DeepSeek-V4's operators for Hopper GPUs, or the CPU's with "
            "float32; elsewhere the bits of a token depend on the batch"
        )
    if name == "nvidia":
        logger.warning(
            "the Triton kernels run on %s without having been tested or measured there",
            platform.arch,
        )
    elif name == "reference" and not reference:
        reason = WHY_REFERENCE.get(platform.arch, UNKNOWN_ARCH)
        logger.warning("the slow reference operators run on %s: %s", platform.arch, reason)
    match name:
        case "cpu":
            from finwhale.ops.tables.cpu import OPS
        case "nvidia_sm90":
            from finwhale.ops.tables import nvidia_sm90

            table = nvidia_sm90.table(platform, batch_invariant)
            if group == 128:
                return table
            from finwhale.ops.tables import deepseek_v41

            return deepseek_v41.table(table, platform)
        case "nvidia":
            from finwhale.ops.tables import nvidia

            return nvidia.table(platform)
        case "amd":
            from finwhale.ops.tables import amd

            return amd.table(platform)
        case "reference":
            from finwhale.ops.tables.reference import OPS
    return OPS
