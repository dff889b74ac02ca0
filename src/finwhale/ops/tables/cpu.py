"""Operators on a CPU in float32: numpy where that is faster than the references.

Sampling with filters or penalties, and the operators around drafts, are the references.
"""

from dataclasses import replace

from finwhale.ops.attention import cpu as attention
from finwhale.ops.compressor.cpu import compress
from finwhale.ops.deepseek_v41 import cpu as deepseek_v41
from finwhale.ops.indexer import cpu as indexer
from finwhale.ops.linear import cpu as linear
from finwhale.ops.mhc import cpu as mhc
from finwhale.ops.moe import cpu as moe
from finwhale.ops.norm.cpu import rms_norm
from finwhale.ops.sampling.cpu import sample
from finwhale.ops.sampling.noise_cpu import gumbel
from finwhale.ops.tables import bind, reference

OPS = replace(
    reference.OPS,
    capabilities=replace(reference.OPS.capabilities, side_streams=False, compiles_layers=True),
    prepare_linear=linear.prepare_linear,
    prepare_experts=moe.prepare_experts,
    rms_norm=rms_norm,
    linear=linear.linear,
    grouped_linear=linear.grouped_linear,
    shared_entries=deepseek_v41.OPS,
    mhc_pre=mhc.mhc_pre,
    mhc_post_pre=bind(reference.OPS.mhc_post_pre, post=mhc.mhc_post, pre=mhc.mhc_pre),
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
    sample=sample,
    best_candidates=bind(reference.OPS.best_candidates, noise=gumbel),
)
