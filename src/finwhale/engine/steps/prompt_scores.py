"""Log-probabilities of prompt tokens, computed from the residual streams of a step.

Logits of a whole prompt would not fit into memory. So the rank computes them in blocks of at most
as many rows as the largest decode, for which startup has measured the memory and built the kernels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from finwhale.engine.plan.executor import PromptScores, RowLogprobs
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.steps.sampler import Sampler
from finwhale.models.protocol import Model
from finwhale.ops.sampling import SampledTokens

_TENSORS = 5  # of each chunk


@torch.inference_mode()
def score(
    plan: StepPlan, streams_NHD: Tensor, model: Model, sampler: Sampler, max_rows: int
) -> list[Tensor]:
    """Compute the scores of the plan's `scored`, in blocks of `max_rows`: five tensors for each."""
    tensors: list[Tensor] = []
    starts = plan.query_start
    for wanted in plan.scored:
        blocks: list[SampledTokens] = []
        for begin in range(0, len(wanted.token_ids), max_rows):
            ids = wanted.token_ids[begin : begin + max_rows]
            first = starts[wanted.chunk] + begin
            logits = model.compute_logits(streams_NHD[first : first + len(ids)])
            blocks.append(sampler.score(logits, ids, wanted.num_top))
        found = [block.logprobs for block in blocks if block.logprobs is not None]
        tensors += [
            torch.cat([block.valid_S for block in blocks]).all(),
            torch.cat([one.token_S for one in found]),
            torch.cat([one.rank_S for one in found]),
            torch.cat([one.top_SL for one in found]),
            torch.cat([one.top_ids_SL for one in found]),
        ]
    return tensors


def read_scores(plan: StepPlan, tensors: Sequence[Tensor]) -> tuple[PromptScores, ...]:
    """The scores of the plan's `scored`, from the tensors of `score` on the host."""
    parts = [tensor.tolist() for tensor in tensors]
    found = []
    for index, wanted in enumerate(plan.scored):
        valid, *columns = parts[_TENSORS * index :][:_TENSORS]
        found.append(PromptScores(wanted.chunk, bool(valid), RowLogprobs(*columns)))
    return tuple(found)
