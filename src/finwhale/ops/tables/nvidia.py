"""Operators on NVIDIA GPUs without a table of their own: the portable Triton kernels.

No kernel launches early or uses PTX. `ops/__init__.py` lists the architectures.
"""

from typing import Any

import torch

from finwhale.ops.attention import prepare_qkv_triton, sparse_attention_triton
from finwhale.ops.compressor.compress_triton import compress
from finwhale.ops.drafts import drafts_triton
from finwhale.ops.indexer import select_entries_triton
from finwhale.ops.indexer.prepare_queries_triton import prepare_index_queries
from finwhale.ops.launch.sizes import LaunchClasses
from finwhale.ops.linear import linear_triton
from finwhale.ops.linear import ref as linear_ref
from finwhale.ops.linear.linear_triton import DEFAULT, LinearOptions
from finwhale.ops.mhc import mhc_triton
from finwhale.ops.moe import experts_triton, router_triton
from finwhale.ops.moe.combine_triton import combine
from finwhale.ops.moe.experts_layout import finish_experts
from finwhale.ops.norm.rms_norm_triton import rms_norm
from finwhale.ops.sampling import sample_triton
from finwhale.ops.table import Capabilities, Ops
from finwhale.ops.tables import bind
from finwhale.platform import Platform


def launch_classes(linear: Any, attention: Any, experts: Any) -> tuple[LaunchClasses, ...]:
    """The launch classes of a table with these modules for linear layers, attention and experts."""
    others = mhc_triton, prepare_qkv_triton, select_entries_triton, router_triton, sample_triton
    return tuple(module.LAUNCH_CLASSES for module in (linear, attention, experts, *others))


def table(platform: Platform, max_stages: int = DEFAULT.max_stages) -> Ops:
    """max_stages: see the linear layers' `LinearOptions`."""
    num_multiprocessors = platform.num_multiprocessors
    options = LinearOptions(num_multiprocessors=num_multiprocessors, max_stages=max_stages)
    return Ops(
        capabilities=Capabilities(
            quantised_weights=True,
            packed_cache=True,
            captures_steps=True,
            builds_kernels=True,
            bounded_workspace=True,
            prefix_cache_tokens=2**24,  # Flash needs 65 GB for it.
            compiles_layers=True,
            expert_id_dtype=torch.int32,
        ),
        launch_classes=launch_classes(linear_triton, sparse_attention_triton, experts_triton),
        prepare_linear=linear_triton.prepare,
        prepare_experts=linear_triton.prepare,
        finish_experts=finish_experts,
        rms_norm=rms_norm,
        linear=bind(linear_triton.linear, options=options),
        grouped_form=linear_ref.grouped_form,
        grouped_linear=bind(linear_triton.grouped_linear, options=options),
        mhc_of_terms=None,
        shared_entries=None,
        mhc_pre=mhc_triton.mhc_pre,
        mhc_post_pre=mhc_triton.mhc_post_pre,
        mhc_post=mhc_triton.mhc_post,
        hc_head=mhc_triton.hc_head,
        prepare_qkv=prepare_qkv_triton.prepare_qkv,
        store_window_rows=prepare_qkv_triton.store_window_rows,
        compress=compress,
        prepare_index_queries=prepare_index_queries,
        select_entries=bind(
            select_entries_triton.select_entries, num_multiprocessors=num_multiprocessors
        ),
        sparse_attention=sparse_attention_triton.sparse_attention,
        route_by_score=router_triton.route_by_score,
        route_by_hash=router_triton.route_by_hash,
        experts_dispatch=experts_triton.dispatch,
        experts_compute=experts_triton.compute,
        experts_combine=combine,
        swiglu_mlp=bind(linear_triton.swiglu_mlp, options=options),
        sample=sample_triton.sample,
        best_candidates=sample_triton.best_candidates,
        merge_candidates=sample_triton.merge_candidates,
        continue_tokens=drafts_triton.continue_tokens,
        accept_drafts=drafts_triton.accept_drafts,
        make_blocks=drafts_triton.make_blocks,
        draft_confidences=drafts_triton.draft_confidences,
    )
