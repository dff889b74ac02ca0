"""Partial sums of several ranks, for operators that add them up themselves.

`finwhale.distributed` creates the channels; `ranks_triton.py` describes the protocol.
"""

from dataclasses import dataclass

from torch import Tensor

from finwhale.ops.moe import UnreducedExperts

# First and last phase of an exchange that a launch runs: all, except in tests on one GPU.
Phases = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Channel:
    """Memory through which the programs of all ranks exchange words.

    Attributes:
        index, size: this rank is rank `index` of `size`.
        buffer: this rank's buffer [2, size, capacity]: int64 for words with flags, int32 without.
        flags: [programs, size] int32; None if words carry flags.
        pointers: [2, size] int64: the addresses of all ranks' buffers, and of all ranks' flags.
        epochs: [programs] int32: number of exchanges that each program has made.
        limit: [1] int32: number of polls after which a wait gives up.
        faults: address of [size] int32 that the host can read: 1 for each missing rank.
        block: number of words that a program exchanges.
        capacity: most words that a rank sends to another in one exchange, a multiple of `block`.
        warps: number of warps of a program.
    """

    index: int
    size: int
    buffer: Tensor
    flags: Tensor | None
    pointers: Tensor
    epochs: Tensor
    limit: Tensor
    faults: int
    block: int
    capacity: int
    warps: int

    def arguments(self) -> tuple[Tensor | int, ...]:
        """The channel's arguments, which every kernel takes in this order."""
        flags = () if self.flags is None else (self.flags,)
        return (self.buffer, *flags, self.pointers, self.epochs, self.limit, self.faults)


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Represents the sum of x over all ranks, rounded to the dtype of x.

    An operator that reads a PartialSum exchanges x with the other ranks, so all ranks must make the
    same calls in the same order.

    Attributes:
        x: this rank's term [N,D], float32 or bfloat16; the operator adds `UnreducedExperts` first.
        channel: the channel for the exchange.
    """

    x: Tensor | UnreducedExperts
    channel: Channel
