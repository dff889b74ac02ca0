"""Captured execution: decodes as whole CUDA graphs, small prefills as segments around attention.

There is one graph for each of a list of sizes. All graphs share one memory pool, because only one
runs at a time. A graph reads its inputs from fixed buffers (inputs.py). One transfer from
pinned memory fills them before each replay, and a second transfer sends the pages that changed.
Tokens past the batch are padding, with position -1.

Both kinds use one mechanism: the model runs once while its kernels are recorded. When it calls
`segments.eager`, a decode continues recording, because the host decides nothing there. A prefill
ends the graph, stores the call and begins the next graph.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from finwhale.engine.plan.step_plan import LargestLane, StepPlan
from finwhale.engine.steps.inputs import NO_STEP, StaticInputs, with_bounds
from finwhale.models.step_inputs import Inline, Segments, StepInputs
from finwhale.non_owning import non_owning_view

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")
Forward = Callable[[StepInputs, Segments], Tensor]


class GraphMemory:
    """The memory pool of captured graphs. A graph reuses freed memory only on the same stream.

    Attributes:
        pool: torch's handle of the pool.
        stream: the CUDA stream on which all graphs are captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.pool: Any = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, record: Callable[[], T], warm_up: Callable[[], object] | None = None) -> T:
        """Capture a step.

        Args:
            record: records the step.
            warm_up: runs the step first. The largest step of each kind has one: it loads what
                libraries load late, and allocates memory that outlives the step.
        """
        torch.cuda.synchronize(self.stream.device)
        with torch.cuda.stream(self.stream):
            if warm_up is not None:
                warm_up()
                torch.cuda.synchronize(self.stream.device)
                # A capture cannot use memory that torch cached during the warm-up.
                torch.cuda.empty_cache()
            return record()

    def record(
        self, forward: Callable[[A, Segments], T], inputs: A, *, breaks: bool = False
    ) -> "Captured[A, T]":
        """Record a forward; `breaks`: its eager calls end a graph (Recorder)."""
        recorder = Recorder(breaks, self.pool)
        out = recorder.record(forward, inputs)
        return Captured(inputs, out, recorder.parts)

    def end_captures(self) -> None:
        """Free what warm-ups cached on the capture stream: no other stream can use it."""
        torch.cuda.synchronize(self.stream.device)
        torch.cuda.empty_cache()


class Recorder:
    """Segments that record a forward. `eager` ends the graph in a prefill, and not in a decode."""

    def __init__(self, breaks: bool, pool: Any) -> None:
        self.parts: list[torch.cuda.CUDAGraph | tuple[Callable[..., None], Any, Any]] = []
        self.breaks = breaks
        self._pool = pool

    def record(self, forward: Callable[[A, Segments], T], inputs: A) -> T:
        self._open()
        try:
            return forward(inputs, self)
        finally:
            self._close()

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if not self.breaks:
            fn(*args, **kwargs)
            return
        self._close()
        # Do not hold the tensors, so that the pool can reuse their memory. This is safe, because
        # replays run in the order of the capture.
        held = (non_owning_view(arg) if isinstance(arg, Tensor) else arg for arg in args)
        self.parts.append((fn, tuple(held), kwargs))
        self._open()

    def _open(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool)

    def _close(self) -> None:
        self._graph.capture_end()
        self.parts.append(self._graph)


@dataclass(frozen=True, slots=True)
class Captured(Generic[A, T]):
    """A captured step: its inputs, its result, and the graphs and the calls between them."""

    inputs: A
    out: T
    parts: Sequence[Any] = ()

    def replay(self, change: Callable[[StepInputs], StepInputs] = lambda inputs: inputs) -> None:
        """Run the step.

        Args:
            change: gives the eager functions' inputs the step's bounds. All functions that were
                recorded with the same inputs get the same changed inputs.
        """
        changed: dict[int, StepInputs] = {}

        def of_step(arg: Any) -> Any:
            if not isinstance(arg, StepInputs):
                return arg
            if id(arg) not in changed:
                changed[id(arg)] = change(arg)
            return changed[id(arg)]

        for part in self.parts:
            if isinstance(part, torch.cuda.CUDAGraph):
                part.replay()
            else:
                fn, args, kwargs = part
                fn(*map(of_step, args), **kwargs)


class Graphs:
    """Captured steps of one forward for several sizes. Replays return the result of `forward`.

    Args:
        forward: computes one tensor [tokens, ..] from a step's inputs.
        static: the inputs of every graph.
        sizes: numbers of tokens to capture, ascending.
        memory: the memory pool of all graphs.
        decode: capture decodes, in which each token is a sequence; else steps with prefill.
    """

    def __init__(
        self,
        forward: Forward,
        static: StaticInputs,
        sizes: Sequence[int],
        memory: GraphMemory,
        *,
        decode: bool,
    ) -> None:
        self.sizes = list(sizes)
        self.static = static
        self.decode = decode
        self._captured: dict[int, Captured[StepInputs, Tensor]] = {}

        def whole(inputs: StepInputs, segments: Segments) -> Tensor:
            static.gather_ids(len(inputs.token_ids))
            return forward(inputs, segments)

        def record(inputs: StepInputs) -> Captured[StepInputs, Tensor]:
            captured = memory.record(whole, inputs, breaks=not decode)
            return replace(captured, out=non_owning_view(captured.out))

        # Capture the largest first: the smaller graphs then fit into its memory in the pool.
        for size in reversed(self.sizes):
            num_seqs, max_query = (size, 1) if decode else (static.num_seqs, size)
            inputs = static.inputs(size, num_seqs, max_query)
            warm_up = None if self._captured else partial(whole, inputs, Inline())
            self._captured[size] = memory.capture(partial(record, inputs), warm_up)
        memory.end_captures()

    def size(self, plan: StepPlan | LargestLane) -> int | None:
        """The size of the graph that runs a step; None: no graph can."""
        plan = (isinstance(plan, StepPlan) and plan.largest) or plan
        most = self.sizes[-1] if self.decode else self.static.num_seqs
        if plan.decodes < self.decode or plan.num_seqs > most or plan.num_tokens > self.sizes[-1]:
            return None
        return self._padded(plan.num_tokens)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Tensor:
        """The result of `forward` for the step's tokens, valid until any graph runs again.

        The step has a `size`.
        """
        size = self.size(plan)
        assert size is not None
        captured = self.captured(size)
        self.static.fill(plan, decode=self.decode)
        captured.replay(partial(with_bounds, plan=plan))
        return captured.out[: plan.num_tokens]

    @torch.inference_mode()
    def run_padding(self, largest: LargestLane) -> bool:
        """Run a step without tokens. If no graph has its size, run nothing and return False."""
        size = self.size(largest)
        if size is not None:
            self._replay_padding(size, 1, 1)
        return size is not None

    @torch.inference_mode()
    def hold_memory(self, max_len: int) -> None:
        """Run the largest step without tokens, to hold what functions between graphs allocate.

        Their tokens may be decodes or a prompt of at most max_len.
        """
        for max_query in (1, min(self.sizes[-1], max_len)):
            self._replay_padding(self.sizes[-1], max_len, max_query)

    def _replay_padding(self, size: int, max_len: int, max_query: int) -> None:
        self.static.fill(NO_STEP, decode=True)
        self._captured[size].replay(lambda inputs: inputs.bounded(max_len, max_query))

    def captured(self, num_tokens: int) -> Captured[StepInputs, Tensor]:
        """The step that runs so many tokens."""
        return self._captured[self._padded(num_tokens)]

    def _padded(self, num_tokens: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, num_tokens)]
