"""What captured code may not do, checked on a CPU: read a tensor on the host, or mix devices."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from finwhale.engine.steps.draft_decode import VerificationSteps
from finwhale.ops import Ops, load_ops

# A GPU's stream must be waited for, because the host needs values or the size of the result.
WAITING = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"),
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount"),
    *("repeat_interleave", "equal", "allclose", "is_nonzero", "__contains__"),
}


class CaptureRules(TorchFunctionMode):
    """Refuses calls that a captured step may not make on a GPU.

    Attributes:
        apply: whether the rules apply at present.
        names: the functions that were called under the rules.
    """

    def __init__(self) -> None:
        super().__init__()
        self.apply = False
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self.apply:
            name = func.__name__
            self.names.add(name)
            assert name not in WAITING, f"{name} waits for the GPU"
            assert name != "where" or len(args) == 3, "where waits for the GPU"
            if name in ("__getitem__", "__setitem__"):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                masks = [i for i in index if isinstance(i, Tensor) and i.dtype == torch.bool]
                assert not masks, f"{name} with a mask waits for the GPU"
        return func(*args, **(kwargs or {}))


class Guard:
    """Applies the rules to the captured code of an engine, but not to its table's operators.

    Within the rules, a new tensor without a device is on "meta", so that its use fails.

    Attributes:
        calls: number of calls of captured code.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rules = CaptureRules()
        self.calls = 0

        def guarded(*args: Any, **named: Any) -> Ops:
            return self._without_rules(load_ops(*args, **named))

        monkeypatch.setattr("finwhale.engine.start.decisions.load_ops", guarded)

    def watch(self, steps: VerificationSteps) -> None:
        steps._verify = self._with_rules(steps._verify)  # type: ignore[method-assign]
        steps._draft = self._with_rules(steps._draft)  # type: ignore[method-assign]

    def _with_rules(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **named: Any) -> Any:
            self.calls += 1
            self.rules.apply = True
            try:
                with torch.device("meta"), self.rules:
                    return run(*args, **named)
            finally:
                self.rules.apply = False

        return guarded

    def _without_rules(self, ops: Ops) -> Ops:
        def free(run: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                applied, self.rules.apply = self.rules.apply, False
                try:
                    with torch.device("cpu"):
                        return run(*args, **named)
                finally:
                    self.rules.apply = applied

            return call

        return replace(
            ops,
            **{
                field.name: free(getattr(ops, field.name))
                for field in fields(ops)
                if field.name != "grouped_form" and callable(getattr(ops, field.name))
            },
        )
