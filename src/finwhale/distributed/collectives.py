"""The contract of the collectives of a model's ranks, and their implementation for a single rank.

`ref.py` defines each collective over a list of the ranks' tensors; the tests compare the
implementations with it.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from finwhale.distributed import ref
from finwhale.distributed.rank import ALONE, Rank
from finwhale.ops.ranks import Channel

# The part of the model that reads gathered rows. Each part has memory of its own for them.
Reader = Literal["experts", "compressor", "window"]


class Collectives(Protocol):
    """The operations that combine the tensors of a model's ranks.

    Every rank calls the same collectives in the same order, with tensors of one shape and dtype.
    The input does not change, except where `overwrite` permits it. Unless a method says otherwise,
    the result is a new tensor that the caller may keep; a single rank returns its input, or a view
    of it.

    On a GPU a call runs on the current CUDA stream. It can be captured in a CUDA graph; then every
    rank must replay its graph. All calls of a process use one CUDA stream at a time, because they
    share buffers.

    Attributes:
        rank: the rank that makes the calls.
        beside_bytes: from so many bytes of each rank on, `start_all_gather_rows` and
            `reduce_scatter_parts` exchange rows beside other work.
    """

    rank: Rank
    beside_bytes: int = sys.maxsize

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        """Sum the ranks' x.

        The sum is taken in float32 as a tree of pairs, ((x0 + x1) + (x2 + x3)) + ..., and rounded
        once to the dtype of x. Every rank gets the same bits, which depend neither on the shape nor
        on the other elements. `Nccl` and `Push` document for which messages they keep this order
        only if `ordered`; all ranks get the same bits even then.

        Args:
            x: contiguous, float32 or bfloat16, any shape.
            overwrite: the caller no longer needs x, whose memory may become the result.

        Returns:
            A tensor of the shape and dtype of x.
        """

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate the ranks' x along `dim`, in the order of the ranks.

        Args:
            x: contiguous, any dtype.

        Returns:
            A contiguous tensor; dimension `dim` is `rank.size` times as large as that of x.
        """

    def all_gather_each(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Gather each x along dimension 0. An implementation may send all of them at once."""
        return [self.all_gather(x, 0) for x in xs]

    def reduce_scatter_rows(self, x: Tensor) -> Tensor:
        """Sum the ranks' x, and return this rank's rows of the sum (`Rank.rows`).

        Args:
            x: [N, ...], as for `all_reduce`.

        Returns:
            [rows, ...]: if `ordered`, the same bits as these rows of `all_reduce`.
        """
        return self.all_reduce(x)[self.rank.rows(len(x))]

    def all_gather_rows(self, x: Tensor, num_rows: int) -> Tensor:
        """Concatenate the ranks' rows.

        Args:
            x: contiguous, any dtype, [rows, ...]: this rank's rows of `num_rows` (`Rank.rows`).

        Returns:
            [num_rows, ...], contiguous.
        """
        return self.all_gather(ref.padded(x, self.rank.rows_per_rank(num_rows)), 0)[:num_rows]

    def start_all_gather_rows(
        self, x: Tensor, num_rows: int, reader: Reader
    ) -> Callable[[], Tensor]:
        """Begin `all_gather_rows`. Returns a function that waits for the result.

        What is launched before that function is called may run beside the exchange. x must not
        change until then. The result may be read until the next call for the same reader. Between
        two such calls, the ranks make another exchange after their last read: no rank may begin
        the second call while another rank still reads the result of the first.
        """
        rows = self.all_gather_rows(x, num_rows)
        return lambda: rows

    def reduce_scatter_parts(
        self, part: Callable[[int, slice], Tensor], shape: tuple[int, int], dtype: torch.dtype
    ) -> Tensor:
        """`reduce_scatter_rows` of an x that is computed in parts, beside the exchange.

        Two calls need another exchange between them, as for `start_all_gather_rows`.

        Args:
            part: computes some of the rows of x that are those of a rank; the result is contiguous.
                Called once for every row, in any order.
            shape, dtype: of x.
        """
        x = torch.cat([part(index, slice(None)) for index in range(self.rank.size)])
        return self.reduce_scatter_rows(x)

    def channel(self, num_tokens: int, num_programs: int) -> Channel | None:
        """A channel for an operator that adds the ranks' x itself; None: call `all_reduce`.

        Every rank gets a channel, or none does. The operator counts as a collective: every rank
        calls it in the same order, on the stream of the collectives.

        Args:
            num_tokens: number of rows of x.
            num_programs: the most programs of the operator that exchange words.
        """
        return None

    def check(self) -> None:
        """Raise if a collective timed out waiting for a rank. Does not synchronise with the GPU.

        A collective that timed out has returned NaN or old rows. The engine calls `check` before it
        uses results.

        Raises:
            EngineDeadError: names the missing ranks.
        """
        return

    def close(self) -> None:
        """Disconnect this rank. The other ranks may be gone. No collective may be called after.

        Graphs that contain collectives must be freed first, because NCCL waits for them.
        """
        return


class Alone(Collectives):
    """The collectives of a single rank: each returns its input."""

    rank = ALONE

    def all_reduce(self, x: Tensor, *, overwrite: bool = False) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x
