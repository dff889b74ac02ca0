"""The lightning indexer on a CPU, in numpy. Legend in the package's docstring."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from finwhale.ops import cpu_math
from finwhale.ops.cpu_math import F32, I32, I64, view
from finwhale.ops.indexer import RATIO, IndexQueries
from finwhale.ops.paging import CacheRows, Tokens
from finwhale.ops.rounding import MIN_FP4_AMAX, fp4_group, hadamard
from finwhale.ops.slots import ENTRY_PAD, index_step, padded, token_groups

# The most scores of all heads to compute at once, so that they stay in the CPU's cache.
MAX_SCORES = 2**18
# The most values to rotate and round at once, for the same reason.
MAX_ROTATED = 2**16
_LOW_BITS = np.int64(0xFFFFFFFF)
_EXPONENT = np.array(0x7F800000, np.int32)
# These turn a group's amax into its scale: amax / 6 rounded up to a power of two. 6 is 1.5 * 2^2,
# so adding _UP increments the exponent if the mantissa exceeds 1.5, and _BY_FOUR divides by 4.
_UP = np.array(0x3FFFFF, np.int32)
_BY_FOUR = np.array(2 << 23, np.int32)
_MAGIC = np.array((22 << 23) + 0x400000, np.int32)


def prepare_index_queries(
    q_NIC: Tensor, rotary_LR: Tensor, tokens: Tokens, topk: int, round_query: bool
) -> IndexQueries:
    if tokens.max_len // RATIO <= topk:
        return IndexQueries(q_NIC)
    q: F32 = q_NIC.numpy().copy()
    cpu_math.rotate(q, cpu_math.turns(tokens.rotation(rotary_LR)))
    return IndexQueries(torch.from_numpy(rotate_to_fp4(q) if round_query else q))


def select_entries(
    q_NIC: Tensor | IndexQueries,
    weights_NI: Tensor,
    keys: CacheRows,
    rotary_LR: Tensor,
    tokens: Tokens,
    topk: int,
    scale: float,
    round_query: bool,
) -> Tensor:
    if isinstance(q_NIC, Tensor):
        q_NIC = prepare_index_queries(q_NIC, rotary_LR, tokens, topk, round_query)
    q: F32 = q_NIC.values.numpy()
    step = index_step(tokens, keys.table)
    longest = max(step.max_entries, default=0)
    width = min(topk, padded(longest))
    entry_slots: I64 = view(step.entry_slots)
    num_entries: I64 = view(step.num_entries)
    out = np.full((len(q), width), -1, np.int32)
    weights = np.multiply(weights_NI.numpy(), cpu_math.constant(scale))
    for some, sequences in token_groups(step.query_start):
        entries = max(step.max_entries[sequences])
        visible = num_entries[some]
        slots_SE = entry_slots[sequences, : padded(entries)]
        if entries <= topk:
            columns = min(width, slots_SE.shape[1])
            np.copyto(
                out[some, :columns],
                slots_SE[:, :columns],
                where=np.arange(columns) < visible[:, None],
            )
            continue
        rows, row_step = cpu_math.rows(keys.pool)
        keys_SEC = rows.take(slots_SE * row_step, 0, mode="clip")
        _select(q[some], weights[some], keys_SEC, visible, slots_SE, out[some])
    return torch.from_numpy(out)


def rotate_to_fp4(x_NIC: F32) -> F32:
    """Like rounding.rotate_to_fp4, with other orders of sums, for |x| < 2^100; zeros become +0.

    Each token has a GEMM of the same shape, so its bits do not depend on N.
    """
    num_tokens, heads, width = x_NIC.shape
    matrix, share = _signs(width), cpu_math.constant(width**-0.5)
    out = np.empty(x_NIC.shape, np.float32)
    step = max(1, MAX_ROTATED // (heads * width))

    def run(tokens: slice) -> None:
        for start in range(tokens.start, tokens.stop, step):
            some = out[start : min(start + step, tokens.stop)]
            cpu_math.matmul(x_NIC[start : start + len(some)], matrix, out=some)
            np.multiply(some, share, some)
            round_fp4(some)

    cpu_math.split_rows(num_tokens, heads * width * width, run)
    return out


@lru_cache(maxsize=8)
def _signs(width: int) -> F32:
    """The Hadamard matrix of `width` without its scale factor: all values are 1 or -1."""
    signs: F32 = np.rint(hadamard(torch.eye(width)).numpy() * width**0.5)
    signs.flags.writeable = False
    return signs


def round_fp4(x: F32) -> None:
    """Round a contiguous x [..., C] to FP4 in place, like rounding.scaled_fp4 and unscaled_fp4.

    A value x with exponent e is rounded to a multiple of 2^(e-1), or of half the scale if that is
    larger. Adding and subtracting 1.5 * 2^(e+22) rounds this way, with ties to even.
    """
    group = fp4_group(x.shape[-1])
    values = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    magnitude = np.absolute(values)
    amax: F32 = np.maximum.reduce(magnitude, -1)[..., None]
    np.maximum(amax, cpu_math.constant(MIN_FP4_AMAX), out=amax)
    scale: I32 = amax.view(np.int32)
    np.add(scale, _UP, scale)
    np.bitwise_and(scale, _EXPONENT, scale)
    np.subtract(scale, _BY_FOUR, scale)
    magic: I32 = magnitude.view(np.int32)
    np.bitwise_and(magic, _EXPONENT, magic)
    np.maximum(magic, scale, out=magic)
    np.add(magic, _MAGIC, magic)
    np.add(values, magnitude, values)
    np.subtract(values, magnitude, values)


def _select(
    q_NIC: F32, weights_NI: F32, keys_SEC: F32, visible_N: I64, slots_SE: I64, out_NK: I32
) -> None:
    """Write each token's best slots to `out`. S is N, or 1 if all tokens share their entries."""
    num_tokens, heads, width = q_NIC.shape
    num_entries = keys_SEC.shape[1]
    keys = keys_SEC.reshape(keys_SEC.shape[0], -1, ENTRY_PAD, width).swapaxes(2, 3)
    shared = keys.shape[0] != num_tokens
    step = max(1, MAX_SCORES // (heads * num_entries))

    def run(tokens: slice) -> None:
        for start in range(tokens.start, tokens.stop, step):
            some = slice(start, min(start + step, tokens.stop))
            of = slice(0, 1) if shared else some
            blocks = -(-max(int(visible_N[some].max()), out_NK.shape[1]) // ENTRY_PAD)
            scores = weighted_scores(q_NIC[some], weights_NI[some], keys[of, :blocks])
            _top(scores, visible_N[some], slots_SE[of], out_NK[some])

    cpu_math.split_rows(num_tokens, heads * num_entries * width, run)


def weighted_scores(q_NIC: F32, weights_NI: F32, keys_NBCE: F32) -> F32:
    """Scores [N, B * ENTRY_PAD]. All GEMMs have the same shape, so no bit depends on B or N."""
    relu = cpu_math.matmul(q_NIC[:, None], keys_NBCE)
    np.maximum(relu, cpu_math.constant(0.0), out=relu)
    scores: F32 = cpu_math.matmul(weights_NI[:, None, None], relu)
    return scores.reshape(q_NIC.shape[0], -1)


def _top(scores_NE: F32, visible_N: I64, slots_SE: I64, out_NK: I32) -> None:
    """Slots of the highest scores, in order of position; -1 past a token's entries."""
    num_entries = scores_NE.shape[1]
    visible_N1 = visible_N[:, None]
    np.copyto(scores_NE, -np.inf, where=np.arange(num_entries) >= visible_N1)
    chosen = best_indices(scores_NE, out_NK.shape[1])
    chosen.sort(axis=1)
    seen = chosen < visible_N1
    if len(slots_SE) > 1:
        chosen += np.arange(0, slots_SE.size, slots_SE.shape[1])[:, None]
    np.copyto(out_NK, slots_SE.take(chosen), where=seen)


def best_indices(scores_NE: F32, topk: int) -> I64:
    """Indices of the topk highest scores in any order; the lowest index wins ties."""
    # Adding 0 turns -0 into 0. Flipping the lower bits of negative floats makes the integer order
    # equal to the float order. The low word is the inverted index: the lowest index wins ties.
    np.add(scores_NE, cpu_math.constant(0.0), scores_NE)
    bits = scores_NE.view(np.int32).astype(np.int64)
    np.bitwise_xor(bits, 0x7FFFFFFF, out=bits, where=bits < 0)
    np.left_shift(bits, 32, bits)
    np.bitwise_or(bits, _LOW_BITS - np.arange(bits.shape[1]), bits)
    first = bits.shape[1] - topk
    if first:
        bits.partition(first - 1, axis=1)
    return _LOW_BITS - (bits[:, first:] & _LOW_BITS)
