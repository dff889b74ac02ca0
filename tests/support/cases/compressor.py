"""Cases of compressors: steps with and without complete entries, first windows, every rounding."""

from typing import Literal

from tests.support.checked_case import E4M3_FLIP, FP4_FLIP, CheckedCase
from tests.support.model_cases.compressor import MAX_VERIFY_TOKENS, compress_args
from tests.support.op_case import Chunks, Draw

from finwhale.ops.compressor import Rounding
from finwhale.ops.rounding import is_power_of_two

ROUNDINGS: tuple[Rounding, ...] = ("none", "nope", "key")
# A step has a ratio, chunks (first token, end), widths of its parts' entries, and a rope width.
STEPS: tuple[tuple[Literal[4, 128], Chunks, tuple[int, ...], int], ...] = (
    (4, (), (128,), 64),
    (4, ((0, 1),), (128,), 64),
    (4, ((3, 4),), (128,), 64),
    (4, ((0, 4), (7, 8), (5, 7)), (128, 64), 64),
    (4, ((0, 41), (9, 12)), (130, 64), 34),
    (4, ((8, 12),), (512, 128), 64),
    (4, ((7, 8), (511, 512), (255, 256), (14, 15), (259, 260)), (128, 128), 64),
    (4, ((240, 530), (254, 259), (253, 257)), (64, 32), 16),
    (128, ((126, 127),), (128,), 64),
    (128, ((127, 128),), (128,), 64),
    (128, ((0, 130), (255, 256), (100, 101)), (48,), 16),
    (128, ((200, 384),), (512,), 64),
    (128, ((511, 512), (130, 131), (767, 769)), (64,), 32),
    # Steps that may verify drafts: the sequence may continue after any of its tokens.
    (4, ((254, 258), (7, 10), (11, 13), (5, 10)), (128,), 64),
    (128, ((126, 130), (127, 129), (125, 130), (128, 131)), (64,), 32),
)
# Steps with a draft head that makes 5 or 7 drafts: max_verify_tokens, then the fields of STEPS.
VERIFICATIONS: tuple[tuple[int, Literal[4, 128], Chunks, tuple[int, ...], int], ...] = (
    (6, 4, ((253, 259), (6, 11), (510, 516), (3, 4), (0, 6)), (128, 64), 64),
    (8, 4, ((250, 258), (5, 12), (7, 15), (1, 9), (512, 517)), (512, 128), 64),
    (6, 128, ((124, 130), (127, 132), (255, 261), (379, 384), (122, 128)), (64,), 32),
    (8, 128, ((120, 128), (127, 135), (252, 258), (510, 517)), (512,), 64),
)


def _case(
    ratio: Literal[4, 128],
    chunks: Chunks,
    widths: tuple[int, ...],
    rope: int,
    rounding: Rounding,
    max_verify_tokens: int = MAX_VERIFY_TOKENS,
) -> CheckedCase:
    # A layer's second part holds the indexer's keys.
    roundings: tuple[Rounding, ...] = (rounding, "none" if rounding == "none" else "key")
    return CheckedCase(
        operator="compress",
        name=f"{ratio} {chunks} {(*widths, rope)} {rounding}",
        args=lambda: compress_args(
            Draw(), ratio, chunks, widths, rope, roundings, max_verify_tokens=max_verify_tokens
        ),
        written=(0,),
        flips=0.0 if rounding == "none" else 0.005,
        flip=FP4_FLIP if "key" in roundings[: len(widths)] else E4M3_FLIP,
    )


CASES = tuple(
    _case(*step, rounding)
    for step in STEPS
    for rounding in ROUNDINGS
    if rounding != "key" or is_power_of_two(step[2][0])
) + tuple(
    _case(ratio, chunks, widths, rope, "nope", most)
    for most, ratio, chunks, widths, rope in VERIFICATIONS
)
