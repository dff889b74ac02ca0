"""Runs chosen chunks of sequences through the model, and returns every token's residual streams."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.plan.step_planner import StepPlanner
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.models.step_inputs import StepInputs
from finwhale.request import SamplingParams


def new_sequence(name: str, token_ids: Sequence[int], max_len: int) -> SequenceState:
    """A sequence without computed tokens and without pages."""
    return SequenceState(
        key=name,
        request_id=name,
        index=0,
        token_ids=list(token_ids),
        num_prompt=len(token_ids),
        max_len=max_len,
        params=SamplingParams(),
    )


class Stepper:
    """Replaces an idle engine's scheduler: the caller chooses the chunks of each forward.

    Args:
        rank: one rank of an engine without cached prefixes. Every rank makes a stepper, and all run
            the same chunks (bench/engine.py: call_ranks_collectively).
    """

    def __init__(self, rank: LocalExecutor) -> None:
        self.runner, self._collectives = rank.runner, rank.collectives
        self.pages = PageManager(self.runner.groups, rank.description.num_pages)
        self.planner = StepPlanner(self.runner.model.config.vocab_size)
        self.inputs: StepInputs | None = None
        self._count = 0

    def sequence(self, token_ids: Sequence[int]) -> SequenceState:
        """Make a sequence without computed tokens."""
        self._count += 1
        made = new_sequence(f"stepper-{self._count}", token_ids, self.runner.max_model_len)
        made.slot, made.tables = self._count, self.pages.new_tables()
        return made

    def step(self, parts: Sequence[tuple[SequenceState, int]]) -> list[Tensor]:
        """Compute the next `count` tokens of each sequence in one forward, and store its `inputs`.
        Returns a tensor for each sequence: the residual streams [count, H, D] of its tokens.
        """
        chunks = []
        for sequence, count in parts:
            start = sequence.num_computed
            assert start + count <= len(sequence.token_ids)
            self.pages.grow(sequence.tables, start, start + count)
            chunks.append(Chunk(sequence, start, start + count))
        batch, streams = self.runner.forward(self.plan(chunks))
        self.inputs = batch.inputs
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
            self.pages.trim(chunk.sequence.tables, chunk.end)
        return list(torch.split(streams, [count for _, count in parts]))

    def plan(self, chunks: Sequence[Chunk]) -> StepPlan:
        """Make the plan of a step, and apply its page updates to the runner."""
        plan = self.planner.plan(chunks)
        self.runner.tables.apply(plan)
        return plan

    def release(self, sequence: SequenceState) -> None:
        """Free the sequence's pages."""
        self.pages.release(sequence.tables)

    @torch.inference_mode()
    def logits(self, streams: Tensor) -> Tensor:
        """Logits [count, V] float32, computed one row at a time, as in a decode."""
        rows = [self.runner.model.compute_logits(row) for row in torch.split(streams, 1)]
        return self._collectives.all_gather(torch.cat(rows), 1)

    def read(self, token_ids: Sequence[int], cuts: Sequence[int] = ()) -> Tensor:
        """The residual streams [T,H,D] of a whole text, computed in chunks that end at `cuts`."""
        sequence = self.sequence(token_ids)
        ends = sorted({0, *cuts, len(token_ids)})
        read = [self.step([(sequence, b - a)])[0] for a, b in pairwise(ends)]
        self.release(sequence)
        return torch.cat(read)
