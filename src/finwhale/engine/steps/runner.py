"""One rank's model, cache and captured steps, and the forward of one step plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from finwhale.engine.plan.step_plan import LargestLane, StepPlan
from finwhale.engine.steps.draft_decode import VerificationSteps
from finwhale.engine.steps.drafter import Drafter, Forward
from finwhale.engine.steps.graphs import Graphs
from finwhale.engine.steps.host_transfer import send
from finwhale.engine.steps.inputs import Batch, planned_inputs
from finwhale.engine.steps.slot_tables import SlotTables
from finwhale.engine.steps.stopwatch import StepTimes
from finwhale.models.cache import CacheGroup, PagedCache
from finwhale.models.protocol import Model
from finwhale.models.step_inputs import Inline
from finwhale.ops import Ops


@dataclass(kw_only=True, eq=False)
class ModelRunner:
    """Runs forwards on one device. startup.py creates it.

    Attributes:
        tables: the page tables of the plans' slots.
        sampled: [max_num_seqs] int64 on the device: the ids sampled in the last step, row by row
            (StepPlan.pending_rows).
        drafter: makes drafts; None: the engine does not draft.
        verification_steps: runs drafting decodes that continue on the device; None: the host plans
            every step, as on a CPU.
        graphs: captured decodes; None: nothing is captured.
        prefill_graphs: captured steps with prefill; None: nothing is captured.
        routed: the model writes each step's routed experts here; None: it does not
            (Model.record_routed_experts).
        times: measures steps, and the LM head in steps with prefill.
    """

    device: torch.device
    ops: Ops
    groups: tuple[CacheGroup, ...]
    model: Model
    cache: PagedCache
    max_model_len: int
    tables: SlotTables
    sampled: Tensor
    drafter: Drafter | None = None
    verification_steps: VerificationSteps | None = None
    graphs: Graphs | None = None
    prefill_graphs: Graphs | None = None
    routed: Tensor | None = None
    segments: Inline = field(default_factory=Inline)
    times: StepTimes = field(init=False)

    def __post_init__(self) -> None:
        self.times = StepTimes(self.device)

    def use_device(self) -> None:
        """Make the device this thread's current device, on which it launches kernels."""
        if self.device.index:
            torch.cuda.set_device(self.device)

    def batch(self, plan: StepPlan) -> Batch:
        """Make the inputs of a step that the host launches."""
        rows = plan.num_tokens if plan.largest is None else self.lane_rows(plan.largest)
        return planned_inputs(plan, self.groups, self.tables, self.device, self.sampled, rows)

    def lane_rows(self, largest: LargestLane) -> int:
        """The number of tokens that each data-parallel rank has in an exchange, with padding."""
        sizes = (each.size(largest) for each in (self.graphs, self.prefill_graphs) if each)
        return next((size for size in sizes if size is not None), largest.num_tokens)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[Batch, Tensor]:
        """Launch the step from the host; returns its batch and the residual streams [N,H,D]."""
        batch = self.batch(plan)
        return batch, self.model(batch.inputs, self.cache, self.segments)

    @torch.inference_mode()
    def serve_others(self, largest: LargestLane) -> None:
        """Take part in a step in which this data-parallel rank has no tokens. If the step is
        captured, the rank runs it with padding alone: launching its experts takes the host longer.
        """
        self.use_device()
        if largest.on_device:
            assert self.verification_steps is not None
            if self.verification_steps.run_padding(largest):
                return
        graphs = () if largest.on_device else (self.graphs, self.prefill_graphs)
        rows = largest.num_tokens if largest.on_device else self.lane_rows(largest)
        if not any(each and each.run_padding(largest) for each in graphs):
            self.model.serve_others(rows)
        if self.drafter is not None:
            self.drafter.serve_others(rows, dict(largest.drafts))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Compute this rank's part [M,X] float32 of the logits that the plan wants."""
        if self.graphs is not None and self.graphs.size(plan) is not None:
            return self.graphs.run(plan)
        return self.forward_with_logits(plan).logits

    @torch.inference_mode()
    def forward_with_logits(self, plan: StepPlan) -> Forward:
        """Compute the plan's logits, and keep the residual streams and what the drafter needs."""
        batch, prefills = None, self.prefill_graphs
        if prefills is None or prefills.size(plan) is None:
            batch, streams = self.forward(plan)
        else:
            if plan.draft is not None:
                batch = self.batch(plan)
            streams = prefills.run(plan)
        rows = self._sent(plan.logits_rows) if batch is None else batch.logits_rows
        return Forward(batch, streams, self._logits_of(streams, rows))

    def _logits_of(self, streams: Tensor, rows: Tensor) -> Tensor:
        if not len(rows):
            return streams.new_empty(0, len(self.model.vocab_part), dtype=torch.float32)
        chosen = streams.index_select(0, rows)
        self.times.head.begin()
        logits = self.model.compute_logits(chosen)
        self.times.head.end()
        return logits

    @torch.inference_mode()
    def rows(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Select rows of a step's logits."""
        return logits.index_select(0, self._sent(rows))

    def _sent(self, rows: Sequence[int]) -> Tensor:
        return send(self.device, np.array(rows, np.int64))[0]

    @torch.inference_mode()
    def feed(self, ids: Tensor) -> None:
        """Keep the ids [M] int64 sampled in a step for the next step."""
        self.sampled[: len(ids)].copy_(ids)
