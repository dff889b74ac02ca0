"""The operator table's type: every operator that the model calls.

`Ops` has no defaults. A platform's table names an implementation for every operator, or replaces
some of another table: the CPU's those of the references, Hopper's and AMD's those of the portable
Triton kernels. An implementation may choose among functions, by size for example. Each family's
package has the contract and a reference (`ref.py`).
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from finwhale.ops.attention import PrepareQkv, SparseAttention, StoreWindowRows
from finwhale.ops.compressor import Compress
from finwhale.ops.drafts import AcceptDrafts, ContinueTokens, DraftConfidences, MakeBlocks
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
            module = fn.__module__.removeprefix("finwhale.ops.")
            rows.append((field.name, f"{module}.{fn.__qualname__}"))
        return rows
