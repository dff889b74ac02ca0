"""DeepSeek-V4.1's operators on Hopper GPUs: groups of 32 values, and its own cache records."""

from dataclasses import replace
from functools import partial

from finwhale.ops.deepseek_v41 import (
    SharedEntryOps,
    attention_triton,
    engram_triton,
    experts_hopper,
    gemm_triton,
    mhc_delayed_triton,
    select_triton,
)
from finwhale.ops.deepseek_v41.merge_pairs_triton import merge_pairs
from finwhale.ops.deepseek_v41.store_rows_triton import prepare_qkv, store_rows
from finwhale.ops.linear import ref as linear_ref
from finwhale.ops.mhc import mhc_triton
from finwhale.ops.moe import router_triton
from finwhale.ops.sampling import sample_triton
from finwhale.ops.table import Ops
from finwhale.ops.tables import bind
from finwhale.platform import Platform


def table(base: Ops, platform: Platform, *, hopper: bool = True) -> Ops:
    """The table of a platform, given the one for groups of 128 values.

    Args:
        hopper: kernels launch early and use PTX of sm90.
    """
    multiprocessors = platform.num_multiprocessors
    early = partial(bind, early_launch=hopper)
    options = gemm_triton.GemmOptions(
        early_launch=hopper, inline_asm=hopper, num_multiprocessors=multiprocessors
    )
    of_gemm = partial(bind, options=options)
    of_mhc = partial(bind, options=mhc_triton.MhcOptions(early_launch=hopper, inline_asm=hopper))
    families = (
        *(gemm_triton, attention_triton, experts_hopper, select_triton, engram_triton),
        *(mhc_delayed_triton, router_triton, sample_triton),
    )
    return replace(
        base,
        launch_classes=tuple(module.LAUNCH_CLASSES for module in families),
        prepare_linear=gemm_triton.prepare,
        prepare_experts=gemm_triton.prepare,
        finish_experts=experts_hopper.finish_experts,
        linear=of_gemm(gemm_triton.linear),
        grouped_form=linear_ref.grouped_form,
        grouped_linear=of_gemm(gemm_triton.grouped_linear),
        sparse_attention=early(attention_triton.sparse_attention, inline_asm=hopper),
        experts_dispatch=of_gemm(experts_hopper.dispatch),
        experts_compute=of_gemm(experts_hopper.compute),
        swiglu_mlp=of_gemm(gemm_triton.swiglu_mlp),
        shared_entries=SharedEntryOps(
            store_rows=early(store_rows),
            prepare_qkv=early(prepare_qkv),
            merge_pairs=early(merge_pairs),
            select=early(
                select_triton.select_shared, inline_asm=hopper, num_multiprocessors=multiprocessors
            ),
            mhc_input=of_mhc(mhc_delayed_triton.mhc_input),
            mhc_mixes=of_mhc(mhc_delayed_triton.mhc_mixes),
            collapse=early(mhc_delayed_triton.collapse),
            recall_ids=early(engram_triton.recall_ids),
            look_up=early(engram_triton.look_up),
            engram_gate=early(engram_triton.engram_gate),
        ),
    )
