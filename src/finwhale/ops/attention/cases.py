"""Attention: first tokens of a sequence, whole windows, entries of several blocks and of none."""

from typing import Any

import torch
from torch import Tensor

from finwhale.ops.case import Draw, OpCase

EPS = 1e-6
# N, A, C, R.
HEADS = ((0, 8, 128, 64), (1, 8, 128, 64), (5, 3, 80, 16), (9, 1, 64, 64), (2, 64, 512, 64))
# N, W, K (0: no entries), A, C: the demo model's, several blocks and a rest, Flash's width.
KEYS = (
    (0, 128, 64, 8, 128),
    (1, 128, 0, 8, 128),
    (1, 128, 64, 8, 128),
    (7, 13, 5, 2, 48),
    (4, 128, 328, 8, 128),
    (40, 128, 128, 4, 64),
    (2, 128, 512, 16, 512),
)


def _query(N: int, A: int, C: int, R: int) -> tuple[OpCase, ...]:
    def args() -> tuple[Any, ...]:
        draw = Draw()
        return draw.normal(N, A, C) + draw.outliers(N, A, C), draw.rotation(N, R), EPS

    def inverse() -> tuple[Any, ...]:
        return args()[:2]

    name = str((N, A, C, R))
    return (
        OpCase(operator="prepare_query", name=name, args=args, by_token=(0, 1)),
        OpCase(operator="inverse_rope", name=name, args=inverse, by_token=(0, 1)),
    )


def _store(N: int, C: int, R: int, round_nope: bool) -> OpCase:
    def args() -> tuple[Any, ...]:
        draw = Draw()
        kv, norm, rotation = draw.normal(N, C), draw.normal(C), draw.rotation(N, R)
        rows, slots = draw.normal(50, C), draw.distinct(50, N)
        return kv, norm, rotation, EPS, round_nope, rows, slots

    name = f"{(N, C, R)} rounded" if round_nope else str((N, C, R))
    return OpCase(
        operator="store_window",
        name=name,
        args=args,
        by_token=(0, 2, 6),
        written=(5,),
        flips=0.005 if round_nope else 0.0,
    )


def slots(draw: Draw, num_rows: int, valid: list[int], width: int, at_end: bool) -> Tensor:
    """[N,width]: valid[n] slots at the end or the beginning of row n, -1 elsewhere."""
    out = torch.full((len(valid), width), -1)
    for row, count in enumerate(valid):
        if count:
            part = slice(width - count, width) if at_end else slice(0, count)
            out[row, part] = draw.whole(num_rows, count)
    return out


def _attend(N: int, W: int, K: int, A: int, C: int) -> OpCase:
    """Tokens see 1, 2, .. W rows of the window and 0, .. K entries, the last one all of them."""

    def args() -> tuple[Any, ...]:
        draw = Draw()
        rows = draw.normal(300, C)
        window = [max(1, W * (n + 1) // N) for n in range(N)]
        entries = [K * n // max(1, N - 1) if N > 1 else K for n in range(N)]
        return (
            draw.normal(N, A, C),
            rows,
            slots(draw, 300, window, W, True),
            draw.normal(300, C) if K else None,
            slots(draw, 300, entries, K, False) if K else None,
            draw.normal(A),
            C**-0.5 * 3,
            torch.full((N, A, C), torch.nan),
        )

    by_token = (0, 2, 4, 7) if K else (0, 2, 7)
    return OpCase(
        operator="sparse_attention",
        name=str((N, W, K, A, C)),
        args=args,
        by_token=by_token,
        written=(7,),
    )


CASES = (
    *(case for size in HEADS for case in _query(*size)),
    *(
        _store(*size, rounded)
        for size in ((0, 128, 64), (1, 128, 64), (7, 130, 50), (3, 512, 64))
        for rounded in (False, True)
    ),
    *(_attend(*size) for size in KEYS),
)
