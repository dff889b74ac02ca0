"""Compressors: steps with and without complete entries, first windows, history, every rounding."""

from typing import Any, Literal

import torch

from finwhale.ops.case import Draw, OpCase
from finwhale.ops.compressor import CompressorWeight, CompressStep

EPS = 1e-6
STATE_ROWS = 320
Rounding = Literal["none", "nope", "whole"]
# ratio, tokens of each chunk as (start, end), entry width, rope width.
STEPS: tuple[tuple[Literal[4, 128], tuple[tuple[int, int], ...], int, int], ...] = (
    (4, ((0, 1),), 128, 64),
    (4, ((3, 4),), 128, 64),
    (4, ((0, 4), (7, 8), (5, 7)), 128, 64),
    (4, ((0, 41), (9, 12)), 130, 34),
    (4, ((8, 12),), 512, 64),
    (128, ((126, 127),), 128, 64),
    (128, ((127, 128),), 128, 64),
    (128, ((0, 130), (255, 256), (100, 101)), 48, 16),
    (128, ((200, 384),), 512, 64),
)
KEPT = {4: (4, 4), 128: (128, 0)}


def compress_step(
    draw: Draw, ratio: Literal[4, 128], chunks: tuple[tuple[int, int], ...]
) -> CompressStep:
    """As the engine builds it, from random slots."""
    align, before = KEPT[ratio]
    mixed = 2 * ratio if ratio == 4 else ratio
    history: list[int] = []
    sources, positions, kept, new = [], [], [], 0
    starts = []
    for start, end in chunks:
        completes = end // ratio > start // ratio
        first = max(0, start // align * align - before) if completes else start
        starts.append((len(history), first))
        history += range(first, start)
    for (start, end), (at, first) in zip(chunks, starts, strict=True):
        for entry in range(start // ratio, end // ratio):
            tokens = range((entry + 1) * ratio - mixed, (entry + 1) * ratio)
            sources.append(
                [
                    -1 if t < 0 else at + t - first if t < start else len(history) + new + t - start
                    for t in tokens
                ]
            )
            positions.append(entry * ratio)
        first_kept = max(start, end // align * align - before)
        kept += [new + t - start for t in range(first_kept, end)]
        new += end - start
    slots = draw.distinct(STATE_ROWS, len(history) + len(kept))
    return CompressStep(
        history_slots=slots[: len(history)],
        entry_sources=torch.tensor(sources, dtype=torch.int64).view(-1, mixed),
        entry_slots=draw.distinct(50, len(positions)),
        entry_positions=torch.tensor(positions, dtype=torch.int64),
        state_sources=torch.tensor(kept, dtype=torch.int64),
        state_slots=slots[len(history) :],
    )


def _case(
    ratio: Literal[4, 128], chunks: tuple[tuple[int, int], ...], C: int, R: int, rounding: Rounding
) -> OpCase:
    def args() -> tuple[Any, ...]:
        draw = Draw()
        step = compress_step(draw, ratio, chunks)
        width = 4 * C if ratio == 4 else 2 * C
        w = CompressorWeight(draw.normal(8 if ratio == 4 else 128, C), draw.normal(C), ratio)
        return (
            draw.normal(sum(end - start for start, end in chunks), width, scale=2.0),
            w,
            step,
            draw.rotation(step.entry_slots.shape[0], R),
            EPS,
            rounding,
            draw.normal(STATE_ROWS, width, scale=2.0),
            draw.normal(50, C),
        )

    flips = 0.0 if rounding == "none" else 0.005
    return OpCase(
        operator="compress",
        name=f"{ratio} {chunks} {(C, R)} {rounding}",
        args=args,
        written=(6, 7),
        flips=flips,
    )


ROUNDINGS: tuple[Rounding, ...] = ("none", "nope", "whole")
CASES = tuple(_case(*step, rounding) for step in STEPS for rounding in ROUNDINGS)
