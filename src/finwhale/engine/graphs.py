"""Captured execution: decodes as whole CUDA graphs, small prefills as segments around attention.

One graph a size of a ladder, all in one memory pool. A graph reads its inputs from fixed buffers,
filled by one transfer from pinned memory before each replay, and a second one where pages changed.
Tokens past the batch are padding: position -1.

Both kinds are one mechanism: the model is run once while its kernels are recorded, and where it
says `segments.eager` a decode goes on recording (the host has nothing to decide there), a prefill
closes the graph, notes the call and opens the next graph.
"""

import bisect
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.engine.scheduler import Chunk
from finwhale.models.deepseek_v4.cache_spec import CacheGroup
from finwhale.models.deepseek_v4.step import Inline, Segments, StepInputs
from finwhale.ops.paging import PageTable, Tokens

P = ParamSpec("P")
Forward = Callable[[StepInputs, Segments], Tensor]

WARM_UP_STEPS = 2
# Tokens of a step with prefill: beyond, the kernels take longer than launching them.
PREFILL_SIZES = (16, 32, 64, 96, 128, 192, 256, 384, 512)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class StaticInputs:
    """The inputs of a step at fixed addresses, and their twin in pinned memory.

    Args:
        num_tokens: tokens of the step, padding included.
        num_seqs: sequences at most; None: a decode, a sequence a token.
        max_len: no sequence is longer.
    """

    def __init__(
        self,
        num_tokens: int,
        num_seqs: int | None,
        groups: Items[CacheGroup],
        max_len: int,
        device: torch.device,
    ) -> None:
        self.is_decode = num_seqs is None
        num_seqs = num_tokens if num_seqs is None else num_seqs
        self.groups = tuple(groups)
        # Ids and positions change in every step, pages seldom: two blocks, two transfers.
        self._step_device, self._step_host = _twins(5 * num_tokens + num_seqs + 1, device)
        ids, positions, sequence, query_start = _cut_step(self._step_device, num_tokens)
        self.ids, self.positions, self.sequence, self.query_start = (
            part.numpy() for part in _cut_step(self._step_host, num_tokens)
        )
        widths = [_pages_a_sequence(group, max_len, num_tokens) for group in groups]
        self._page_device, self._page_host = _twins(num_seqs * (sum(widths) + len(widths)), device)
        self.pages: list[NDArray[np.int32]] = []
        self.first: list[NDArray[np.int32]] = []
        tables: dict[Any, PageTable] = {}
        at = 0
        for group, width in zip(groups, widths, strict=True):
            pages, first = (slice(at, at + num_seqs * width), slice(at + num_seqs * width, None))
            at += num_seqs * (width + 1)
            self.pages.append(self._page_host[pages].view(num_seqs, width).numpy())
            self.first.append(self._page_host[first][:num_seqs].numpy())
            tables[group.name] = PageTable(
                self._page_device[pages].view(num_seqs, width),
                self._page_device[first][:num_seqs],
                group.rows_per_page,
            )
        self._held: list[list[Any]] = [[None] * num_seqs for _ in groups]
        self.inputs = StepInputs(
            token_ids=ids,
            tokens=Tokens(
                positions=positions,
                sequence=sequence,
                query_start=query_start,
                max_len=max_len,
                max_query=1 if self.is_decode else num_tokens,
            ),
            tables=tables,
        )
        self.fill([])

    def fill(self, chunks: Items[Chunk]) -> StepInputs:
        """Write the chunks and send them on their way; returns the inputs with their bounds."""
        at = 0
        for row, chunk in enumerate(chunks):
            end = at + chunk.end - chunk.start
            self.ids[at:end] = chunk.sequence.token_ids[chunk.start : chunk.end]
            self.positions[at:end] = range(chunk.start, chunk.end)
            self.sequence[at:end] = row
            self.query_start[row] = at
            at = end
        self.ids[at:] = 0
        self.positions[at:] = -1
        self.sequence[at:] = 0
        self.query_start[len(chunks) :] = at
        self._step_device.copy_(self._step_host, non_blocking=True)
        if self._fill_pages(chunks) or not chunks:
            self._page_device.copy_(self._page_host, non_blocking=True)
        if self.is_decode or not chunks:
            return self.inputs
        tokens = replace(
            self.inputs.tokens,
            max_len=max(c.end for c in chunks),
            max_query=max(c.end - c.start for c in chunks),
            memo={},
        )
        return replace(self.inputs, tokens=tokens)

    def _fill_pages(self, chunks: Items[Chunk]) -> bool:
        """Write the page tables that are not there yet; whether there was any."""
        changed = False
        for held, pages, first, group in zip(
            self._held, self.pages, self.first, self.groups, strict=True
        ):
            for row, chunk in enumerate(chunks):
                table = chunk.sequence.tables[group.name]
                state = (table, table.first, len(table.pages), table.pages[-1:])
                if held[row] == state:
                    continue
                held[row] = state
                first[row] = table.first
                pages[row, : len(table.pages)] = table.pages
                changed = True
        return changed


def _twins(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 [count] on the device and in pinned memory, zeros."""
    host = torch.zeros(count, dtype=torch.int32, pin_memory=device.type == "cuda")
    return torch.zeros(count, dtype=torch.int32, device=device), host


def _cut_step(block: Tensor, num_tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ids and positions [N] int64, sequence [N] and query_start [B+1] int32."""
    wide = block[: 4 * num_tokens].view(torch.int64)
    return (
        wide[:num_tokens],
        wide[num_tokens:],
        block[4 * num_tokens : 5 * num_tokens],
        block[5 * num_tokens :],
    )


def _pages_a_sequence(group: CacheGroup, max_len: int, num_tokens: int) -> int:
    """Pages that one sequence can hold at a time in steps of at most num_tokens tokens."""
    whole = -(-max_len // group.tokens_per_page)
    if group.keep is None:
        return whole
    align, before = group.keep
    return min(whole, -(-(align + before + num_tokens) // group.tokens_per_page) + 1)


class _Recorder:
    """Records what a forward launches: Segments that break (prefill) or go on (decode)."""

    def __init__(self, breaks: bool, pool: Any) -> None:
        self.parts: list[torch.cuda.CUDAGraph | tuple[Callable[..., None], Any, Any]] = []
        self._breaks = breaks
        self._pool = pool

    def record(self, forward: Forward, inputs: StepInputs) -> Tensor:
        self._open()
        try:
            return forward(inputs, self)
        finally:
            self._close()

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if not self._breaks:
            fn(*args, **kwargs)
            return
        self._close()
        self.parts.append((fn, args, kwargs))
        self._open()

    def _open(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def _close(self) -> None:
        self._graph.capture_end()
        self.parts.append(self._graph)


@dataclass(frozen=True, slots=True)
class _Captured:
    static: StaticInputs
    parts: list[Any]
    out: Tensor

    def replay(self, inputs: StepInputs) -> None:
        for part in self.parts:
            if isinstance(part, torch.cuda.CUDAGraph):
                part.replay()
            else:
                fn, args, kwargs = part
                fn(*(inputs if arg is self.static.inputs else arg for arg in args), **kwargs)


class Graphs:
    """Captured steps of one forward, for sizes of a ladder. Gives what `forward` gives.

    Args:
        forward: one tensor [tokens, ..] of a step's inputs.
        sizes: numbers of tokens to capture, ascending.
        num_seqs: sequences of a step at most; None: decodes, a sequence a token.
        max_len: no sequence is longer.
        pool: memory that all graphs share (torch.cuda.graph_pool_handle()).
    """

    def __init__(
        self,
        forward: Forward,
        groups: Items[CacheGroup],
        *,
        sizes: Items[int],
        num_seqs: int | None,
        max_len: int,
        device: torch.device,
        pool: Any,
    ) -> None:
        self.sizes = list(sizes)
        self.num_seqs = num_seqs
        self._captured: dict[int, _Captured] = {}
        stream = torch.cuda.Stream(device)
        # The largest first: the others then fit into the memory that it has left in the pool.
        for size in reversed(self.sizes):
            static = StaticInputs(size, num_seqs, groups, max_len, device)
            torch.cuda.synchronize(device)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    forward(static.inputs, Inline())
                torch.cuda.synchronize(device)
                recorder = _Recorder(num_seqs is not None, pool)
                out = recorder.record(forward, static.inputs)
            self._captured[size] = _Captured(static, recorder.parts, out)
        torch.cuda.synchronize(device)

    def fits(self, chunks: Items[Chunk]) -> bool:
        """Whether there is a graph for a step of these chunks."""
        if self.num_seqs is None:
            return len(chunks) <= self.sizes[-1] and all(
                c.end - c.start == 1 and c.completes for c in chunks
            )
        return (
            len(chunks) <= self.num_seqs and sum(c.end - c.start for c in chunks) <= self.sizes[-1]
        )

    @torch.inference_mode()
    def run(self, chunks: Items[Chunk]) -> Tensor:
        """What forward gives for the chunks' tokens; valid until the next run of any graph."""
        num_tokens = sum(c.end - c.start for c in chunks)
        captured = self._of(num_tokens)
        captured.replay(captured.static.fill(chunks))
        return captured.out[:num_tokens]

    def replay(self, num_tokens: int) -> None:
        """Run a decode's graph on the inputs that it was given last: for measurements."""
        captured = self._of(num_tokens)
        captured.replay(captured.static.inputs)

    def _of(self, num_tokens: int) -> _Captured:
        return self._captured[self.sizes[bisect.bisect_left(self.sizes, num_tokens)]]
