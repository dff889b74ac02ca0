"""The operator table: every operator that the model calls, chosen once per process.

`Ops` has no defaults. A platform's table names an implementation for every operator, or replaces
some of another table: the CPU's those of the references, Hopper's and AMD's those of the portable
Triton kernels. An implementation may choose among functions, by size for example. Each family's
package has the contract and a reference (`ref.py`).
"""

import logging
from dataclasses import dataclass, fields
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from finwhale.errors import ResourceError
from finwhale.ops.attention import PrepareQkv, SparseAttention, StoreWindowRows
from finwhale.ops.compressor import Compress
from finwhale.ops.drafts import (
    AcceptDrafts,
    ContinueTokens,
    DraftConfidences,
    MakeBlocks,
    MarkovLogits,
)
from finwhale.ops.indexer import PrepareIndexQueries, SelectEntries
from finwhale.ops.launch.sizes import LaunchClasses
from finwhale.ops.linear import GroupedForm, GroupedLinear, Linear, PrepareLinear
from finwhale.ops.mhc import FusedReduceMhc, HcHead, MhcPost, MhcPostPre, MhcPre
from finwhale.ops.moe import (
    ExpertsCombine,
    ExpertsCompute,
    ExpertsDispatch,
    ExpertWeight,
    FinishExperts,
    PrepareExperts,
    RouteByHash,
    RouteByScore,
    SwigluMlp,
)
from finwhale.ops.norm import RmsNorm
from finwhale.ops.sampling import BestCandidates, MergeCandidates, Sample
from finwhale.platform import Platform

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Properties of a table's operators that the loader, engine and benchmarks use.

    Attributes:
        quantised_weights: The operators read FP8 and FP4 weights as the checkpoint stores them, and
            float32 GEMMs read bfloat16 weights. Otherwise the loader dequantises every weight.
        packed_cache: Attention rows and indexer keys are packed bytes (`ops/attention/layout.py`,
            `ops/indexer/layout.py`). Otherwise a row holds values of the model's dtype.
        captures_steps: The launches of a step depend only on its sizes and never read the device,
            so the engine can capture a step as a CUDA graph and verify drafts on the device.
        builds_kernels: The first call of an operator compiles kernels, so `ops/builds` compiles
            them at start, and the engine warms up before it reports ready.
        bounded_workspace: No step needs more memory than the largest steps, so the engine runs
            those at start and gives the rest of the GPU to the cache.
        prefix_cache_tokens: With prefix caching, plan at least this cache capacity if the memory
            allows it, even if the sequences that run at once need less.
        side_streams: Independent projections of a layer run on their own CUDA streams.
        compiles_layers: The compiled mode can trace the operators.
        compressor_first: With these numbers of tokens, the projection of a C4 layer's compressor
            runs before that of queries and kv. Otherwise it runs on a side stream, as a C128
            layer's does, whose weight is smaller.
        expert_id_dtype: The dtype of the expert ids that routing returns.
    """

    quantised_weights: bool
    packed_cache: bool
    captures_steps: bool
    builds_kernels: bool
    bounded_workspace: bool
    prefix_cache_tokens: int
    side_streams: bool
    compiles_layers: bool
    compressor_first: range
    expert_id_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The operators of a table, one typed field each. The contracts' docstrings define them.

    mhc_of_terms: None if the mHC operators read neither a `PartialSum` nor `UnreducedExperts`.
    launch_classes: of all kernels, which are built ahead.
    """

    capabilities: Capabilities
    launch_classes: tuple[LaunchClasses, ...]
    mhc_of_terms: FusedReduceMhc | None
    prepare_linear: PrepareLinear
    prepare_experts: PrepareExperts
    finish_experts: FinishExperts
    rms_norm: RmsNorm
    linear: Linear
    grouped_form: GroupedForm
    grouped_linear: GroupedLinear
    mhc_pre: MhcPre
    mhc_post_pre: MhcPostPre
    mhc_post: MhcPost
    hc_head: HcHead
    prepare_qkv: PrepareQkv
    store_window_rows: StoreWindowRows
    compress: Compress
    prepare_index_queries: PrepareIndexQueries
    select_entries: SelectEntries
    sparse_attention: SparseAttention
    route_by_score: RouteByScore
    route_by_hash: RouteByHash
    experts_dispatch: ExpertsDispatch
    experts_compute: ExpertsCompute
    experts_combine: ExpertsCombine
    swiglu_mlp: SwigluMlp
    sample: Sample
    best_candidates: BestCandidates
    merge_candidates: MergeCandidates
    continue_tokens: ContinueTokens
    accept_drafts: AcceptDrafts
    make_blocks: MakeBlocks
    markov_logits: MarkovLogits
    draft_confidences: DraftConfidences

    def experts(
        self,
        x_ND: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        w: ExpertWeight,
        limit: float,
        shared_ND: Tensor | None = None,
    ) -> Tensor:
        """Run the three operators of the routed experts in order, as a layer does: [N,D]."""
        pairs = self.experts_dispatch(ids_NK, w.w2.shape[0])
        each_NKD = self.experts_compute(x_ND, weights_NK, pairs, w, limit)
        return self.experts_combine(each_NKD, ids_NK, shared_ND)

    def implementations(self) -> list[tuple[str, str]]:
        """(operator, "module.function(options)") for each field in order; `module` is below ops."""
        rows = []
        for field in fields(self):
            if field.name in ("capabilities", "launch_classes", "mhc_of_terms"):
                continue
            fn = getattr(self, field.name)
            module = fn.__module__.removeprefix(f"{__name__}.")
            rows.append((field.name, f"{module}.{fn.__qualname__}"))
        return rows


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


def load_ops(platform: Platform, reference: bool = False, batch_invariant: bool = False) -> Ops:
    """Import the table for `platform`, or the references. Raises ResourceError if none covers it.

    batch_invariant: choose operators with which a token's bits do not depend on the batch.

    The CPU table computes in float32 only; the references take any dtype and device. The function
    logs one warning if the table was not measured on the platform.
    """
    return _load_ops(platform, reference, batch_invariant)


@cache
def _load_ops(platform: Platform, reference: bool, batch_invariant: bool) -> Ops:
    name: TableName = "reference" if reference else table_name(platform)
    if batch_invariant and name not in ("nvidia_sm90", "cpu"):
        raise ResourceError(
            "batch_invariant needs the operators for Hopper GPUs, or the CPU's with float32; "
            "elsewhere the bits of a token depend on the batch"
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

            return nvidia_sm90.table(platform, batch_invariant)
        case "nvidia":
            from finwhale.ops.tables import nvidia

            return nvidia.table(platform)
        case "amd":
            from finwhale.ops.tables import amd

            return amd.table(platform)
        case "reference":
            from finwhale.ops.tables.reference import OPS
    return OPS
