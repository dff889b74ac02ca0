"""Operators on a CPU, float32: numpy, and torch for sampling that is not greedy."""

from finwhale.ops import Ops
from finwhale.ops.attention.cpu import (
    inverse_rope,
    prepare_query,
    sparse_attention,
    store_window,
)
from finwhale.ops.compressor.cpu import compress
from finwhale.ops.indexer.cpu import prepare_index_query, select_entries
from finwhale.ops.linear.cpu import grouped_linear, linear, prepare_linear
from finwhale.ops.mhc.cpu import hc_head, mhc_post, mhc_post_pre, mhc_pre
from finwhale.ops.moe.cpu import (
    experts,
    prepare_experts,
    route_by_hash,
    route_by_score,
    swiglu_mlp,
)
from finwhale.ops.norm.cpu import rms_norm
from finwhale.ops.sampling.cpu import sample

OPS = Ops(
    prepare_linear=prepare_linear,
    prepare_experts=prepare_experts,
    rms_norm=rms_norm,
    linear=linear,
    grouped_linear=grouped_linear,
    mhc_pre=mhc_pre,
    mhc_post_pre=mhc_post_pre,
    mhc_post=mhc_post,
    hc_head=hc_head,
    prepare_query=prepare_query,
    store_window=store_window,
    compress=compress,
    prepare_index_query=prepare_index_query,
    select_entries=select_entries,
    sparse_attention=sparse_attention,
    inverse_rope=inverse_rope,
    route_by_score=route_by_score,
    route_by_hash=route_by_hash,
    experts=experts,
    swiglu_mlp=swiglu_mlp,
    sample=sample,
)
