"""Calls of DeepSeek-V4.1's GEMM kernels, which sm90_compile.py compiles for SM90."""

from collections.abc import Callable
from functools import partial

import torch

from finwhale.ops.deepseek_v41 import experts_hopper as experts
from finwhale.ops.deepseek_v41 import gemm_triton as gemm
from finwhale.ops.linear import LinearWeight
from finwhale.ops.moe import ExpertWeight

from .sm90_compile import f32, meta

OPTIONS = gemm.GemmOptions(early_launch=True, inline_asm=True)
HIDDEN = 5120
# (G, M, K) of one of four ranks: wq_a and wkv, wq_b, wo_a, wo_b; and of one rank: Engram's wkv.
LINEARS = (
    (1, 1792, 5120),
    (1, 12288, 1280),
    (2, 1024, 4096),
    (1, 5120, 2048),
    (1, 25600, 6144),
    (1, 5120, 15360),
)
TOKENS = (1, 16, 17, 64, 8192)
# I of one of 4, 8 and 1 ranks.
INNER = (576, 288, 2304)


def e4m3(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.float8_e4m3fn)


def call_linear(G: int, M: int, K: int, N: int) -> None:
    scale = f32(G, M // 32, K // 32)
    if G > 1:
        w = LinearWeight(e4m3(G, M, K), 0, scale, scale_block=32)
        gemm.grouped_linear(meta(N, G, K), w, options=OPTIONS)
    else:
        w = LinearWeight(e4m3(M, K), 32, scale[0], scale_block=32)
        gemm.linear(meta(N, K), w, options=OPTIONS)


def call_shared(inner: int, N: int) -> None:
    D, I = HIDDEN, inner  # noqa: E741
    scales = f32(2 * I // 32, D // 32), f32(D // 32, I // 32)
    w = ExpertWeight(e4m3(2 * I, D), e4m3(D, I), 32, *scales, 32)
    gemm.swiglu_mlp(meta(N, D), w, 10.0, options=OPTIONS)


def call_experts(inner: int, E: int, K: int, N: int, D: int = HIDDEN) -> None:
    I, u8 = inner, torch.uint8  # noqa: E741
    w = ExpertWeight(meta(E, 2 * I, D // 2, dtype=u8), meta(E, D, I // 2, dtype=u8), 32)
    w = ExpertWeight(
        *(w.w13, w.w2, 32, meta(E, 2 * I, D // 32, dtype=u8), meta(E, D, I // 32, dtype=u8))
    )
    pairs = experts.dispatch(meta(N, K, dtype=torch.int32), E, options=OPTIONS)
    finished = experts.finish_experts(w)
    experts.compute(meta(N, D), f32(N, K), pairs, finished, 10.0, options=OPTIONS)


def calls() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for N in TOKENS:
        for G, M, K in LINEARS if N in (1, 16) else LINEARS[:1]:
            found[f"v41-linear-{M}-{K}-{N}"] = partial(call_linear, G, M, K, N)
        found[f"v41-shared-{INNER[N % 2]}-{N}"] = partial(call_shared, INNER[N % 2], N)
    for inner in INNER:
        for N in (1, 32, 128, 400, 8192) if inner == 576 else (1, 8192):
            found[f"v41-experts-{inner}-{N}"] = partial(call_experts, inner, 384, 6, N)
    for N in (1, 20, 300):
        found[f"v41-experts-demo-{N}"] = partial(call_experts, 64, 4, 2, N, 64)
    found["v41-experts-1152-1"] = partial(call_experts, 1152, 384, 6, 1)
    found["v41-experts-draft-6"] = partial(call_experts, 576, 128, 3, 6)
    return found


# Tensors that reach beyond 2^31 elements.
FAR: dict[str, Callable[[], None]] = {
    "v41-linear": partial(call_linear, *LINEARS[1], 2**20),
    "v41-grouped": partial(call_linear, *LINEARS[2], 2**20),
    "v41-shared": partial(call_shared, 2304, 2**20),
    "v41-experts": partial(call_experts, 2304, 384, 6, 2**19),
}
CALLS = calls()
