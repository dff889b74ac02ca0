"""Counter-based random numbers: the draw of a request's step is a hash of (seed, step).

SplitMix64 (Steele, Lea and Flood 2014): its finaliser gives each seed a starting state, and the
generator's output number `step` from there is computed directly.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def uniforms(seeds: Sequence[int], steps: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, step).

    Args:
        seeds: any integers; equal modulo 2^64 is equal.
        steps: 0 or more, as many as seeds.
    """
    return draws(states(seeds), steps)


def states(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """What `draws` takes for seeds, for many steps."""
    return _finalise(np.array([seed & _MASK for seed in seeds], dtype=np.uint64) + _GOLDEN)


def draws(state: NDArray[np.uint64], steps: Sequence[int]) -> NDArray[np.float64]:
    """`uniforms` of the seeds that `state` was made of."""
    counter = np.array(steps, dtype=np.uint64) + np.uint64(1)
    bits = _finalise(state + counter * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, index: int) -> int:
    """The seed of continuation `index` of a request: the request's own for 0."""
    if index == 0:
        return seed & _MASK
    mixed = _finalise(np.array([seed & _MASK], dtype=np.uint64) ^ _MIX_1)
    return int(_finalise(mixed + np.array([index], dtype=np.uint64) * _GOLDEN)[0])


def _finalise(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
