"""Verdicts of the checks, and how a measured value becomes one."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from finwhale.errors import EngineDeadError, RequestError

CheckVerdict = Literal["ok", "unusual", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the report.

    Attributes:
        found, expected: the measured value and the expectation, as text.
        verdict: "unusual" needs a look, but does not fail the checkpoint.
        reason: why the check was skipped, or what its expectation rests on.
    """

    name: str
    found: str
    expected: str
    verdict: CheckVerdict
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The usual values of a number, the values beyond which its check fails, and `reason`: what
    these limits rest on.
    """

    low: float
    high: float
    fails_below: float
    fails_above: float
    reason: str

    @classmethod
    def measured(cls, value: float, reason: str) -> "Expectation":
        """A value that was measured: within 7% it is usual, beyond 33% the check fails."""
        return cls(0.93 * value, 1.07 * value, value / 1.33, value * 1.33, reason)

    @classmethod
    def below(cls, high: float, fails_above: float, reason: str) -> "Expectation":
        return cls(-math.inf, high, -math.inf, fails_above, reason)

    @classmethod
    def above(cls, low: float, fails_below: float, reason: str) -> "Expectation":
        return cls(low, math.inf, fails_below, math.inf, reason)

    def check(self, name: str, value: float, digits: int = 2) -> Check:
        """Compare a value with the limits. NaN fails."""
        if self.low == -math.inf:
            expected = f"below {self.high:g}"
        elif self.high == math.inf:
            expected = f"above {self.low:g}"
        else:
            expected = f"{self.low:.{digits}f} to {self.high:.{digits}f}"
        verdict: CheckVerdict = "unusual"
        if self.low <= value <= self.high:
            verdict = "ok"
        elif not self.fails_below <= value <= self.fails_above:
            verdict = "failed"
        return Check(name, f"{value:.{digits}f}", expected, verdict, self.reason)


def skipped(name: str, reason: str) -> Check:
    """A check that cannot run on this checkpoint or with these options."""
    return Check(name, "", "", "skipped", reason)


def attempt(name: str, run: Callable[[], list[Check]]) -> list[Check]:
    """Run checks. If a request fails, this is a failed check."""
    try:
        return run()
    except (RequestError, EngineDeadError) as error:
        return [Check(name, str(error), "no error", "failed")]
