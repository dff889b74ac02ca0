"""Calls of linear layers at the models' sizes."""

from collections.abc import Iterator

import torch
from tests.support.op_case import (
    Chunks,
    ModelDraw,
    OpCase,
    OpSizes,
    num_tokens,
)

from finwhale.bench.floors import BF16_RATE, FP8_RATE
from finwhale.ops.linear import LinearWeight


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    N, D, Q = num_tokens(chunks), s.hidden_size, s.q_lora_rank
    A, C = s.num_attention_heads, s.head_dim
    I, J, G, O = s.index_n_heads, s.index_head_dim, s.o_groups, s.o_lora_rank  # noqa: E741

    def fp8_weight(*shape: int, round_input: bool = True) -> LinearWeight:
        weight, scale = draw.fp8(*shape)
        return LinearWeight(weight, 128 * round_input, scale, draw.dtype)

    def linear(name: str, K: int, M: int, fp8: bool = True) -> OpCase:
        def weight() -> LinearWeight:
            if fp8:
                return fp8_weight(M, K)
            w = draw.normal(M, K, scale=K**-0.5).to(draw.dtype)
            return LinearWeight(w, out_dtype=torch.float32)

        return OpCase(
            operator="linear",
            name=name,
            args=lambda w: (draw.activation(N, K), w),
            weight=weight,
            bytes=N * (2 * K + (2 if fp8 else 4) * M) + M * K * (1 if fp8 else 2),
            operations=2.0 * N * M * K,
            rate=FP8_RATE if fp8 else BF16_RATE,
        )

    def grouped(name: str, round_input: bool) -> OpCase:
        K = A * C // G
        return OpCase(
            operator="grouped_linear",
            name=name,
            args=lambda w: (draw.activation(N, G, K), w),
            weight=lambda: fp8_weight(G, O, K, round_input=round_input),
            bytes=N * 2 * G * (K + O) + G * O * K,
            operations=2.0 * N * G * O * K,
            rate=FP8_RATE if round_input else BF16_RATE,
        )

    yield linear("wq_a_wkv", D, Q + C)
    yield linear("wq_b", Q, A * C)
    yield linear("wq_b of C4", Q, A * C + I * J)
    yield linear("wo_b", G * O, D)
    yield linear("compress C4", D, 4 * C + 4 * J + I, fp8=False)
    yield linear("compress C128", D, 2 * C, fp8=False)
    yield linear("head", D, s.head_rows or s.vocab_size, fp8=False)
    yield grouped("wo_a", True)
    yield grouped("wo_a of bfloat16", False)
