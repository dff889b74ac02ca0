"""Operators on AMD GPUs (gfx942, gfx950): the portable Triton kernels of `tables/nvidia.py`.

The table uses no side streams, and its mHC takes two kernels. The kernels ran in Triton's
interpreter and on an NVIDIA GPU, never on AMD hardware: docs/platforms.md.
"""

from dataclasses import replace

from finwhale.ops import Ops
from finwhale.ops.mhc.mhc_unfused_triton import mhc_post_pre
from finwhale.ops.tables import nvidia
from finwhale.platform import Platform


def table(platform: Platform) -> Ops:
    portable = nvidia.table(platform)
    return replace(
        portable,
        capabilities=replace(portable.capabilities, side_streams=False),
        mhc_post_pre=mhc_post_pre,
    )
