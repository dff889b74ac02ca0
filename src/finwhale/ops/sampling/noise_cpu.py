"""The noise of noise.py in numpy, with the same bits.

The arrays of one row are so small that a numpy call takes as long as its computation. So there are
few calls, and they write into existing arrays.
"""

import numpy as np
import torch
from numpy import add, bitwise_and, bitwise_xor, multiply, negative, right_shift, subtract
from numpy.typing import NDArray
from torch import Tensor

from finwhale.ops.sampling.noise import (
    HALF,
    KEY_STEPS,
    LOG_2_HIGH,
    LOG_2_LOW,
    LOG_POLYNOMIAL,
    MASK,
    MULTIPLIERS,
    ROUNDS,
    SQRT_HALF,
)

Floats = NDArray[np.float32]
Integers = NDArray[np.int32]
Words = NDArray[np.uint32]

PASS = 16 * HALF  # counters computed at once, so that their arrays stay in the L1 and L2 caches
# Arrays without dimensions are numpy's fastest constants.
MULTIPLIER_0, MULTIPLIER_1, LOW, WORD_BITS = (
    np.array(x, np.uint64) for x in (*MULTIPLIERS, MASK, 32)
)
STEPS = np.array(KEY_STEPS, np.uint64) * np.arange(ROUNDS, dtype=np.uint64)[:, None]
FIRST_COEFFICIENT, *COEFFICIENTS = (np.array(x, np.float32) for x in LOG_POLYNOMIAL)
LOG_HIGH, LOG_LOW = np.array(LOG_2_HIGH, np.float32), np.array(LOG_2_LOW, np.float32)
WORD, LEAST = np.array(2.0**-32, np.float32), np.array(2.0**-65, np.float32)
ZERO, QUARTER, ONE_HALF, ONE = (np.array(x, np.float32) for x in (0, 0.25, 0.5, 1))
ROOT, MANTISSA_BITS = np.array(SQRT_HALF, np.int32), np.array(23, np.int32)


def gumbel(
    seeds_R: Tensor, indices_R: Tensor, positions_R: Tensor, num_tokens: int, first: int = 0
) -> Tensor:
    """See noise.py."""
    begin = first // (2 * HALF) * HALF
    end = -(-(first + num_tokens) // (2 * HALF)) * HALF
    # HALF counters serve two tiles of HALF tokens.
    noise = np.empty((len(seeds_R), (end - begin) // HALF, 2, HALF), np.float32)
    rows = zip(seeds_R.tolist(), indices_R.tolist(), positions_R.tolist(), strict=True)
    for row, (seed, index, position) in zip(noise, rows, strict=True):
        for at in range(begin, end, PASS):
            words = philox(at, min(PASS, end - at), position, index, seed)
            tiles = of_bits(words).reshape(2, -1, HALF).transpose(1, 0, 2)
            negative(tiles, row[(at - begin) // HALF :][: len(tiles)])
    at = first - 2 * begin
    return torch.from_numpy(noise.reshape(len(noise), 2 * (end - begin))[:, at : at + num_tokens])


def philox(first: int, count: int, position: int, index: int, seed: int) -> Words:
    """Words (0, 2) and (1, 3) for each counter (first + i, position, index, 0): [2,2,count].

    In the first two rounds, some words are the same for all counters.
    """
    keys = STEPS + np.array((seed & MASK, seed >> 32 & MASK), np.uint64) & LOW
    (a0, a1), (b0, b1) = keys[:2].tolist()
    words, product = np.empty((2, 2, count), np.uint64), np.empty((2, count), np.uint64)
    even, odd = words
    c0, c2 = even
    p1, p0 = product  # the products that words 0 and 2 come from
    p = index * MULTIPLIERS[1]
    word_0, word_1 = p >> 32 ^ position ^ a0, p & MASK
    multiply(np.arange(first, first + count, dtype=np.uint64), MULTIPLIER_0, p0)
    right_shift(p0, WORD_BITS, c2)
    bitwise_xor(c2, np.array(a1, np.uint64), c2)
    bitwise_and(p0, LOW, p0)

    p = word_0 * MULTIPLIERS[0]
    multiply(c2, MULTIPLIER_1, p1)
    right_shift(p1, WORD_BITS, c0)
    bitwise_xor(c0, np.array(word_1 ^ b0, np.uint64), c0)
    bitwise_xor(p0, np.array(p >> 32 ^ b1, np.uint64), c2)
    bitwise_and(p1, LOW, odd[0])
    odd[1] = p & MASK

    for i in range(2, ROUNDS):
        multiply(c2, MULTIPLIER_1, p1)
        multiply(c0, MULTIPLIER_0, p0)
        right_shift(product, WORD_BITS, even)
        bitwise_xor(even, odd, even)
        bitwise_xor(c0, keys[i, 0, ...], c0)
        bitwise_xor(c2, keys[i, 1, ...], c2)
        bitwise_and(product, LOW, odd)
    return words.astype(np.uint32)


def of_bits(words: Words) -> Floats:
    """Minus the noise of 64 random bits each: [2,...], high and low words, to [...]."""
    (w, f), (x, e) = _fractions(words)
    _split(f, e)
    near_1 = w < QUARTER
    np.copyto(f, negative(w, x), where=near_1)
    np.copyto(e, ZERO, where=near_1)
    negative(_log(f, e, w, x), f)
    _split(f, e)
    return _log(f, e, w, x)


def _fractions(words: Words) -> tuple[Floats, Floats]:
    """(n + 1/2) / 2^64 of the words, then of their complements: [2,...]; and scratch memory."""
    both = np.array((words, ~words)).astype(np.float32)
    high, low = both[:, 0], both[:, 1]
    multiply(low, WORD, low)
    add(high, low, high)
    multiply(high, WORD, high)
    return add(high, LEAST, high), low


def _split(x: Floats, e: Floats) -> None:
    """Write noise._split's exponent to e, and replace x by its f."""
    bits: Integers = x.view(np.int32)
    whole = bits - ROOT
    right_shift(whole, MANTISSA_BITS, whole)
    e[...] = whole
    np.left_shift(whole, MANTISSA_BITS, whole)
    subtract(bits, whole, bits)
    subtract(x, ONE, x)


def _log(f: Floats, e: Floats, square: Floats, p: Floats) -> Floats:
    """Write log((1 + f) * 2^e) to `p` and return it; changes `e` and `square`."""
    multiply(f, f, square)
    multiply(f, FIRST_COEFFICIENT, p)
    add(p, COEFFICIENTS[0], p)
    for coefficient in COEFFICIENTS[1:]:
        multiply(p, f, p)
        add(p, coefficient, p)
    multiply(p, f, p)
    multiply(p, square, p)
    multiply(square, ONE_HALF, square)
    add(p, e * LOG_LOW, p)
    subtract(p, square, p)
    add(p, f, p)
    multiply(e, LOG_HIGH, e)
    return add(p, e, p)
