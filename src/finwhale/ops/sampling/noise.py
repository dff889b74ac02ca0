"""Gumbel noise: a pure function of a seed, a continuation's index, a position and a token id.

Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") gives 128 random
bits for a key and a counter. The key is the seed; the counter is (pair, position, index, 0). Each
counter serves a pair of tokens whose ids differ by HALF, with 64 bits each, so that two adjacent
tiles of tokens share their counters.

The noise of 64 bits n is -log(-log(u)) with u = 1 - (n + 1/2) / 2^64, which is between -3.8 and
45.1. It is computed from the bits with integer operations and float32 additions, subtractions and
multiplications, each rounded separately, so every implementation gives the same float32.
"""

import torch
from torch import Tensor

HALF = 128  # a pair of tokens has ids i and i + HALF
MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
# P of log(1 + f) = f - f^2/2 + f^3 P(f), 1 + f in sqrt(1/2)..sqrt(2): Cephes' logf (Moshier 1989).
LOG_POLYNOMIAL = (
    *(7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1),
    *(-1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
LOG_2_HIGH, LOG_2_LOW = 0.693359375, -2.12194440e-4  # their sum is log(2)
SQRT_HALF = 0x3F3504F3  # the bits of a float32


def gumbel(
    seeds_R: Tensor, indices_R: Tensor, positions_R: Tensor, num_tokens: int, first: int = 0
) -> Tensor:
    """The noise of the tokens first..first + num_tokens - 1: [R, num_tokens] float32.

    Args:
        seeds_R: int64, of which all bits count.
        indices_R, positions_R: int64, 0 to 2^32 - 1.
    """
    begin = first // (2 * HALF)
    end = -(-(first + num_tokens) // (2 * HALF))
    pairs_C = torch.arange(begin * HALF, end * HALF, device=seeds_R.device)
    counter = (pairs_C[None], positions_R[:, None], indices_R[:, None], torch.zeros_like(pairs_C))
    words = philox(counter, (seeds_R[:, None] & MASK, seeds_R[:, None] >> 32 & MASK))
    high_RC, low_RC = (
        torch.stack([one.unflatten(1, (-1, HALF)) for one in half], dim=2).flatten(1)
        for half in (words[::2], words[1::2])
    )
    at = first - begin * 2 * HALF
    return of_bits(high_RC[:, at : at + num_tokens], low_RC[:, at : at + num_tokens])


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words for a counter of four words and a key of two; int64 tensors below 2^32."""
    c0, c1, c2, c3 = counter
    rounds = torch.arange(ROUNDS, device=c0.device)
    keys = (
        (word[..., None] + step * rounds & MASK).unbind(-1)
        for word, step in zip(key, KEY_STEPS, strict=True)
    )
    for k0, k1 in zip(*keys, strict=True):
        # int64 products wrap, but keep all 64 bits.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (p1 >> 32 & MASK) ^ c1 ^ k0, p1 & MASK
        c2, c3 = (p0 >> 32 & MASK) ^ c3 ^ k1, p0 & MASK
    return c0, c1, c2, c3


def of_bits(high: Tensor, low: Tensor) -> Tensor:
    """The noise of 64 random bits, as two int64 tensors below 2^32."""
    w, u = _fraction(high, low), _fraction(high ^ MASK, low ^ MASK)
    # u = 1 - w, and both are precise only if small: compute log(u) as log(1 - w) if w is small.
    f, e = _split(u)
    near_1 = w < 0.25
    f, e = torch.where(near_1, -w, f), torch.where(near_1, 0.0, e)
    return -_log(*_split(-_log(f, e)))


def _fraction(high: Tensor, low: Tensor) -> Tensor:
    """(n + 1/2) / 2^64, above 0."""
    return (high.float() + low.float() * 2.0**-32) * 2.0**-32 + 2.0**-65


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """f and e, float32, with x = (1 + f) * 2^e and 1 + f in sqrt(1/2)..sqrt(2)."""
    bits = x.view(torch.int32)
    e = bits - SQRT_HALF >> 23
    return (bits - (e << 23)).view(torch.float32) - 1.0, e.float()


def _log(f: Tensor, e: Tensor) -> Tensor:
    """log((1 + f) * 2^e)."""
    square = f * f
    p = torch.full_like(f, LOG_POLYNOMIAL[0])
    for coefficient in LOG_POLYNOMIAL[1:]:
        p = p * f + coefficient
    rest = p * f * square + e * LOG_2_LOW
    return (rest - square * 0.5 + f) + e * LOG_2_HIGH
