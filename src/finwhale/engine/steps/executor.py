"""Executes step plans on one device, in one order: forward, sample, then draft or feed.

The results go to the host meanwhile. In steps with drafts, the next step's tokens are the accepted
and the new drafts; in the others, they are the sampled ids (`feed`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from finwhale.engine.plan.executor import RowLogprobs, StepResult
from finwhale.engine.plan.step_plan import SamplingPlan, StepPlan
from finwhale.engine.steps.drafter import Forward
from finwhale.engine.steps.host_transfer import Instant, Transfer
from finwhale.engine.steps.prompt_scores import read_scores, score
from finwhale.engine.steps.runner import ModelRunner
from finwhale.engine.steps.sampler import Sampler
from finwhale.ops.sampling import SampledTokens


@dataclass(slots=True)
class _OpenStep:
    """A step whose forward is launched and whose tokens are not sampled yet.

    Attributes:
        forward: the input of the drafter; None: the step needs none.
        began: instant before the forward, in an engine that drafts.
        scores: log-probabilities of prompt tokens (prompt_scores.py).
    """

    plan: StepPlan
    logits: Tensor
    forward: Forward | None = None
    began: Instant | None = None
    scores: Sequence[Tensor] = ()


class StepExecutor:
    """Executes plans on the calling thread. No call waits for the device.

    Attributes:
        transfer: begins the transfer of results to the host.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.sampler = Sampler(runner.model.sample, runner.model.config.vocab_size)
        stream = torch.cuda.Stream(runner.device) if runner.device.type == "cuda" else None
        self.transfer: Callable[[Sequence[Tensor]], Transfer] = partial(Transfer, stream=stream)
        self._open: _OpenStep | None = None

    def execute(self, plan: StepPlan) -> "StepTransfer | None":
        """Launch a step; None: its plan has no sampling, and a call of `sample` follows."""
        self._open = None  # frees the logits of a step that failed
        self.runner.use_device()
        self.runner.tables.apply(plan)
        self.sampler.admit(plan.admitted, plan.freed)
        if plan.sampling is None:
            # The sampling waits for the host, so the step's time has no meaning.
            self._open = self._launch(plan)
            return None
        watch = self.runner.times.step
        watch.begin()
        self._open = self._launch(plan)
        result = self.sample(plan.sampling)
        watch.end()
        return result

    def _launch(self, plan: StepPlan) -> _OpenStep:
        runner, steps = self.runner, self.runner.verification_steps
        if plan.draft is None and not plan.scored:
            return _OpenStep(plan, runner.logits(plan))
        began = None if plan.draft is None else Instant(runner.device)
        if plan.draft is not None and plan.draft.on_device:
            assert steps is not None
            return _OpenStep(plan, steps.verify(plan, self.sampler.settings), None, began)
        if steps is not None:
            steps.forget()
        forward, scores = runner.forward_with_logits(plan), list[Tensor]()
        if plan.scored:
            most = len(runner.sampled)
            scores = score(plan, forward.streams, runner.model, self.sampler, most)
        return _OpenStep(plan, forward.logits, forward, began, scores)

    def sample(self, plan: SamplingPlan) -> "StepTransfer":
        """Launch the rest of the step whose forward is launched."""
        step, runner, receive = self._open, self.runner, self.transfer
        assert step is not None, "no step waits for sampling"
        logits = step.logits if plan.rows is None else runner.rows(step.logits, plan.rows)
        ahead, steps = None, runner.verification_steps
        if step.plan.draft is not None and step.plan.draft.previous_rows is not None:
            assert steps is not None
            ahead = steps.tokens_ahead
        sampled = self.sampler.sample(plan, logits, ahead) if plan.slots else None
        tokens, routed, drafts = receive(token_parts(sampled)), None, None
        if step.plan.routed and runner.routed is not None:
            # The next step overwrites the tensor while the copy is on its way.
            routed = receive([runner.routed[: step.plan.num_tokens].clone()])
        scores = receive(step.scores) if step.scores else None
        instants: tuple[Instant, ...] = ()
        if step.began is not None:
            chosen = Instant(runner.device)
            made = self._draft(step, None if sampled is None else sampled.ids_S)
            instants = step.began, chosen, Instant(runner.device)
            drafts = None if made is None else receive(made)
        elif sampled is not None:
            runner.feed(sampled.ids_S)
        self._open = None
        return StepTransfer(step.plan, tokens, drafts, instants, scores, routed)

    def _draft(self, step: _OpenStep, ids: Tensor | None) -> list[Tensor] | None:
        """The next drafts [B,K] of the chunks that get drafts, and their confidences if the head
        gives any; None: no chunk gets drafts.
        """
        assert step.plan.draft is not None
        steps, drafter = self.runner.verification_steps, self.runner.drafter
        if step.forward is None:
            assert steps is not None and ids is not None
            drafts = steps.draft(ids, step.plan.draft)
            return [drafts, *steps.confidences] if drafts.shape[1] else None
        assert drafter is not None
        found = drafter.propose(step.forward, step.plan, ids, self.sampler.settings)
        return None if found is None else [found.T, *[each.T for each in drafter.confidences]]


@dataclass(slots=True)
class StepTransfer:
    """A step's results while they are transferred to the host.

    Attributes:
        tokens: the parts of `token_parts`.
        drafts: drafts [B,K], and their confidences if the head gives any.
        instants: the instants before the forward, after sampling and after drafting.
        scores: log-probabilities of prompt tokens.
        routed: the routed experts of the step's tokens.
    """

    plan: StepPlan
    tokens: Transfer
    drafts: Transfer | None = None
    instants: Sequence[Instant] = ()
    scores: Transfer | None = None
    routed: Transfer | None = None

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        parts = (self.tokens, self.drafts, self.scores, self.routed, *self.instants[-1:])
        return all(part is None or part.done() for part in parts)

    def wait(self) -> StepResult:
        parts = self.tokens.wait()
        drafts = verify_seconds = draft_seconds = confidences = None
        if self.drafts is not None:
            drafts, *given = [part.tolist() for part in self.drafts.wait()]
            confidences = given[0] if given else None
        if self.instants:
            begin, chosen, drafted = self.instants
            verify_seconds = begin.seconds_to(chosen)
            if drafts is not None:
                draft_seconds = chosen.seconds_to(drafted)
        ids, valid, *found = [part.tolist() for part in parts] if parts else ([], [])
        return StepResult(
            token_ids=ids,
            valid=valid,
            logprobs=RowLogprobs(*found) if found else None,
            drafts=drafts,
            verify_seconds=verify_seconds,
            draft_seconds=draft_seconds,
            scored=() if self.scores is None else read_scores(self.plan, self.scores.wait()),
            confidences=confidences,
            routed=None if self.routed is None else self.routed.wait()[0].numpy(),
        )


def token_parts(sampled: SampledTokens | None) -> list[Tensor]:
    """The tensors of a step's sampled tokens; empty: the step sampled none."""
    if sampled is None:
        return []
    parts = [sampled.ids_S, sampled.valid_S]
    if sampled.logprobs is not None:
        found = sampled.logprobs
        parts += [found.token_S, found.rank_S, found.top_SL, found.top_ids_SL]
    return parts
