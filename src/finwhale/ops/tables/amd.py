"""Operators on AMD GPUs (gfx942, gfx950): the portable Triton kernels of `tables/nvidia.py`.

The table uses no side streams, and its mHC takes two kernels. The kernels ran in Triton's
interpreter and on an NVIDIA GPU, never on AMD hardware: docs/platforms.md.
"""

from dataclasses import replace

from finwhale.ops.attention import sparse_attention_triton as attention
from finwhale.ops.mhc.ref import mhc_post_pre
from finwhale.ops.moe import experts_triton
from finwhale.ops.moe.router_triton import route_by_hash, route_by_score
from finwhale.ops.table import Ops
from finwhale.ops.tables import bind, nvidia
from finwhale.platform import Platform

# A thread block of gfx942 has 64 KiB of shared memory.
MAX_STAGES = 2


def attention_plan(p: attention.AttentionProblem) -> attention.AttendPlan:
    """Tiles of which 4 warps of 64 lanes hold all values in registers."""
    plan = attention.plan_for(p)
    return replace(plan, block_h=32, block_k=32, num_warps=4) if plan.block_h > 32 else plan


def experts_plan(num_pairs: int, num_experts: int) -> experts_triton.ExpertsPlan:
    """Tiles for registers, as those of attention."""
    block_rows = experts_triton.plan(num_pairs, num_experts).block_rows
    gate_up_rows = 32 if block_rows == 128 else 64
    tiles = (gate_up_rows, MAX_STAGES, 4), (64, MAX_STAGES, 4)
    return experts_triton.ExpertsPlan(block_rows, *tiles)


def table(platform: Platform) -> Ops:
    portable = nvidia.table(platform, MAX_STAGES)
    return replace(
        portable,
        capabilities=replace(portable.capabilities, side_streams=False),
        mhc_post_pre=bind(mhc_post_pre, post=portable.mhc_post, pre=portable.mhc_pre),
        route_by_score=bind(route_by_score, stages=MAX_STAGES),
        route_by_hash=bind(route_by_hash, stages=MAX_STAGES),
        sparse_attention=bind(attention.sparse_attention, plan=attention_plan),
        experts_compute=bind(experts_triton.compute, plan=experts_plan),
    )
