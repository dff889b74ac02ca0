"""The operator table's type: every operator that the model calls.

`Ops` has no defaults. A platform's table names an implementation for every operator, or replaces
some of another table: the CPU's those of the references, Hopper's and AMD's those of the portable
Triton kernels. An implementation may choose among functions, by size for example. Each family's
package has the contract and a reference (`ref.py`).
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from finwhale.ops import attention, compressor, drafts, indexer, mhc, moe, norm, sampling
from finwhale.ops import linear as linears
from finwhale.ops.deepseek_v41 import SharedEntryOps
from finwhale.ops.launch.sizes import LaunchClasses


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Properties of a table's operators that the loader, engine and benchmarks use.

    The defaults are those of the references.

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
        packages: Optional packages with versions, whose kernels decide bits of results.
    """

    quantised_weights: bool = False
    packed_cache: bool = False
    captures_steps: bool = False
    builds_kernels: bool = False
    bounded_workspace: bool = False
    prefix_cache_tokens: int = 0
    side_streams: bool = True
    compiles_layers: bool = False
    compressor_first: range = range(0)
    expert_id_dtype: torch.dtype = torch.int64
    packages: tuple[str, ...] = ()


NO_OPERATORS = ("capabilities", "launch_classes", "mhc_of_terms", "shared_entries")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The operators of a table, one typed field each. The contracts' docstrings define them.

    mhc_of_terms: None if the mHC operators read neither a `PartialSum` nor `UnreducedExperts`.
    launch_classes: of all kernels, which are built ahead.
    shared_entries: None if the table has no operators of models whose layers share entries.
    """

    capabilities: Capabilities
    launch_classes: tuple[LaunchClasses, ...]
    mhc_of_terms: mhc.FusedReduceMhc | None
    shared_entries: SharedEntryOps | None
    prepare_linear: linears.PrepareLinear
    prepare_experts: moe.PrepareExperts
    finish_experts: moe.FinishExperts
    rms_norm: norm.RmsNorm
    linear: linears.Linear
    grouped_form: linears.GroupedForm
    grouped_linear: linears.GroupedLinear
    mhc_pre: mhc.MhcPre
    mhc_post_pre: mhc.MhcPostPre
    mhc_post: mhc.MhcPost
    hc_head: mhc.HcHead
    prepare_qkv: attention.PrepareQkv
    store_window_rows: attention.StoreWindowRows
    compress: compressor.Compress
    prepare_index_queries: indexer.PrepareIndexQueries
    select_entries: indexer.SelectEntries
    sparse_attention: attention.SparseAttention
    route_by_score: moe.RouteByScore
    route_by_hash: moe.RouteByHash
    experts_dispatch: moe.ExpertsDispatch
    experts_compute: moe.ExpertsCompute
    experts_combine: moe.ExpertsCombine
    swiglu_mlp: moe.SwigluMlp
    sample: sampling.Sample
    best_candidates: sampling.BestCandidates
    merge_candidates: sampling.MergeCandidates
    continue_tokens: drafts.ContinueTokens
    accept_drafts: drafts.AcceptDrafts
    make_blocks: drafts.MakeBlocks
    draft_confidences: drafts.DraftConfidences

    def experts(
        self,
        x_ND: Tensor,
        ids_NK: Tensor,
        weights_NK: Tensor,
        w: moe.ExpertWeight,
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
            if field.name in NO_OPERATORS:
                continue
            fn = getattr(self, field.name)
            module = fn.__module__.removeprefix("finwhale.ops.")
            rows.append((field.name, f"{module}.{fn.__qualname__}"))
        return rows
