"""The reference operators, in plain torch on any device. They define every operator."""

import torch

from finwhale.ops import Capabilities, Ops
from finwhale.ops.attention.ref import prepare_qkv, sparse_attention, store_window_rows
from finwhale.ops.compressor.ref import compress
from finwhale.ops.drafts.ref import (
    accept_drafts,
    continue_tokens,
    draft_confidences,
    make_blocks,
    markov_logits,
)
from finwhale.ops.indexer.ref import prepare_index_queries, select_entries
from finwhale.ops.linear.ref import grouped_form, grouped_linear, linear, prepare_linear
from finwhale.ops.mhc.ref import hc_head, mhc_post, mhc_post_pre, mhc_pre
from finwhale.ops.moe.ref import (
    combine,
    compute,
    dispatch,
    finish_experts,
    prepare_experts,
    route_by_hash,
    route_by_score,
    swiglu_mlp,
)
from finwhale.ops.norm.ref import rms_norm
from finwhale.ops.sampling.ref import best_candidates, merge_candidates, sample

OPS = Ops(
    capabilities=Capabilities(
        quantised_weights=False,
        packed_cache=False,
        captures_steps=False,
        builds_kernels=False,
        bounded_workspace=False,
        prefix_cache_tokens=0,
        side_streams=True,
        compiles_layers=False,
        expert_id_dtype=torch.int64,
    ),
    launch_classes=(),
    prepare_linear=prepare_linear,
    prepare_experts=prepare_experts,
    finish_experts=finish_experts,
    rms_norm=rms_norm,
    linear=linear,
    grouped_form=grouped_form,
    grouped_linear=grouped_linear,
    mhc_of_terms=None,
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
    merge_candidates=merge_candidates,
    continue_tokens=continue_tokens,
    accept_drafts=accept_drafts,
    make_blocks=make_blocks,
    markov_logits=markov_logits,
    draft_confidences=draft_confidences,
)
