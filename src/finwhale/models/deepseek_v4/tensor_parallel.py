"""How the model divides its work among ranks, and combines the results.

A rank holds some of the heads, output groups and vocabulary rows, and a part of every expert's
width. So the outputs of its blocks (after wo_b, after combine) are partial sums, and its logits are
some of the columns. All other values are bitwise equal on all ranks.

In a step of many tokens, the ranks divide the work between two blocks (mHC, norm): each rank
computes its rows, and holds only the residual streams of these rows. A reduce-scatter of a block's
outputs and an all-gather of the next block's inputs send as many bytes as the all-reduce that they
replace.

Data-parallel ranks hold everything but the experts whole, and compute tokens of their own. Only the
experts' inputs and outputs are exchanged: a part of every expert's width computes the tokens of all
ranks.

Legend: N tokens, R rows of this rank (R = N in steps of few tokens), D hidden, M rows of logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from finwhale.distributed.collectives import Collectives
from finwhale.distributed.rank import Rank
from finwhale.ops import Ops
from finwhale.ops.mhc import FusedReduceMhc
from finwhale.ops.moe import UnreducedExperts
from finwhale.ops.ranks import Channel, PartialSum
from finwhale.ops.sampling import Sample, SampledTokens, SamplingBatch

# From this number of tokens on, the ranks divide them. Each of 8 ranks then has more rows than
# mHC's kernels for few tokens take, so a row has the same bits either way.
DIVIDED_TOKENS = 1152


class TensorParallel:
    """Combines the results of the ranks. All layers of a model share one object.

    Every call runs on the current CUDA stream, never on a side stream: all ranks must make the same
    calls in the same order.

    Args:
        mhc: the mHC operators that add the terms of x themselves; None: there are none.

    Attributes:
        collectives: those of the ranks; inside `without_collectives`, others.
        divided_tokens: see DIVIDED_TOKENS.
    """

    def __init__(self, collectives: Collectives, mhc: FusedReduceMhc | None = None) -> None:
        self.rank = collectives.rank
        self.divided_tokens = DIVIDED_TOKENS
        self.collectives = collectives
        self._mhc = mhc

    def divides_tokens(self, num_tokens: int) -> bool:
        """Whether the ranks divide the tokens between blocks. All ranks decide alike."""
        divides = self.rank.size > 1 and not self.rank.data_parallel
        return divides and num_tokens >= self.divided_tokens

    def exchanges_beside(self, num_tokens: int, x: Tensor) -> bool:
        """Whether the rows of x [.., D] of a step's tokens are exchanged beside other work.

        num_tokens: of all ranks. All ranks decide alike.
        """
        num_bytes = self.rank.rows_per_rank(num_tokens) * x.shape[-1] * x.itemsize
        many = self.rank.size > 1 and num_tokens >= self.divided_tokens
        return many and num_bytes >= self.collectives.beside_bytes

    def own_rows(self, x_NX: Tensor) -> Tensor:
        """This rank's rows: [N, ...] -> [R, ...]."""
        num_tokens = len(x_NX)
        return x_NX[self.rank.rows(num_tokens)] if self.divides_tokens(num_tokens) else x_NX

    def can_fuse_reduce(self, num_tokens: int, width: int) -> bool:
        """Whether `reduce` takes terms of partial sums [N,D], because the next operator adds them.

        The choice depends only on the shape, so all ranks make the same one.
        """
        if self._mhc is None or self.rank.data_parallel:
            return False
        if not 0 < num_tokens <= self._mhc.expert_tokens:
            return False
        return self.rank.size == 1 or self._channel(num_tokens, width) is not None

    def reduce(
        self, partial_ND: Tensor | UnreducedExperts, dtype: torch.dtype
    ) -> Tensor | PartialSum | UnreducedExperts:
        """This rank's rows of the sum of the partial sums, rounded to `dtype`: [N,D] -> [R,D].

        A `PartialSum`, or on one rank `UnreducedExperts`, leaves the sum to the operators of
        `FusedReduceMhc`. The choice depends only on the shape, so all ranks make the same one. The
        call may overwrite the partial sums. Among data-parallel ranks, x is complete already.
        """
        num_tokens, width = partial_ND.shape
        if self.rank.data_parallel:
            assert isinstance(partial_ND, Tensor)
            return partial_ND.to(dtype)
        channel = None if self.divides_tokens(num_tokens) else self._channel(num_tokens, width)
        if channel is not None:
            return PartialSum(partial_ND, channel)
        if isinstance(partial_ND, UnreducedExperts):
            assert self.rank.size == 1, "only the operators of FusedReduceMhc add terms"
            return partial_ND
        if self.divides_tokens(num_tokens):
            return self.collectives.reduce_scatter_rows(partial_ND).to(dtype)
        return self.collectives.all_reduce(partial_ND, overwrite=True).to(dtype)

    def _channel(self, num_tokens: int, width: int) -> Channel | None:
        """The channel through which the next operator adds the partial sums [N,D], if it can."""
        programs = 0 if self._mhc is None else self._mhc.num_programs(num_tokens, width)
        return self.collectives.channel(num_tokens, programs) if programs else None

    def all_gather_rows(self, x_RX: Tensor, num_tokens: int) -> Tensor:
        """The rows of all ranks: [R, ...] -> [N, ...]."""
        if self.divides_tokens(num_tokens):
            return self.collectives.all_gather_rows(x_RX, num_tokens)
        return x_RX

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Skip collectives inside this context. Results do not depend on other ranks."""
        kept = self.collectives
        self.collectives = NoCollectives(self.rank, kept.beside_bytes)
        try:
            yield
        finally:
            self.collectives = kept


class SampleFromParts:
    """Samples from logits that are sharded by vocabulary (a Sample).

    Every rank gets the tokens that `ops.sample` chooses from the whole rows. If no row needs its
    whole logits, the ranks exchange only their best candidates, 8 bytes for each part of their
    vocabulary. Otherwise they gather the logits of all rows.

    Args:
        first: the token id of this rank's first column.
    """

    def __init__(self, ops: Ops, ranks: TensorParallel, first: int) -> None:
        self._ops, self._ranks, self._first = ops, ranks, first

    def __call__(self, logits_SV: Tensor, batch: SamplingBatch) -> SampledTokens:
        if batch.needs_whole_rows:
            return self._ops.sample(self._ranks.collectives.all_gather(logits_SV, 1), batch)
        candidates_SC = self._ops.best_candidates(logits_SV, batch, self._first)
        return self._ops.merge_candidates(self._ranks.collectives.all_gather(candidates_SC, 1))


def vocabulary(ops: Ops, ranks: TensorParallel, size: int) -> tuple[range, Sample]:
    """The token ids whose rows of the LM head a rank holds, and what samples from all logits."""
    rank, width = ranks.rank, size // ranks.rank.size
    if rank.size == 1 or rank.data_parallel:
        return range(size), ops.sample
    first = rank.index * width
    return range(first, first + width), SampleFromParts(ops, ranks, first)


@dataclass(frozen=True, slots=True)
class NoCollectives(Collectives):
    """Collectives without communication. They return tensors of the right shape."""

    rank: Rank
    beside_bytes: int = 0

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat([x] * self.rank.size, dim)

    def all_gather_rows(self, x: Tensor, num_rows: int) -> Tensor:
        return x.new_zeros(num_rows, *x.shape[1:])
