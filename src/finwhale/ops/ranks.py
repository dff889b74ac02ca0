"""Partial sums of several ranks, for operators that add them up themselves.

The operators know nothing about how ranks find each other: `finwhale.distributed` makes the
channels. `ranks_triton.py` describes the protocol.
"""

from dataclasses import dataclass

from torch import Tensor

Phases = tuple[int, int]  # the first and the last that a launch runs


@dataclass(frozen=True, slots=True)
class Channel:
    """Memory through which the programs of all ranks exchange words.

    Attributes:
        index, size: this rank is rank `index` of `size`.
        buffer: of this rank, [2, size, capacity]: int64 for words with flags, int32 without.
        flags: [programs, size] int32; None if words carry flags.
        pointers: [2, size] int64: the addresses of all ranks' buffers, and of all ranks' flags.
        epochs: [programs] int32: the number of exchanges of each program.
        limit: [1] int32: how often a wait polls before it gives up.
        faults: address of [size] int32 that the host can read: 1 for a rank that was missing.
        block: words of a program.
        capacity: words that a rank sends to another in one exchange, a multiple of `block`.
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
        """Arguments of every kernel."""
        flags = () if self.flags is None else (self.flags,)
        return (self.buffer, *flags, self.pointers, self.epochs, self.limit, self.faults)


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Stands for the sum of all ranks' x, rounded to the dtype of x.

    An operator that reads it makes an exchange, so all ranks read it equally often.

    Attributes:
        x: [N,D] of this rank, float32 or bfloat16.
        channel: through which the operator that reads this exchanges x with the other ranks.
    """

    x: Tensor
    channel: Channel
