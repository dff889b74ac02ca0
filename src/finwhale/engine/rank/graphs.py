"""Captured execution: decodes as whole CUDA graphs, small prefills as segments around attention.

One graph a size of a ladder, all in one memory pool, where one runs at a time. A graph reads its
inputs from fixed buffers (static_inputs.py), filled by one transfer from pinned memory before each
replay, and a second one where pages changed. Tokens past the batch are padding: position -1.

Both kinds are one mechanism: the model is run once while its kernels are recorded, and where it
says `segments.eager` a decode goes on recording (the host has nothing to decide there), a prefill
closes the graph, notes the call and opens the next graph.
"""

import bisect
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.rank.static_inputs import StaticInputs, with_bounds
from finwhale.models.protocol import Inline, Segments, StepInputs

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")
Forward = Callable[[StepInputs, Segments], Tensor]

WARM_UP_STEPS = 1  # makes what outlives a step; kernels are there
# Tokens of a step with prefill: beyond, the kernels take longer than launching them, which takes a
# host about 2.5 ms a layer.
PREFILL_SIZES = (
    *(16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024),
    *(1280, 1536, 1792, 2048),
)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense where padding would cost most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def prefill_sizes(max_num_tokens: int) -> list[int]:
    """Numbers of tokens to capture for steps with prefill: the largest too, unless it is large."""
    sizes = [size for size in PREFILL_SIZES if size < max_num_tokens]
    return [*sizes, max_num_tokens] if max_num_tokens <= PREFILL_SIZES[-1] else sizes


class GraphMemory:
    """What captured graphs share: what one frees another has only on the same stream.

    Attributes:
        pool: torch's handle.
        stream: all are captured on it.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)


class Recorder:
    """Records what a forward launches: Segments that break (prefill) or go on (decode)."""

    def __init__(self, breaks: bool, pool: Any) -> None:
        self.parts: list[torch.cuda.CUDAGraph | tuple[Callable[..., None], Any, Any]] = []
        self._breaks = breaks
        self._pool = pool

    @property
    def whole(self) -> torch.cuda.CUDAGraph:
        """What was recorded where nothing breaks."""
        (graph,) = self.parts
        assert isinstance(graph, torch.cuda.CUDAGraph)
        return graph

    def record(self, forward: Callable[[A, Segments], T], inputs: A) -> T:
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
        held = (_without_holding(arg) if isinstance(arg, Tensor) else arg for arg in args)
        self.parts.append((fn, tuple(held), kwargs))
        self._open()

    def _open(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def _close(self) -> None:
        self._graph.capture_end()
        self.parts.append(self._graph)


class _Memory:
    """A tensor's memory, as whoever shares it without owning it describes it to torch."""

    def __init__(self, tensor: Tensor) -> None:
        last = sum(
            (n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        self.__cuda_array_interface__ = {
            "shape": ((last + 1) * tensor.itemsize,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _without_holding(tensor: Tensor) -> Tensor:
    """The same, but its memory is the pool's again once the forward lets it go: what a layer hands
    to attention may then lie where the next layer's does, and a graph's result where another graph
    works. Replays keep the order.
    """
    if not tensor.numel():
        return tensor
    data = torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
    return data.as_strided(tensor.shape, tensor.stride())


@dataclass(frozen=True, slots=True)
class _Captured:
    inputs: StepInputs
    parts: list[Any]
    out: Tensor

    def replay(self, inputs: StepInputs) -> None:
        for part in self.parts:
            if isinstance(part, torch.cuda.CUDAGraph):
                part.replay()
            else:
                fn, args, kwargs = part
                fn(*(inputs if arg is self.inputs else arg for arg in args), **kwargs)


class Graphs:
    """Captured steps of one forward, for sizes of a ladder. Gives what `forward` gives.

    Args:
        forward: one tensor [tokens, ..] of a step's inputs.
        static: the inputs of every graph.
        sizes: numbers of tokens to capture, ascending.
        decode: capture decodes, a sequence a token; else steps with prefills.
        memory: what all graphs share.
    """

    def __init__(
        self,
        forward: Forward,
        static: StaticInputs,
        *,
        sizes: Items[int],
        decode: bool,
        device: torch.device,
        memory: GraphMemory,
    ) -> None:
        self.sizes = list(sizes)
        self.static = static
        self.decode = decode
        self._captured: dict[int, _Captured] = {}

        def whole(inputs: StepInputs, segments: Segments) -> Tensor:
            static.gather_ids(len(inputs.token_ids))
            return forward(inputs, segments)

        # The largest first: the others then fit into the memory that it has left in the pool.
        for size in reversed(self.sizes):
            inputs = static.inputs(size, decode=decode)
            torch.cuda.synchronize(device)
            with torch.cuda.stream(memory.stream):
                for _ in range(WARM_UP_STEPS):
                    whole(inputs, Inline())
                torch.cuda.synchronize(device)
                if size == self.sizes[-1]:
                    # A capture cannot have what the warm-up left to torch.
                    torch.cuda.empty_cache()
                recorder = Recorder(not decode, memory.pool)
                out = recorder.record(whole, inputs)
            self._captured[size] = _Captured(inputs, recorder.parts, _without_holding(out))
            del out
        torch.cuda.synchronize(device)
        # Nor can anybody else have what the others' warm-ups left, on a stream of their own.
        torch.cuda.empty_cache()

    def fits(self, plan: StepPlan) -> bool:
        """Whether there is a graph for a step."""
        if self.decode:
            return plan.decodes and len(plan.slots) <= self.sizes[-1]
        return len(plan.slots) <= self.static.num_seqs and plan.num_tokens <= self.sizes[-1]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """What forward gives for the step's tokens; valid until the next run of any graph."""
        captured = self._of(plan.num_tokens)
        self.static.fill(plan, decode=self.decode)
        inputs = captured.inputs
        captured.replay(inputs if self.decode else with_bounds(inputs, plan))
        return captured.out[: plan.num_tokens]

    def replay(self, num_tokens: int) -> None:
        """Run a decode's graph on the inputs that were given last: for measurements."""
        captured = self._of(num_tokens)
        captured.replay(captured.inputs)

    def _of(self, num_tokens: int) -> _Captured:
        return self._captured[self.sizes[bisect.bisect_left(self.sizes, num_tokens)]]
