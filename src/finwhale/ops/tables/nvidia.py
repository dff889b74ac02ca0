"""Operators on NVIDIA GPUs without a table of their own: the portable Triton kernels.

No kernel launches early or uses PTX. `ops/__init__.py` lists the architectures.
"""

import torch

from finwhale.ops import Capabilities, Ops
from finwhale.ops.attention import prepare_qkv_triton, sparse_attention_triton
from finwhale.ops.attention.prepare_qkv_triton import prepare_qkv, store_window_rows
from finwhale.ops.attention.sparse_attention_triton import sparse_attention
from finwhale.ops.compressor.compress_triton import compress
from finwhale.ops.drafts.drafts_triton import (
    accept_drafts,
    continue_tokens,
    draft_confidences,
    make_blocks,
)
from finwhale.ops.drafts.ref import markov_logits
from finwhale.ops.indexer import select_entries_triton
from finwhale.ops.indexer.prepare_queries_triton import prepare_index_queries
from finwhale.ops.indexer.select_entries_triton import select_entries
from finwhale.ops.linear import linear_triton
from finwhale.ops.linear.linear_triton import DEFAULT, LinearOptions, grouped_linear, swiglu_mlp
from finwhale.ops.linear.ref import grouped_form, prepare_linear
from finwhale.ops.mhc import mhc_triton
from finwhale.ops.mhc.mhc_triton import hc_head, mhc_post, mhc_post_pre, mhc_pre
from finwhale.ops.moe import experts_triton, router_triton
from finwhale.ops.moe.combine_triton import combine
from finwhale.ops.moe.experts_layout import finish_experts
from finwhale.ops.moe.experts_triton import compute, dispatch
from finwhale.ops.moe.ref import prepare_experts
from finwhale.ops.moe.router_triton import route_by_hash, route_by_score
from finwhale.ops.norm.rms_norm_triton import rms_norm
from finwhale.ops.sampling import sample_triton
from finwhale.ops.sampling.sample_triton import best_candidates, merge_candidates, sample
from finwhale.ops.tables import bind
from finwhale.platform import Platform


def table(platform: Platform, max_stages: int = DEFAULT.max_stages) -> Ops:
    """max_stages: see the linear layers' `LinearOptions`."""
    num_multiprocessors = platform.num_multiprocessors
    options = LinearOptions(num_multiprocessors=num_multiprocessors, max_stages=max_stages)
    linear = bind(linear_triton.linear, options=options)
    return Ops(
        capabilities=Capabilities(
            quantised_weights=True,
            packed_cache=True,
            captures_steps=True,
            builds_kernels=True,
            bounded_workspace=True,
            prefix_cache_tokens=2**24,  # Flash needs 65 GB for it.
            side_streams=True,
            compiles_layers=True,
            expert_id_dtype=torch.int32,
        ),
        launch_classes=(
            linear_triton.LAUNCH_CLASSES,
            mhc_triton.LAUNCH_CLASSES,
            prepare_qkv_triton.LAUNCH_CLASSES,
            select_entries_triton.LAUNCH_CLASSES,
            sparse_attention_triton.LAUNCH_CLASSES,
            router_triton.LAUNCH_CLASSES,
            experts_triton.LAUNCH_CLASSES,
            sample_triton.LAUNCH_CLASSES,
        ),
        prepare_linear=prepare_linear,
        prepare_experts=prepare_experts,
        finish_experts=finish_experts,
        rms_norm=rms_norm,
        linear=linear,
        grouped_form=grouped_form,
        grouped_linear=bind(grouped_linear, options=options),
        mhc_of_terms=None,
        mhc_pre=mhc_pre,
        mhc_post_pre=mhc_post_pre,
        mhc_post=mhc_post,
        hc_head=hc_head,
        prepare_qkv=prepare_qkv,
        store_window_rows=store_window_rows,
        compress=compress,
        prepare_index_queries=prepare_index_queries,
        select_entries=bind(select_entries, num_multiprocessors=num_multiprocessors),
        sparse_attention=sparse_attention,
        route_by_score=route_by_score,
        route_by_hash=route_by_hash,
        experts_dispatch=dispatch,
        experts_compute=compute,
        experts_combine=combine,
        swiglu_mlp=bind(swiglu_mlp, options=options),
        sample=sample,
        best_candidates=best_candidates,
        merge_candidates=merge_candidates,
        continue_tokens=continue_tokens,
        accept_drafts=accept_drafts,
        make_blocks=make_blocks,
        markov_logits=bind(markov_logits, linear=linear),
        draft_confidences=draft_confidences,
    )
