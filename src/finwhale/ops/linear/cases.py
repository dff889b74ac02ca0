"""Linear layers: one and many rows, widths that no tile divides, rounded and unrounded inputs.

Every implementation rounds an input to the same bits, so the tolerance covers only the order of
sums.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from finwhale.ops.case import (
    BF16_RATE,
    FP8_RATE,
    Args,
    Chunks,
    Draw,
    ModelDraw,
    OpCase,
    OpSizes,
    num_tokens,
    strided,
)
from finwhale.ops.linear import LinearWeight

# N, K, M: no rows, the embedded model's sizes, odd sizes, numbers of rows around which BLAS changes
# kernels, a size of Flash, and one large enough to be split over threads.
PLAIN = (
    (0, 256, 128),
    (1, 256, 128),
    (1, 1, 1),
    (2, 130, 17),
    (5, 320, 200),
    (13, 128, 256),
    (33, 200, 33),
    (3, 4096, 512),
    (300, 256, 256),
)
STRIDED = ((1, 256, 128), (5, 320, 200), (33, 200, 33))
# N, G, K, M. The last has one group, like each of eight ranks of Flash.
GROUPED = ((0, 2, 64, 16), (1, 2, 512, 128), (3, 1, 130, 7), (17, 8, 64, 16), (5, 1, 512, 128))


def _linear(N: int, K: int, M: int, round_input: bool) -> OpCase:
    def args() -> Args:
        draw = Draw()
        w = LinearWeight(draw.normal(M, K, scale=K**-0.5), round_input)
        return draw.outliers(N, K), w

    name = f"{(N, K, M)} rounded" if round_input else str((N, K, M))
    return OpCase(operator="linear", name=name, args=args, by_token=(0,))


def _grouped(N: int, G: int, K: int, M: int, round_input: bool) -> OpCase:
    def args() -> Args:
        draw = Draw()
        w = LinearWeight(draw.normal(G, M, K, scale=K**-0.5), round_input)
        return draw.outliers(N, G, K), w

    name = f"{(N, G, K, M)} rounded" if round_input else str((N, G, K, M))
    return OpCase(operator="grouped_linear", name=name, args=args, by_token=(0,))


def _strided(N: int, K: int, M: int, round_input: bool) -> OpCase:
    """Rows that lie in a wider tensor."""
    case = _linear(N, K, M, round_input)

    def args() -> Args:
        x, w = case.args()
        return strided(x), w

    return replace(case, name=f"{case.name} strided", args=args)


CASES = (
    *(_linear(*size, rounded) for size in PLAIN for rounded in (False, True)),
    *(_strided(*size, rounded) for size in STRIDED for rounded in (False, True)),
    *(_grouped(*size, rounded) for size in GROUPED for rounded in (False, True)),
)


def model_cases(s: OpSizes, draw: ModelDraw, chunks: Chunks) -> Iterator[OpCase]:
    N, D, Q = num_tokens(chunks), s.hidden_size, s.q_lora_rank
    A, C = s.num_attention_heads, s.head_dim
    I, J, G, O = s.index_n_heads, s.index_head_dim, s.o_groups, s.o_lora_rank  # noqa: E741

    def fp8_weight(*shape: int, round_input: bool = True) -> LinearWeight:
        weight, scale = draw.fp8(*shape)
        return LinearWeight(weight, round_input, scale, draw.dtype)

    def linear(name: str, K: int, M: int, fp8: bool = True) -> OpCase:
        def weight() -> LinearWeight:
            if fp8:
                return fp8_weight(M, K)
            w = draw.normal(M, K, scale=K**-0.5).to(draw.dtype)
            return LinearWeight(w, out_dtype=torch.float32)

        # The last bit of a tensor core's sum of FP8 products is 2^-13 of the largest product.
        return OpCase(
            operator="linear",
            name=name,
            args=lambda w: (draw.activation(N, K), w),
            weight=weight,
            by_token=(0,),
            tolerance=1e-3 if fp8 else 1e-4,
            batch_invariant=False,
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
            by_token=(0,),
            tolerance=1e-3,
            batch_invariant=False,
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
