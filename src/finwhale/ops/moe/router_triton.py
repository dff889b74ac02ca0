"""The router as Triton kernels.

- By score: one kernel computes the GEMM in parts along D. In a second kernel, the program of a
  token adds the parts in order and chooses experts.
- By hash: the program of a token reads only the K rows of the gate that the table names, and
  computes their dot products. With many tokens, it reads results of the whole GEMM instead.

A token's bits do not depend on the other tokens. They depend on the number of tokens only by
whether it exceeds FEW_TOKENS.

The kernels read at least the gate, 2 E D bytes in bfloat16, and 2 D bytes per token. At 4.39 TB/s
that takes, for 1, 128 and 8192 tokens: Flash (E 256, D 4096) 0.5, 0.7 and 16 us, Pro (384, 7168)
1.3, 1.7 and 28 us. Arithmetic bounds many tokens: 17 GFLOP for 8192 of Flash, 22 us at 0.79
PFLOP/s.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from finwhale.ops.launch import check_contiguous
from finwhale.ops.launch.early_launch import launch_options, start_next, wait_for_last
from finwhale.ops.launch.sizes import LaunchClasses, up_to

FEW_TOKENS = 128
# Tokens of a tile for up to NARROW_TILE tokens; for more tokens, tiles are twice as wide.
NARROW_TILE = 16
HASH_BLOCK_D = 2048
MAX_EXPERTS = 1024
MAX_TOPK = 32
# `registers` of `route_by_score` on NVIDIA GPUs. Without a number, the compiler uses fewer, and a
# warp then waits for a few loads of parts before it issues the next ones.
CHOOSE_REGISTERS = 255


@triton.jit
def _dot(a, b, total):
    """total + a b: bfloat16 on tensor cores, everything else in float32."""
    if a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        return tl.dot(a, b, total)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def _gate_few_kernel(
    x_ptr,
    gate_ptr,
    parts_ptr,
    N,
    D,
    E,
    stride_x,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one part of z = x gate^T for BLOCK_N tokens and BLOCK_E experts.

    Experts are the rows of a tile: tensor cores process 16 rows but only 8 columns at a time.
    """
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    slot = tl.program_id(1)
    token = tl.program_id(2).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = slot * BLOCK_D + tl.arange(0, BLOCK_D)
    gate = tl.load(
        gate_ptr + expert[:, None] * D + d[None, :],
        mask=(expert < E)[:, None] & (d < D)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )
    start_next(PDL)
    wait_for_last(PDL)
    x = tl.load(
        x_ptr + token[:, None] * stride_x + d[None, :],
        mask=(token < N)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    z = _dot(gate, tl.trans(x), tl.zeros([BLOCK_E, BLOCK_N], tl.float32))
    target = parts_ptr + ((token * tl.num_programs(1) + slot) * E)[None, :] + expert[:, None]
    tl.store(target, z, mask=(expert < E)[:, None] & (token < N)[None, :])


@triton.jit
def _gate_many_kernel(
    x_ptr,
    gate_ptr,
    parts_ptr,
    N,
    D,
    E,
    stride_x,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute z = x gate^T for BLOCK_N tokens and BLOCK_E experts.

    Tensor cores truncate their accumulator, and errors would add up over all of D. Therefore each
    accumulator adds only two blocks, and these sums are added in float32.
    """
    token = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    part = tl.arange(0, BLOCK_D)
    is_token = (token < N)[:, None]
    is_expert = (expert < E)[:, None]
    x_ptr += token[:, None] * stride_x
    gate_ptr += expert[:, None] * D
    for start in tl.range(0, D, 2 * BLOCK_D):
        d = start + part[None, :]
        x = tl.load(x_ptr + d, mask=is_token & (d < D), other=0.0)
        gate = tl.load(gate_ptr + d, mask=is_expert & (d < D), other=0.0)
        chunk = _dot(x, tl.trans(gate), tl.zeros([BLOCK_N, BLOCK_E], tl.float32))
        d += BLOCK_D
        x = tl.load(x_ptr + d, mask=is_token & (d < D), other=0.0)
        gate = tl.load(gate_ptr + d, mask=is_expert & (d < D), other=0.0)
        total += _dot(x, tl.trans(gate), chunk)
    target = parts_ptr + (token * E)[:, None] + expert[None, :]
    tl.store(target, total, mask=is_token & (expert < E)[None, :])


@triton.jit
def _score(z):
    """sqrt(softplus(z)); softplus(z) = max(z, 0) + log(1 + y) with y = e^-|z|.

    log(1 + y) = 2 atanh(y / (2 + y)) by its series, which keeps the precision of a small y.
    """
    y = tl.exp(-tl.abs(z))
    s = y / (2.0 + y)
    t = s * s
    series = 1.0 / 13.0 + t * (1.0 / 15.0)
    series = 1.0 / 9.0 + t * (1.0 / 11.0 + t * series)
    series = 1.0 / 5.0 + t * (1.0 / 7.0 + t * series)
    series = 1.0 + t * (1.0 / 3.0 + t * series)
    return tl.sqrt(tl.maximum(z, 0.0) + 2.0 * s * series)


@triton.jit
def _choose_kernel(
    parts_ptr,
    bias_ptr,
    positions_ptr,
    ids_ptr,
    weights_ptr,
    E,
    scaling,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add a token's parts, and choose the K experts with the highest score + bias."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK_E)
    is_expert = expert < E
    bias = tl.load(bias_ptr + expert, mask=is_expert, other=0.0)
    is_token = tl.load(positions_ptr + token) >= 0
    wait_for_last(PDL)
    start_next(PDL)
    z = tl.zeros([BLOCK_E], tl.float32)
    for slot in tl.static_range(SLOTS):
        part = parts_ptr + (token * SLOTS + slot) * E + expert
        z += tl.load(part, mask=is_expert, other=0.0)
    score = _score(z)
    # Compare integers of the same order as the values. Then even with NaN only existing experts are
    # chosen, and none twice.
    value = (score + bias) + 0.0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where(value != value, 0x7FFFFFFF, order)
    order = tl.where(is_expert, order, -0x80000000)
    k_index = tl.full([BLOCK_E], K, tl.int32)
    for k in tl.static_range(K):
        best = tl.min(tl.where(order == tl.max(order, axis=0), expert, BLOCK_E), axis=0)
        order = tl.where(expert == best, -0x80000000, order)
        k_index = tl.where(expert == best, k, k_index)
    is_chosen = k_index < K
    total = tl.sum(tl.where(is_chosen, score, 0.0), axis=0)
    weights = tl.where(is_token, score / (total + 1e-20) * scaling, 0.0)
    tl.store(ids_ptr + token * K + k_index, tl.where(is_token, expert, -1), mask=is_chosen)
    tl.store(weights_ptr + token * K + k_index, weights, mask=is_chosen)


@triton.jit
def _hash_kernel(
    x_ptr,
    gate_ptr,
    parts_ptr,
    table_ptr,
    token_ids_ptr,
    positions_ptr,
    ids_ptr,
    weights_ptr,
    D: tl.constexpr,
    E,
    K,
    stride_x,
    scaling,
    MULTIPLY: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the weights of a token's experts from the table.

    MULTIPLY: compute the GEMM's results here; otherwise read them from the parts.
    """
    token = tl.program_id(0).to(tl.int64)
    k_index = tl.arange(0, BLOCK_K)
    is_chosen = k_index < K
    is_token = tl.load(positions_ptr + token) >= 0
    token_id = tl.load(token_ids_ptr + token)
    ids = tl.load(table_ptr + token_id * K + k_index, mask=is_chosen & is_token, other=0)
    if MULTIPLY:
        column = tl.arange(0, BLOCK_D)
        gates = ()
        for start in tl.static_range(0, D, BLOCK_D):
            d = start + column
            rows = gate_ptr + ids[:, None] * D + d[None, :]
            mask = is_chosen[:, None] & (d < D)[None, :]
            gate = tl.load(rows, mask=mask, other=0.0, eviction_policy="evict_first")
            gates = gates + (gate,)  # type: ignore[assignment]  # noqa: RUF005
        wait_for_last(PDL)
        sums = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
        for i in tl.static_range((D + BLOCK_D - 1) // BLOCK_D):
            d = i * BLOCK_D + column
            x = tl.load(x_ptr + token * stride_x + d, mask=d < D, other=0.0).to(tl.float32)
            sums += x[None, :] * gates[i].to(tl.float32)
        z = tl.sum(sums, axis=1)
    else:
        wait_for_last(PDL)
        z = tl.load(parts_ptr + token * E + ids, mask=is_chosen, other=0.0)
    score = tl.where(is_chosen & is_token, _score(z), 0.0)
    weights = score / (tl.sum(score, axis=0) + 1e-20) * scaling
    start_next(PDL)
    tl.store(ids_ptr + token * K + k_index, tl.where(is_token, ids, -1), mask=is_chosen)
    tl.store(weights_ptr + token * K + k_index, weights, mask=is_chosen)


LAUNCH_CLASSES = LaunchClasses(tokens=lambda model, most: up_to(most, (1, NARROW_TILE, FEW_TOKENS)))


@dataclass(frozen=True, slots=True)
class GatePlan:
    """The kernel of the GEMM with the gate, and its tile sizes.

    Attributes:
        few: the GEMM is split along D into chunks of block_d, to occupy the GPU.
        block_n, block_e, block_d: tokens, experts and values of D of a tile.
        stages: of the loads of the kernel for many tokens.
    """

    few: bool
    block_n: int
    block_e: int
    block_d: int
    num_warps: int
    stages: int = 0

    @staticmethod
    def of(x_ND: Tensor, gate_ED: Tensor, invariant: bool, stages: int) -> "GatePlan":
        num_tokens = len(x_ND)
        if num_tokens <= FEW_TOKENS or invariant:
            block_n = NARROW_TILE if num_tokens <= NARROW_TILE else 2 * NARROW_TILE
            return GatePlan(True, block_n, 32, 256, num_warps=4)
        if x_ND.dtype == gate_ED.dtype == torch.bfloat16:
            # On an H200, 1,536 tokens take 17 us, and 34 with tiles twice as large; 4,096 take 25
            # and 35, 8,192 take 50 and 37.
            return GatePlan(False, 64, 64, 64, num_warps=4, stages=stages)
        # A float32 GEMM does not use tensor cores, and large tiles would not fit.
        return GatePlan(False, 64, 64, 32, num_warps=8, stages=2)


def _check(x_ND: Tensor, topk: int, **contiguous: Tensor) -> None:
    experts = contiguous["gate"].shape[0]
    if experts > MAX_EXPERTS or not 0 < topk <= min(MAX_TOPK, experts):
        raise ValueError(
            f"these kernels choose up to {MAX_TOPK} of up to {MAX_EXPERTS} experts, got {topk} "
            f"of {experts}"
        )
    if x_ND.stride(1) != 1:
        raise ValueError(f"a row's values must be contiguous, got strides {x_ND.stride()}")
    check_contiguous(**contiguous)


def _outputs(x_ND: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    shape = (x_ND.shape[0], topk)
    return (
        torch.empty(shape, dtype=torch.int32, device=x_ND.device),
        torch.empty(shape, dtype=torch.float32, device=x_ND.device),
    )


def _multiply(x_ND: Tensor, gate_ED: Tensor, plan: GatePlan, early_launch: bool) -> Tensor:
    """x gate^T in parts [N,S,E] float32, to be added over S."""
    (num_tokens, width), experts = x_ND.shape, gate_ED.shape[0]
    slots = triton.cdiv(width, plan.block_d) if plan.few else 1
    parts = torch.empty((num_tokens, slots, experts), dtype=torch.float32, device=x_ND.device)
    rows, columns = triton.cdiv(experts, plan.block_e), triton.cdiv(num_tokens, plan.block_n)
    if plan.few:
        kernel, more = _gate_few_kernel[(rows, slots, columns)], launch_options(early_launch)
    else:
        kernel, more = _gate_many_kernel[(rows, columns)], {"num_stages": plan.stages}
    kernel(
        *(x_ND, gate_ED, parts, num_tokens, width, experts, x_ND.stride(0)),
        BLOCK_N=plan.block_n,
        BLOCK_E=plan.block_e,
        BLOCK_D=plan.block_d,
        num_warps=plan.num_warps,
        **more,
    )
    return parts


def route_by_score(
    x_ND: Tensor,
    gate_ED: Tensor,
    bias_E: Tensor,
    topk: int,
    scaling: float,
    positions_N: Tensor,
    *,
    invariant: bool = False,
    early_launch: bool = False,
    registers: int | None = None,
    stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """gate float32 or bfloat16; returns ids int32, -1 at a position of -1.

    invariant: a token's bits do not depend on the number of tokens.
    registers: of a thread of the kernel that chooses; None: the compiler's choice.
    stages: of the loads of many tokens' bfloat16 GEMM. Each takes shared memory.
    """
    _check(x_ND, topk, gate=gate_ED, bias=bias_E, positions=positions_N)
    num_tokens = x_ND.shape[0]
    experts = gate_ED.shape[0]
    ids, weights = _outputs(x_ND, topk)
    if num_tokens == 0:
        return ids, weights
    plan = GatePlan.of(x_ND, gate_ED, invariant, stages)
    parts = _multiply(x_ND, gate_ED, plan, early_launch)
    _choose_kernel[(num_tokens,)](
        *(parts, bias_E, positions_N, ids, weights, experts, scaling),
        SLOTS=parts.shape[1],
        K=topk,
        BLOCK_E=triton.next_power_of_2(experts),
        num_warps=4 if experts > 256 and parts.shape[1] > 1 else 1,
        **({} if registers is None else {"maxnreg": registers}),
        **launch_options(early_launch),
    )
    return ids, weights


def route_by_hash(
    x_ND: Tensor,
    gate_ED: Tensor,
    tid2eid_VK: Tensor,
    token_ids_N: Tensor,
    scaling: float,
    positions_N: Tensor,
    *,
    invariant: bool = False,
    early_launch: bool = False,
    stages: int = 3,
) -> tuple[Tensor, Tensor]:
    """gate float32 or bfloat16; returns ids int32, -1 at a position of -1."""
    topk = tid2eid_VK.shape[1]
    _check(
        x_ND, topk, gate=gate_ED, tid2eid=tid2eid_VK, token_ids=token_ids_N, positions=positions_N
    )
    num_tokens, width = x_ND.shape
    ids, weights = _outputs(x_ND, topk)
    if num_tokens == 0:
        return ids, weights
    plan = GatePlan.of(x_ND, gate_ED, invariant, stages)
    _hash_kernel[(num_tokens,)](
        x_ND,
        gate_ED,
        x_ND if plan.few else _multiply(x_ND, gate_ED, plan, early_launch),
        *(tid2eid_VK, token_ids_N, positions_N, ids, weights),
        *(width, gate_ED.shape[0], topk, x_ND.stride(0), scaling),
        MULTIPLY=plan.few,
        BLOCK_D=min(HASH_BLOCK_D, triton.next_power_of_2(width)),
        BLOCK_K=triton.next_power_of_2(topk),
        num_warps=8 if plan.few else 1,
        **launch_options(early_launch),
    )
    return ids, weights
