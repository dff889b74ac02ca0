"""The operator table: every operator that the model calls, chosen once per process.

`Ops` has no defaults, so each platform's table names an implementation for every operator. Nothing
falls back at call time. Each family's package holds the contract, `ref.py` the definition.
"""

from dataclasses import dataclass, fields

from finwhale.errors import ResourceError
from finwhale.ops.attention import PrepareQkv, SparseAttention
from finwhale.ops.compressor import Compress
from finwhale.ops.indexer import SelectEntries
from finwhale.ops.linear import GroupedInput, GroupedLinear, Linear, PrepareLinear
from finwhale.ops.mhc import HcHead, MhcPost, MhcPostPre, MhcPre
from finwhale.ops.moe import (
    Experts,
    FinishExperts,
    PrepareExperts,
    RouteByHash,
    RouteByScore,
    SwigluMlp,
)
from finwhale.ops.norm import RmsNorm
from finwhale.ops.sampling import Sample
from finwhale.platform import Platform


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One typed field an operator; each contract's docstring says what it computes.

    Attributes:
        packed: weights stay in FP8 and FP4, and cached rows are bytes; else both are values.
        side_streams: on a GPU, independent projections of a layer run on streams of their own.
    """

    packed: bool
    side_streams: bool
    prepare_linear: PrepareLinear
    prepare_experts: PrepareExperts
    finish_experts: FinishExperts
    rms_norm: RmsNorm
    linear: Linear
    grouped_input: GroupedInput
    grouped_linear: GroupedLinear
    mhc_pre: MhcPre
    mhc_post_pre: MhcPostPre
    mhc_post: MhcPost
    hc_head: HcHead
    prepare_qkv: PrepareQkv
    compress: Compress
    select_entries: SelectEntries
    sparse_attention: SparseAttention
    route_by_score: RouteByScore
    route_by_hash: RouteByHash
    experts: Experts
    swiglu_mlp: SwigluMlp
    sample: Sample

    def implementations(self) -> list[tuple[str, str]]:
        """(operator, "module.function") for each field, in order."""
        rows = []
        for field in fields(self):
            if field.name in ("packed", "side_streams"):
                continue
            fn = getattr(self, field.name)
            rows.append((field.name, f"{fn.__module__}.{fn.__qualname__}"))
        return rows


def load_ops(platform: Platform, reference: bool = False, batch_invariant: bool = False) -> Ops:
    """Import the table for `platform`, or the references. Raises ResourceError if none covers it.

    batch_invariant: a token's bits do not depend on the rest of the batch, nor on its size.

    The CPU's own table computes in float32 only; the references take any dtype and device.
    """
    if batch_invariant:
        hopper = platform == Platform("nvidia", "sm90")
        if reference or not (hopper or platform.vendor == "cpu"):
            raise ResourceError(
                "batch_invariant needs the operators for Hopper GPUs, or the CPU's with float32; "
                "here the plain definitions would run, whose sums depend on the batch"
            )
        if hopper:
            from finwhale.ops.tables.nvidia import INVARIANT

            return INVARIANT
    if reference:
        from finwhale.ops.tables.reference import OPS

        return OPS
    match platform:
        case Platform(vendor="cpu"):
            from finwhale.ops.tables.cpu import OPS
        case Platform(vendor="nvidia", arch="sm90"):
            from finwhale.ops.tables.nvidia import OPS
        case Platform(vendor="nvidia", arch=arch) if int(arch.removeprefix("sm")) >= 80:
            # The kernels were measured and checked on Hopper only.
            from finwhale.ops.tables.reference import OPS
        case Platform(vendor="amd", arch="gfx942" | "gfx950"):
            from finwhale.ops.tables.amd import OPS
        case _:
            raise ResourceError(
                f"no operator table for {platform.vendor} {platform.arch}: Finwhale runs on CPUs, "
                "NVIDIA GPUs from sm80 on and AMD gfx942 and gfx950; --device cpu works everywhere"
            )
    return OPS
