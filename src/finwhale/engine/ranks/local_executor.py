"""The executor of one rank in the engine's own process."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from finwhale.distributed.collectives import Alone, Collectives
from finwhale.distributed.connect import disconnect
from finwhale.engine.plan.executor import (
    RankDescription,
    RankState,
    RowLogprobs,
    StepResult,
)
from finwhale.engine.plan.step_plan import SamplingPlan, StepPlan
from finwhale.engine.ranks.arena import Arena
from finwhale.engine.ranks.staged_weights import StagedWeights
from finwhale.engine.steps.drafter import Forward
from finwhale.engine.steps.host_transfer import Instant, NoReceiver, Receiver, Transfer
from finwhale.engine.steps.page_copies import Copying, PageCopies, PageCopy
from finwhale.engine.steps.prompt_scores import read_scores, score
from finwhale.engine.steps.runner import ModelRunner
from finwhale.engine.steps.sampler import Sampler
from finwhale.ops.builds import Builds
from finwhale.ops.sampling import SampledTokens
from finwhale.weights.assembler import WeightForm
from finwhale.weights.weight_group import WeightGroup

ALONE = Alone()
T = TypeVar("T")


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


class LocalExecutor:
    """Runs plans on the calling thread (plan/executor.py has the contract).

    Attributes:
        receiver: transfers results to the host.
        weight_form: how this rank holds its weights; None: they cannot be replaced.
        arenas: the memory of "weights" and "cache", if it can be freed while the engine sleeps.
        ranks_on_host: number of ranks on this host, with this rank.
        staged_weights: the new weights of an update that has begun.
        groups: the process groups over which trainers send weights, by name.
        waiting: by a group's name, what a thread waits for: the group, or tensors of its trainer.
        page_copies: copies pages for a prefix store; None: there is none.
    """

    def __init__(
        self,
        runner: ModelRunner,
        builds: Builds,
        description: RankDescription,
        collectives: Collectives = ALONE,
        weight_form: WeightForm | None = None,
        arenas: Mapping[str, Arena] | None = None,
        ranks_on_host: int = 1,
    ) -> None:
        self.ranks_on_host = ranks_on_host
        self.weight_form, self.arenas = weight_form, arenas or {}
        self.staged_weights: StagedWeights | None = None
        self.groups: dict[str, WeightGroup] = {}
        self.waiting: dict[str, Future[Any]] = {}
        self.runner, self.builds, self.description = runner, builds, description
        self.collectives = collectives
        self.sampler = Sampler(runner.model.sample, runner.model.config.vocab_size)
        self.receiver: Receiver | NoReceiver = Receiver(runner.device)
        self.page_copies: PageCopies | None = None
        self._open: _OpenStep | None = None

    def execute(self, plan: StepPlan) -> "LocalResult | None":
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

    def sample(self, plan: SamplingPlan) -> "LocalResult":
        step = self._open
        assert step is not None, "no step waits for sampling"
        logits = step.logits if plan.rows is None else self.runner.rows(step.logits, plan.rows)
        ahead, steps = None, self.runner.verification_steps
        if step.plan.draft is not None and step.plan.draft.previous_rows is not None:
            assert steps is not None
            ahead = steps.tokens_ahead
        sampled = self.sampler.sample(plan, logits, ahead) if plan.slots else None
        transfer = begin_transfer(self.receiver, sampled)
        routed = self._begin_routed_transfer(step.plan)
        scores = proposed = None
        if step.scores:
            scores = self.receiver.begin(step.scores)
        instants: tuple[Instant, ...] = ()
        if step.began is not None:
            chosen = Instant(self.runner.device)
            drafts = self._draft(step, None if sampled is None else sampled.ids_S)
            instants = step.began, chosen, Instant(self.runner.device)
            proposed = None if drafts is None else self.receiver.begin(drafts)
        elif sampled is not None:
            self.runner.feed(sampled.ids_S)
        self._open = None
        return LocalResult(step.plan, transfer, proposed, instants, scores, routed)

    def _begin_routed_transfer(self, plan: StepPlan) -> Transfer | None:
        """Begin the transfer of a step's routed experts; None: the plan does not want them."""
        routed = self.runner.routed
        if not plan.routed or routed is None:
            return None
        # The next step overwrites the tensor while the copy is on its way.
        return self.receiver.begin([routed[: plan.num_tokens].clone()])

    def _draft(self, step: _OpenStep, ids: Tensor | None) -> list[Tensor] | None:
        """The next drafts [B,K] of the chunks that get drafts, and their confidences if the head
        gives any; None: no chunk gets drafts.
        """
        assert step.plan.draft is not None
        if step.forward is None:
            steps = self.runner.verification_steps
            assert steps is not None and ids is not None
            drafts = steps.draft(ids, step.plan.draft)
            if not drafts.shape[1]:
                return None
            return [drafts, *steps.confidences]
        drafter = self.runner.drafter
        assert drafter is not None
        found = drafter.propose(step.forward, step.plan, ids, self.sampler.settings)
        if found is None:
            return None
        return [found.T, *[confidences.T for confidences in drafter.confidences]]

    def copy_pages(self, copies: Sequence[PageCopy]) -> Copying:
        assert self.page_copies is not None
        self.runner.use_device()
        return self.page_copies.begin(copies)

    def call_ranks(self, work: Callable[["LocalExecutor"], T]) -> list[T]:
        self.runner.use_device()
        return [work(self)]

    def check(self) -> None:
        self.collectives.check()

    def close(self) -> None:
        """Free the captured steps, then the connections to other ranks. No call may follow."""
        self._open = None
        for group in self.groups.values():
            group.close()
        runner = self.runner
        runner.graphs = runner.prefill_graphs = runner.verification_steps = None
        disconnect(self.collectives)

    def release(self) -> None:
        """Drop all references to the model, the cache and the sampler."""
        description = self.description
        vars(self.runner).clear()
        vars(self).clear()
        self.description = description

    def mark_ready(self) -> None:
        self.builds.mark_ready()
        self.runner.times.reset()

    def late_compilations(self) -> Mapping[str, int]:
        return self.builds.late()

    def rank_states(self) -> tuple[RankState, ...]:
        about, late = self.description, dict(self.late_compilations())
        return (RankState(about.device, about.memory, late, times=self.runner.times.read()),)


def attach_staging(executor: LocalExecutor, file: str) -> None:
    """Let a rank copy pages to and from a staging buffer (steps/page_copies.py)."""
    rank, runner = executor.collectives.rank, executor.runner
    executor.page_copies = PageCopies(
        file, runner.cache.pages, runner.device, (rank.index, rank.size)
    )


class LocalResult:
    """A step's results while they are transferred to the host.

    Args:
        tokens: ids, validity and log-probabilities.
        proposed: drafts [B,K], and their confidences if the head gives any.
        instants: the instants before the forward, after sampling and after drafting.
        scores: log-probabilities of prompt tokens.
        routed: the routed experts of the step's tokens.
    """

    def __init__(
        self,
        plan: StepPlan,
        tokens: Transfer,
        proposed: Transfer | None = None,
        instants: Sequence[Instant] = (),
        scores: Transfer | None = None,
        routed: Transfer | None = None,
    ) -> None:
        self._plan, self._tokens = plan, tokens
        self._proposed, self._instants = proposed, instants
        self._scores, self._routed = scores, routed

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        transfers = (
            *(self._tokens, self._proposed, self._scores, self._routed),
            *self._instants[-1:],
        )
        return all(transfer is None or transfer.done() for transfer in transfers)

    def wait(self) -> StepResult:
        parts = self._tokens.wait()
        drafts = verify_seconds = draft_seconds = confidences = None
        if self._proposed is not None:
            drafts, *given = [part.tolist() for part in self._proposed.wait()]
            confidences = given[0] if given else None
        if self._instants:
            begin, chosen, drafted = self._instants
            verify_seconds = begin.seconds_to(chosen)
            if drafts is not None:
                draft_seconds = chosen.seconds_to(drafted)
        ids, valid, *found = [part.tolist() for part in parts] if parts else ([], [])
        logprobs = None
        if found:
            token, rank, top, top_ids = found
            logprobs = RowLogprobs(token=token, rank=rank, top=top, top_ids=top_ids)
        return StepResult(
            token_ids=ids,
            valid=valid,
            logprobs=logprobs,
            drafts=drafts,
            verify_seconds=verify_seconds,
            draft_seconds=draft_seconds,
            scored=() if self._scores is None else read_scores(self._plan, self._scores.wait()),
            confidences=confidences,
            routed=None if self._routed is None else self._routed.wait()[0].numpy(),
        )


def begin_transfer(receiver: Receiver | NoReceiver, sampled: SampledTokens | None) -> Transfer:
    """Begin the transfer of a step's sampled tokens; None: the step sampled none."""
    if sampled is None:
        return receiver.begin(())
    parts = [sampled.ids_S, sampled.valid_S]
    if sampled.logprobs is not None:
        found = sampled.logprobs
        parts += [found.token_S, found.rank_S, found.top_SL, found.top_ids_SL]
    return receiver.begin(parts)
