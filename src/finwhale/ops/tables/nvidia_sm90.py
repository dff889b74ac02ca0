"""Operators on Hopper GPUs (sm90): bfloat16, as-trained activations, packed weights and rows.

The table uses Triton kernels that launch early and use PTX, Gluon kernels, and, if it is installed,
DeepGEMM (extra "nvidia") for linear layers of many tokens. Measurements on an H200 decided each
choice (docs/notes/).
"""

from dataclasses import replace
from typing import Any

from finwhale.ops import Ops
from finwhale.ops.attention import prepare_qkv_triton, sparse_attention_hopper
from finwhale.ops.attention.prepare_qkv_triton import prepare_qkv, store_window_rows
from finwhale.ops.attention.sparse_attention_hopper import sparse_attention
from finwhale.ops.compressor.compress_triton import compress
from finwhale.ops.drafts.ref import markov_logits
from finwhale.ops.indexer import select_entries_triton
from finwhale.ops.indexer.prepare_queries_triton import prepare_index_queries
from finwhale.ops.indexer.select_entries_triton import select_entries
from finwhale.ops.indexer.topk_few_triton import NUM_WARPS
from finwhale.ops.launch.shared_memory import prefer_shared_memory
from finwhale.ops.launch.streamed_loads import install_hook
from finwhale.ops.linear import few_tokens_hopper, linear_triton
from finwhale.ops.linear import ref as linear_ref
from finwhale.ops.mhc import FusedReduceMhc
from finwhale.ops.mhc import mhc_triton as mhc
from finwhale.ops.moe import experts_hopper, router_triton
from finwhale.ops.moe.combine_triton import combine
from finwhale.ops.moe.experts_hopper import compute, dispatch
from finwhale.ops.moe.router_triton import CHOOSE_REGISTERS, route_by_hash, route_by_score
from finwhale.ops.sampling import sample_triton
from finwhale.ops.sampling.sample_triton import best_candidates, merge_candidates, sample
from finwhale.ops.tables import bind, nvidia, optional
from finwhale.platform import Platform


def table(platform: Platform, batch_invariant: bool = False) -> Ops:
    """The table of a Hopper GPU.

    Args:
        batch_invariant: use operators that give a token the same bits for any number of tokens in
            its step. docs/numerics.md says what this costs.
    """
    install_hook()
    prefer_shared_memory()
    num_multiprocessors = platform.num_multiprocessors
    invariant: dict[str, Any] = {"invariant": True} if batch_invariant else {}
    deepgemm = optional.deepgemm()
    linears = deepgemm or linear_triton
    grouped_form = (deepgemm or linear_ref).grouped_form
    if deepgemm is not None and batch_invariant:
        grouped_form = bind(grouped_form, min_tokens=1)
    linear_options = linear_triton.LinearOptions(
        **invariant,
        early_launch=True,
        num_multiprocessors=num_multiprocessors,
        few_tokens=few_tokens_hopper.launch,
    )
    linear = bind(linears.linear, options=linear_options)
    mhc_options = mhc.MhcOptions(**invariant, early_launch=True, inline_asm=True)
    mhc_post = bind(mhc.mhc_post, options=mhc_options)
    mhc_post_pre = bind(mhc.mhc_post_pre, options=mhc_options)
    return replace(
        nvidia.table(platform),
        launch_classes=(
            linears.LAUNCH_CLASSES,
            mhc.LAUNCH_CLASSES,
            prepare_qkv_triton.LAUNCH_CLASSES,
            select_entries_triton.LAUNCH_CLASSES,
            sparse_attention_hopper.LAUNCH_CLASSES,
            router_triton.LAUNCH_CLASSES,
            experts_hopper.LAUNCH_CLASSES,
            sample_triton.LAUNCH_CLASSES,
        ),
        linear=linear,
        grouped_form=grouped_form,
        grouped_linear=bind(linears.grouped_linear, options=linear_options),
        mhc_of_terms=FusedReduceMhc(
            # Another number of tokens would take another kernel, perhaps with other last bits.
            0 if batch_invariant else mhc.FEW_TOKENS,
            bind(mhc.num_programs, options=mhc_options),
            mhc_post,
            mhc_post_pre,
        ),
        mhc_pre=bind(mhc.mhc_pre, options=mhc_options),
        mhc_post_pre=mhc_post_pre,
        mhc_post=mhc_post,
        hc_head=bind(mhc.hc_head, options=mhc_options),
        prepare_qkv=bind(prepare_qkv, early_launch=True),
        store_window_rows=bind(store_window_rows, early_launch=True),
        compress=bind(compress, early_launch=True),
        prepare_index_queries=bind(prepare_index_queries, inline_asm=True, early_launch=True),
        select_entries=bind(
            select_entries,
            **invariant,
            inline_asm=True,
            early_launch=True,
            num_multiprocessors=num_multiprocessors,
            few_warps=NUM_WARPS,
        ),
        sparse_attention=bind(sparse_attention, **invariant) if invariant else sparse_attention,
        route_by_score=bind(
            route_by_score, **invariant, early_launch=True, registers=CHOOSE_REGISTERS
        ),
        route_by_hash=bind(route_by_hash, **invariant, early_launch=True),
        experts_dispatch=dispatch,
        experts_compute=bind(compute, num_multiprocessors=num_multiprocessors),
        experts_combine=bind(combine, early_launch=True),
        swiglu_mlp=bind(linears.swiglu_mlp, options=linear_options),
        sample=bind(sample, early_launch=True),
        best_candidates=bind(best_candidates, early_launch=True),
        merge_candidates=bind(merge_candidates, early_launch=True),
        markov_logits=bind(markov_logits, linear=linear),
    )
