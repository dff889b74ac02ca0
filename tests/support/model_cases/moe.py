"""Calls of the router and the experts at the models' sizes.

"experts" is dispatch, compute and combine together, because the value that dispatch passes to
compute differs between tables.
"""

from collections.abc import Iterator

import torch
from tests.support.op_case import Args, Chunks, ModelDraw, OpCase, OpSizes, num_tokens

from finwhale.bench.floors import FP4_BYTES
from finwhale.ops.moe import ExpertWeight

MODEL_LIMIT = 10.0


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    yield from _model_routes(s, draw, chunks)
    yield from _model_experts(s, draw, chunks)


def _model_routes(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    D, E, K = s.hidden_size, s.n_routed_experts, s.num_experts_per_tok
    N, size = num_tokens(chunks), draw.dtype.itemsize

    def by_score() -> Args:
        gate, bias = draw.normal(E, D, scale=D**-0.5).to(draw.dtype), draw.normal(E, scale=0.1)
        positions = draw.tokens(chunks).positions
        return draw.normal(N, D).to(draw.dtype), gate, bias, K, 1.5, positions

    def by_hash() -> Args:
        x, gate, _, _, scaling, positions = by_score()
        first = draw.integers(E, s.vocab_size, 1)
        table = (first + torch.arange(K, device=draw.device) * (E // K)) % E
        return x, gate, table, draw.integers(s.vocab_size, N), scaling, positions

    token_bytes = D * size + 8 * K + 8
    yield OpCase(operator="route_by_score", args=by_score, bytes=N * token_bytes + size * E * D)
    yield OpCase(operator="route_by_hash", args=by_hash, bytes=N * (token_bytes + 8) + size * K * D)


def _model_experts(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    D, E, K = s.hidden_size, s.n_routed_experts, s.num_experts_per_tok
    I, N = s.moe_intermediate_size, num_tokens(chunks)  # noqa: E741

    def routed() -> ExpertWeight:
        (w13, scale13), (w2, scale2) = draw.fp4(E, 2 * I, D), draw.fp4(E, D, I)
        return ExpertWeight(w13, w2, 128, scale13, scale2)

    def shared() -> ExpertWeight:
        (w13, scale13), (w2, scale2) = draw.fp8(2 * I, D), draw.fp8(D, I)
        return ExpertWeight(w13, w2, 128, scale13, scale2)

    def args(w: ExpertWeight) -> Args:
        noise = torch.rand(N, E, generator=draw.generator, device=draw.device)
        ids = noise.topk(K, 1).indices.int()
        weights = draw.normal(N, K).abs()
        x, residual = (draw.normal(N, D).to(draw.dtype) for _ in range(2))
        return x, ids, weights, w, MODEL_LIMIT, residual

    # The expected number of different experts, if N tokens choose uniformly.
    reached = E * (1 - (1 - K / E) ** N)
    yield OpCase(
        operator="experts",
        args=args,
        weight=routed,
        bytes=reached * 3 * I * D * FP4_BYTES + N * (6 * D + 8 * K),
        operations=6.0 * N * K * I * D,
    )
    yield OpCase(
        operator="swiglu_mlp",
        args=lambda w: (draw.normal(N, D).to(draw.dtype), w, MODEL_LIMIT),
        weight=shared,
        bytes=N * 4 * D + 3 * I * D,
        operations=6.0 * N * I * D,
    )
