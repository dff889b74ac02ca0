"""The reference operators, in plain torch on any device. They define every operator."""

from finwhale.ops.attention import ref as attention
from finwhale.ops.compressor.ref import compress
from finwhale.ops.deepseek_v41 import ref as deepseek_v41
from finwhale.ops.drafts import ref as drafts
from finwhale.ops.indexer import ref as indexer
from finwhale.ops.linear import ref as linear
from finwhale.ops.mhc import ref as mhc
from finwhale.ops.moe import ref as moe
from finwhale.ops.norm.ref import rms_norm
from finwhale.ops.sampling import ref as sampling
from finwhale.ops.table import Capabilities, Ops

OPS = Ops(
    capabilities=Capabilities(),
    launch_classes=(),
    prepare_linear=linear.prepare_linear,
    prepare_experts=moe.prepare_experts,
    finish_experts=moe.finish_experts,
    rms_norm=rms_norm,
    linear=linear.linear,
    grouped_form=linear.grouped_form,
    grouped_linear=linear.grouped_linear,
    mhc_of_terms=None,
    shared_entries=deepseek_v41.OPS,
    mhc_pre=mhc.mhc_pre,
    mhc_post_pre=mhc.mhc_post_pre,
    mhc_post=mhc.mhc_post,
    hc_head=mhc.hc_head,
    prepare_qkv=attention.prepare_qkv,
    store_window_rows=attention.store_window_rows,
    compress=compress,
    prepare_index_queries=indexer.prepare_index_queries,
    select_entries=indexer.select_entries,
    sparse_attention=attention.sparse_attention,
    route_by_score=moe.route_by_score,
    route_by_hash=moe.route_by_hash,
    experts_dispatch=moe.dispatch,
    experts_compute=moe.compute,
    experts_combine=moe.combine,
    swiglu_mlp=moe.swiglu_mlp,
    sample=sampling.sample,
    best_candidates=sampling.best_candidates,
    merge_candidates=sampling.merge_candidates,
    continue_tokens=drafts.continue_tokens,
    accept_drafts=drafts.accept_drafts,
    make_blocks=drafts.make_blocks,
    draft_confidences=drafts.draft_confidences,
)
