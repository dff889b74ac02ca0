"""Operators on a CPU in float32: numpy where that is faster than the references.

Sampling with filters or penalties, and the operators around drafts, are the references.
"""

from dataclasses import replace

from finwhale.ops.attention.cpu import prepare_qkv, sparse_attention, store_window_rows
from finwhale.ops.compressor.cpu import compress
from finwhale.ops.drafts.ref import markov_logits
from finwhale.ops.indexer.cpu import prepare_index_queries, select_entries
from finwhale.ops.linear.cpu import grouped_linear, linear, prepare_linear
from finwhale.ops.mhc.cpu import hc_head, mhc_post, mhc_post_pre, mhc_pre
from finwhale.ops.moe.cpu import (
    combine,
    compute,
    dispatch,
    prepare_experts,
    route_by_hash,
    route_by_score,
    swiglu_mlp,
)
from finwhale.ops.norm.cpu import rms_norm
from finwhale.ops.sampling.cpu import best_candidates, sample
from finwhale.ops.tables import bind, reference

OPS = replace(
    reference.OPS,
    capabilities=replace(reference.OPS.capabilities, side_streams=False, compiles_layers=True),
    prepare_linear=prepare_linear,
    prepare_experts=prepare_experts,
    rms_norm=rms_norm,
    linear=linear,
    grouped_linear=grouped_linear,
    mhc_pre=mhc_pre,
    mhc_post_pre=mhc_post_pre,
    mhc_post=mhc_post,
    hc_head=hc_head,
    prepare_qkv=prepare_qkv,
    store_window_rows=store_window_rows,
    compress=compress,
    prepare_index_queries=prepare_index_queries,
    select_entries=select_entries,
    sparse_attention=sparse_attention,
    route_by_score=route_by_score,
    route_by_hash=route_by_hash,
    experts_dispatch=dispatch,
    experts_compute=compute,
    experts_combine=combine,
    swiglu_mlp=swiglu_mlp,
    sample=sample,
    best_candidates=best_candidates,
    markov_logits=bind(markov_logits, linear=linear),
)
