"""Executes pickled step plans and notes what came of them: in a test, and in another process."""

import hashlib
import pickle
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finwhale import LLM
from finwhale.bench.engine import draft_on_device
from finwhale.engine.plan.step_plan import StepPlan
from finwhale.engine.ranks.local_executor import LocalExecutor

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "activations": "exact",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 100,
    "max_model_len": 500,
}


def open_llm(path: str | Path, draft_tokens: int, on_device: bool) -> LLM:
    """One thread, as everywhere in the tests: sums are taken in one order."""
    torch.set_num_threads(1)
    llm = LLM(path, **OPTIONS, draft_tokens=draft_tokens)
    if on_device:
        assert isinstance(llm._engine.executor, LocalExecutor)
        draft_on_device(llm._engine.executor, llm._engine.config)
    return llm


class Noting:
    """An executor that notes plans, as they would be sent, and the bits of what they gave."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor
        self.plans: list[bytes] = []
        self.bits: list[Any] = []
        runner: Any = executor.runner
        logits, forward_with_logits = runner.logits, runner.forward_with_logits
        runner.logits = lambda plan: self._note(logits(plan))

        def noting(plan: StepPlan) -> Any:
            forward = forward_with_logits(plan)
            self._note(forward.logits)
            return forward

        runner.forward_with_logits = noting
        if runner.verification_steps is not None:
            verify = runner.verification_steps.verify
            runner.verification_steps.verify = lambda *args: self._note(verify(*args))

    def _note(self, logits: Tensor) -> Tensor:
        self.bits.append(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
        return logits

    @property
    def description(self) -> Any:
        return self.executor.description

    def execute(self, plan: StepPlan) -> Any:
        return self._run(self.executor.execute, plan)

    def sample(self, plan: Any) -> Any:
        return self._run(self.executor.sample, plan)

    def rank_states(self) -> Any:
        return self.executor.rank_states()

    def _run(self, run: Any, plan: Any) -> Any:
        self.plans.append(pickle.dumps(plan))
        pending = run(plan)
        if pending is not None:
            found = pending.wait()
            self.bits.append((found.token_ids, found.valid, repr(found.logprobs), found.drafts))
        return pending


def execute(executor: LocalExecutor, plans: Iterable[bytes]) -> list[Any]:
    """What the plans give here."""
    noting = Noting(executor)
    for pickled in plans:
        plan = pickle.loads(pickled)
        noting.execute(plan) if isinstance(plan, StepPlan) else noting.sample(plan)
    return noting.bits


if __name__ == "__main__":
    path, found, answer = sys.argv[1:]
    bits = []
    for kind, plans in pickle.loads(Path(found).read_bytes()):
        llm = open_llm(path, *kind)
        assert isinstance(llm._engine.executor, LocalExecutor)
        bits.append(execute(llm._engine.executor, plans))
    Path(answer).write_bytes(pickle.dumps(bits))
