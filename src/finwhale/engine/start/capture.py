"""Adds drafting and captured steps to a rank's runner."""

import torch
from torch import Tensor

from finwhale.config import EngineConfig
from finwhale.engine.steps.draft_decode import VerificationSteps
from finwhale.engine.steps.drafter import Drafter
from finwhale.engine.steps.graphs import GraphMemory, Graphs
from finwhale.engine.steps.inputs import StaticInputs
from finwhale.engine.steps.runner import ModelRunner
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.step_inputs import Segments, StepInputs


@torch.inference_mode()
def add_steps(runner: ModelRunner, config: EngineConfig, largest: StepLimits) -> None:
    """Add the drafter, if the engine drafts, and capture steps of the configured sizes: whole
    decodes with logits, and steps with prefill up to the residual streams.
    """

    def streams(inputs: StepInputs, segments: Segments) -> Tensor:
        return runner.model(inputs, runner.cache, segments)

    def logits(inputs: StepInputs, segments: Segments) -> Tensor:
        return runner.model.forward_with_logits(inputs, runner.cache, segments)[0]

    head = runner.model.draft_head
    if config.draft_tokens and head is not None:
        runner.drafter = Drafter(head, runner.model.sample, runner.cache, runner.device)
        if runner.ops.capabilities.captures_steps and not largest.captures_decodes:
            runner.verification_steps = new_verification_steps(runner, largest, None)
    if not largest.graphs:
        return
    memory = GraphMemory(runner.device)
    static = StaticInputs(
        max(largest.graphs),
        largest.num_seqs,
        runner.groups,
        runner.tables,
        runner.max_model_len,
        runner.device,
    )
    if largest.prefill_graphs:
        prefills = largest.prefill_graphs
        runner.prefill_graphs = Graphs(streams, static, prefills, memory, decode=False)
    if runner.drafter is None:
        runner.sampled = static.sampled
        if largest.captures_decodes:
            runner.graphs = Graphs(logits, static, largest.decode_graphs, memory, decode=True)
    elif largest.captures_decodes:
        runner.verification_steps = new_verification_steps(runner, largest, memory)


def new_verification_steps(
    runner: ModelRunner, largest: StepLimits, memory: GraphMemory | None
) -> VerificationSteps:
    """Make the decodes of a drafting engine. Without `memory`, the host launches every kernel."""
    return VerificationSteps(
        runner.model, runner.cache, runner.groups, runner.tables, runner.ops, largest, memory
    )
