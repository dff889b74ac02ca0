"""Operators on Hopper GPUs (sm90): bfloat16, as-trained activations, packed weights and rows.

Triton kernels, and DeepGEMM (extra "nvidia") for linear layers of many tokens where it is
installed. Chosen by measurement: docs/notes/2026-11-21-h200-kernels.md.
"""

from importlib.util import find_spec

from finwhale.ops import Ops
from finwhale.ops.attention.triton import prepare_qkv, sparse_attention
from finwhale.ops.compressor.triton import compress
from finwhale.ops.indexer.triton import select_entries
from finwhale.ops.linear.ref import prepare_linear
from finwhale.ops.mhc.triton import hc_head, mhc_post, mhc_post_pre, mhc_pre
from finwhale.ops.moe.fold import finish_experts
from finwhale.ops.moe.ref import prepare_experts
from finwhale.ops.moe.triton import route_by_hash, route_by_score
from finwhale.ops.moe.triton_experts import experts
from finwhale.ops.norm.triton import rms_norm
from finwhale.ops.sampling.triton import sample

if find_spec("deep_gemm") is not None:
    from finwhale.ops.linear.deepgemm import grouped_linear, linear, swiglu_mlp
else:
    from finwhale.ops.linear.triton import grouped_linear, linear, swiglu_mlp

OPS = Ops(
    packed=True,
    prepare_linear=prepare_linear,
    prepare_experts=prepare_experts,
    finish_experts=finish_experts,
    rms_norm=rms_norm,
    linear=linear,
    grouped_linear=grouped_linear,
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
    swiglu_mlp=swiglu_mlp,
    sample=sample,
)
