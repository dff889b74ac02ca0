"""Operators on Hopper GPUs (sm90): bfloat16, as-trained activations, packed weights and rows.

The table uses Triton kernels that launch early and use PTX, Gluon kernels, and, if it is installed,
DeepGEMM (extra "nvidia") for linear layers of many tokens. Measurements on an H200 decided each
choice: docs/notes/2026-11-21-h200-kernels.md.
"""

from dataclasses import replace

import torch

from finwhale.ops import Capabilities, Ops
from finwhale.ops.attention.prepare_qkv_triton import prepare_qkv
from finwhale.ops.attention.sparse_attention_hopper import sparse_attention
from finwhale.ops.compressor.compress_triton import compress
from finwhale.ops.indexer.select_entries_triton import select_entries
from finwhale.ops.linear import linear_triton
from finwhale.ops.linear import ref as linear_ref
from finwhale.ops.mhc import MhcOfRanks
from finwhale.ops.mhc import mhc_triton as mhc
from finwhale.ops.moe.combine_triton import combine
from finwhale.ops.moe.experts_hopper import compute, dispatch
from finwhale.ops.moe.experts_layout import finish_experts
from finwhale.ops.moe.ref import prepare_experts
from finwhale.ops.moe.router_triton import route_by_hash, route_by_score
from finwhale.ops.norm.rms_norm_triton import rms_norm
from finwhale.ops.sampling.sample_triton import best_candidates, merge_candidates, sample
from finwhale.ops.tables import PREFIX_CACHE_TOKENS, bind, optional
from finwhale.platform import Platform


def table(platform: Platform, batch_invariant: bool = False) -> Ops:
    """The table of a Hopper GPU.

    Args:
        batch_invariant: use operators that give a token the same bits for any number of tokens in
            its step.
    """
    ops = _table(platform.num_multiprocessors)
    return _invariant(ops, platform.num_multiprocessors) if batch_invariant else ops


def _table(num_multiprocessors: int) -> Ops:
    deepgemm = optional.deepgemm()
    linears = deepgemm or linear_triton
    linear_options = linear_triton.Options(
        early_launch=True, num_multiprocessors=num_multiprocessors
    )
    mhc_options = mhc.Options(early_launch=True, inline_asm=True)
    return Ops(
        capabilities=Capabilities(
            quantised_weights=True,
            packed_cache=True,
            captures_steps=True,
            builds_kernels=True,
            bounded_workspace=True,
            prefix_cache_tokens=PREFIX_CACHE_TOKENS,
            side_streams=True,
            compiled_layers="without attention",
            expert_id_dtype=torch.int32,
        ),
        prepare_linear=linear_ref.prepare_linear,
        prepare_experts=prepare_experts,
        finish_experts=finish_experts,
        rms_norm=rms_norm,
        linear=bind(linears.linear, options=linear_options),
        grouped_form=(deepgemm or linear_ref).grouped_form,
        grouped_linear=bind(linears.grouped_linear, options=linear_options),
        mhc_of_ranks=_mhc_of_ranks(mhc_options),
        mhc_pre=bind(mhc.mhc_pre, options=mhc_options),
        mhc_post_pre=bind(mhc.mhc_post_pre, options=mhc_options),
        mhc_post=bind(mhc.mhc_post, options=mhc_options),
        hc_head=bind(mhc.hc_head, options=mhc_options),
        prepare_qkv=bind(prepare_qkv, early_launch=True),
        compress=compress,
        select_entries=bind(
            select_entries,
            inline_asm=True,
            early_launch=True,
            num_multiprocessors=num_multiprocessors,
        ),
        sparse_attention=sparse_attention,
        route_by_score=bind(route_by_score, early_launch=True),
        route_by_hash=bind(route_by_hash, early_launch=True),
        experts_dispatch=dispatch,
        experts_compute=compute,
        experts_combine=bind(combine, early_launch=True),
        swiglu_mlp=bind(linears.swiglu_mlp, options=linear_options),
        sample=sample,
        best_candidates=best_candidates,
        merge_candidates=merge_candidates,
    )


def _mhc_of_ranks(options: mhc.Options) -> MhcOfRanks:
    return MhcOfRanks(
        bind(mhc.num_programs, options=options),
        bind(mhc.mhc_post, options=options),
        bind(mhc.mhc_post_pre, options=options),
    )


def _invariant(ops: Ops, num_multiprocessors: int) -> Ops:
    """Replace the operators that divide their work by the number of tokens.

    docs/notes/2026-11-21-h200-kernels.md says what this costs.
    """
    deepgemm = optional.deepgemm()
    linears = deepgemm or linear_triton
    linear_options = linear_triton.Options(
        invariant=True, early_launch=True, num_multiprocessors=num_multiprocessors
    )
    mhc_options = mhc.Options(few_tokens=mhc.ANY_NUMBER, early_launch=True, inline_asm=True)
    grouped_form = linear_ref.grouped_form
    if deepgemm is not None:
        grouped_form = bind(deepgemm.grouped_form, min_tokens=1)
    return replace(
        ops,
        linear=bind(linears.linear, options=linear_options),
        grouped_form=grouped_form,
        grouped_linear=bind(linears.grouped_linear, options=linear_options),
        swiglu_mlp=bind(linears.swiglu_mlp, options=linear_options),
        mhc_of_ranks=_mhc_of_ranks(mhc_options),
        mhc_pre=bind(mhc.mhc_pre, options=mhc_options),
        mhc_post_pre=bind(mhc.mhc_post_pre, options=mhc_options),
        mhc_post=bind(mhc.mhc_post, options=mhc_options),
        hc_head=bind(mhc.hc_head, options=mhc_options),
        route_by_score=bind(route_by_score, few_tokens=mhc.ANY_NUMBER, early_launch=True),
        route_by_hash=bind(route_by_hash, few_tokens=mhc.ANY_NUMBER, early_launch=True),
        select_entries=bind(
            select_entries,
            invariant=True,
            inline_asm=True,
            early_launch=True,
            num_multiprocessors=num_multiprocessors,
        ),
        sparse_attention=bind(sparse_attention, invariant=True),
    )
