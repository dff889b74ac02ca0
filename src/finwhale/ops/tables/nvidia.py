"""Operators on Hopper GPUs (sm90): bfloat16, as-trained activations, packed weights and rows.

Triton kernels, and DeepGEMM (extra "nvidia") for linear layers of many tokens where it is
installed. Chosen by measurement: docs/notes/2026-11-21-h200-kernels.md.
"""

from dataclasses import replace

import torch

from finwhale.ops import Capabilities, Ops
from finwhale.ops.attention.triton import prepare_qkv, sparse_attention
from finwhale.ops.compressor.triton import compress
from finwhale.ops.indexer.triton import select_entries
from finwhale.ops.linear import invariant
from finwhale.ops.linear import triton as triton_linears
from finwhale.ops.linear.ref import prepare_linear
from finwhale.ops.mhc.triton import ANY_NUMBER, hc_head, mhc_post, mhc_post_pre, mhc_pre
from finwhale.ops.moe.fold import finish_experts
from finwhale.ops.moe.ref import prepare_experts
from finwhale.ops.moe.triton import route_by_hash, route_by_score
from finwhale.ops.moe.triton_experts import experts
from finwhale.ops.norm.triton import rms_norm
from finwhale.ops.sampling.triton import sample
from finwhale.ops.tables import PREFIX_CACHE_TOKENS, always, optional

_linears = optional.deepgemm() or triton_linears

OPS = Ops(
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
    prepare_linear=prepare_linear,
    prepare_experts=prepare_experts,
    finish_experts=finish_experts,
    rms_norm=rms_norm,
    linear=_linears.linear,
    grouped_input=_linears.grouped_input,
    grouped_linear=_linears.grouped_linear,
    mhc_pre=mhc_pre,
    mhc_post_pre=mhc_post_pre,
    mhc_post=mhc_post,
    hc_head=hc_head,
    prepare_qkv=prepare_qkv,
    compress=compress,
    select_entries=select_entries,
    sparse_attention=sparse_attention,
    route_by_score=route_by_score,
    route_by_hash=route_by_hash,
    experts=experts,
    swiglu_mlp=_linears.swiglu_mlp,
    sample=sample,
)


# The same, but for operators that cut their work by the number of tokens: here a token's bits do
# not depend on how many there are. What it costs: docs/notes/2026-11-21-h200-kernels.md.
INVARIANT = replace(
    OPS,
    linear=invariant.linear,
    grouped_input=invariant.grouped_input,
    grouped_linear=invariant.grouped_linear,
    swiglu_mlp=invariant.swiglu_mlp,
    mhc_pre=always(mhc_pre, few_tokens=ANY_NUMBER),
    mhc_post_pre=always(mhc_post_pre, few_tokens=ANY_NUMBER),
    mhc_post=always(mhc_post, few_tokens=ANY_NUMBER),
    hc_head=always(hc_head, few_tokens=ANY_NUMBER),
    route_by_score=always(route_by_score, few_tokens=ANY_NUMBER),
    route_by_hash=always(route_by_hash, few_tokens=ANY_NUMBER),
    select_entries=always(select_entries, invariant=True),
    sparse_attention=always(sparse_attention, invariant=True),
)
