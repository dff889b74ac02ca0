"""Operators on Hopper GPUs (sm90): bfloat16, as-trained activations, packed weights and rows.

The table uses Triton kernels that launch early and use PTX, Gluon kernels, and, if it is installed,
DeepGEMM (extra "nvidia") for linear layers of many tokens. Measurements on an H200 decided each
choice (docs/notes/).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from finwhale.ops.attention import prepare_qkv_triton, sparse_attention_hopper
from finwhale.ops.attention.sparse_attention_hopper import sparse_attention
from finwhale.ops.compressor.compress_triton import compress
from finwhale.ops.indexer.prepare_queries_triton import prepare_index_queries
from finwhale.ops.indexer.select_entries_triton import select_entries
from finwhale.ops.indexer.topk_long_triton import NUM_WARPS
from finwhale.ops.launch.streamed_loads import install_hook
from finwhale.ops.linear import few_tokens_hopper, linear_triton
from finwhale.ops.linear import ref as linear_ref
from finwhale.ops.mhc import FusedReduceMhc
from finwhale.ops.mhc import mhc_triton as mhc
from finwhale.ops.moe import experts_hopper
from finwhale.ops.moe.combine_triton import combine
from finwhale.ops.moe.router_triton import CHOOSE_REGISTERS, route_by_hash, route_by_score
from finwhale.ops.sampling import sample_triton
from finwhale.ops.table import Ops
from finwhale.ops.tables import bind, nvidia, optional
from finwhale.platform import Platform

# With these numbers of tokens, the kernel of a compressor's projection requests its weight while
# the kernels before attention run (few_tokens_hopper.py).
COMPRESSOR_FIRST = range(3, 9)


def table(platform: Platform, batch_invariant: bool = False) -> Ops:
    """The table of a Hopper GPU.

    Args:
        batch_invariant: use operators that give a token the same bits for any number of tokens in
            its step. docs/numerics.md says what this costs.
    """
    install_hook()
    portable, early = nvidia.table(platform), partial(bind, early_launch=True)
    multiprocessors: dict[str, Any] = {"num_multiprocessors": platform.num_multiprocessors}
    invariant: dict[str, Any] = {"invariant": True} if batch_invariant else {}
    deepgemm = optional.deepgemm()
    linears = deepgemm or linear_triton
    grouped_form = (deepgemm or linear_ref).grouped_form
    if deepgemm is not None and batch_invariant:
        grouped_form = bind(grouped_form, min_tokens=1)
    how = {**invariant, "early_launch": True, **multiprocessors}
    options = linear_triton.LinearOptions(**how, few_tokens=few_tokens_hopper.launch)
    of_mhc = partial(bind, options=mhc.MhcOptions(**invariant, early_launch=True, inline_asm=True))
    mhc_post, mhc_post_pre = of_mhc(mhc.mhc_post), of_mhc(mhc.mhc_post_pre)
    return replace(
        portable,
        capabilities=replace(
            portable.capabilities, compressor_first=COMPRESSOR_FIRST, packages=optional.packages()
        ),
        launch_classes=nvidia.launch_classes(linears, sparse_attention_hopper, experts_hopper),
        linear=bind(linears.linear, options=options),
        grouped_form=grouped_form,
        grouped_linear=bind(linears.grouped_linear, options=options),
        mhc_of_terms=FusedReduceMhc(
            # Another number of tokens would take another kernel, perhaps with other last bits.
            0 if batch_invariant else mhc.FEW_TOKENS,
            of_mhc(mhc.num_programs),
            mhc_post,
            mhc_post_pre,
        ),
        mhc_pre=of_mhc(mhc.mhc_pre),
        mhc_post_pre=mhc_post_pre,
        mhc_post=mhc_post,
        hc_head=of_mhc(mhc.hc_head),
        prepare_qkv=early(prepare_qkv_triton.prepare_qkv),
        store_window_rows=early(prepare_qkv_triton.store_window_rows),
        compress=early(compress),
        prepare_index_queries=early(prepare_index_queries, inline_asm=True),
        select_entries=bind(select_entries, **how, inline_asm=True, long_warps=NUM_WARPS),
        sparse_attention=bind(sparse_attention, **invariant) if invariant else sparse_attention,
        route_by_score=early(route_by_score, **invariant, registers=CHOOSE_REGISTERS),
        route_by_hash=early(route_by_hash, **invariant),
        experts_dispatch=experts_hopper.dispatch,
        experts_compute=bind(experts_hopper.compute, **multiprocessors),
        experts_combine=early(combine),
        swiglu_mlp=bind(linears.swiglu_mlp, options=options),
        sample=early(sample_triton.sample),
        best_candidates=early(sample_triton.best_candidates),
        merge_candidates=early(sample_triton.merge_candidates),
    )
