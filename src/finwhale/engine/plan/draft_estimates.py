"""Estimates how many drafts of a sequence the model will accept. Pure Python.

A draft's survival is the probability that the model accepts this draft and all drafts before it:
the product of their conditional acceptance probabilities. A draft head may estimate these
probabilities itself (confidences). Otherwise they come from counts of accepted drafts.
"""

from math import exp, log
from weakref import WeakKeyDictionary

from finwhale.engine.plan.sequences import Chunk, SequenceState

# Each position begins with this many verified drafts at this acceptance rate. The rate is high, so
# that a few rejected drafts do not end drafting.
INITIAL_DRAFTS, INITIAL_ACCEPTANCE = 16, 0.7
# The mean over all sequences covers about the last MEAN_DRAFTS drafts, and that of one sequence
# about its last SEQUENCE_DRAFTS drafts.
MEAN_DRAFTS, SEQUENCE_DRAFTS = 256, 64
# Weight of the mean over all sequences in the estimate for one sequence, in drafts.
MEAN_WEIGHT = 8.0
# Calibration covers about this many of a position's last drafts.
CALIBRATION_DRAFTS = 2048
# Weight, in drafts, of the prior that confidences need no correction.
CALIBRATION_PRIOR = 16.0
LARGEST_LOGIT = 8.0


class Calibration:
    """Corrects the confidences of one position: sigmoid(scale * logit(confidence) + shift).

    The scale is the inverse of a temperature. The shift matters for confidences of earlier drafts,
    which say little about the next ones: a small scale alone would make all of them 1/2. Both are
    fitted by Newton steps on the log loss of each draft (logistic regression, one sample at a
    time).
    """

    def __init__(self) -> None:
        self.scale, self.shift = 1.0, 0.0
        self._hessian = (CALIBRATION_PRIOR, 0.0, CALIBRATION_PRIOR)

    def __call__(self, confidence: float) -> float:
        return _sigmoid(self.scale * _logit(confidence) + self.shift)

    def add(self, confidence: float, accepted: bool) -> None:
        x = _logit(confidence)
        p = _sigmoid(self.scale * x + self.shift)
        weight, keep = p * (1 - p), 1 - 1 / CALIBRATION_DRAFTS
        a, b, d = self._hessian
        a, b, d = keep * a + weight * x * x, keep * b + weight * x, keep * d + weight
        # These minima keep the matrix invertible.
        a, d = max(a, 1.0), max(d, 1.0)
        self._hessian = (a, b, d)
        error = p - accepted
        determinant = max(a * d - b * b, 1e-3 * a * d)
        self.scale -= error * (d * x - b) / determinant
        self.shift -= error * (a - b * x) / determinant


class SequenceAcceptance:
    """Accepted and verified drafts of one sequence, by position; old ones count less."""

    __slots__ = ("accepted", "verified")

    def __init__(self, max_drafts: int) -> None:
        self.accepted, self.verified = [0.0] * max_drafts, [0.0] * max_drafts

    def add(self, position: int, accepted: bool) -> None:
        keep = 1 - 1 / SEQUENCE_DRAFTS
        self.accepted[position] = keep * self.accepted[position] + accepted
        self.verified[position] = keep * self.verified[position] + 1


class DraftEstimates:
    """Estimates the survival of every sequence's next drafts."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self._means, self._counts = [INITIAL_ACCEPTANCE] * max_drafts, [INITIAL_DRAFTS] * max_drafts
        # Calibrations of drafts' own confidences, and of the confidences of the drafts before.
        self._calibrations = [[Calibration() for _ in range(max_drafts)] for _ in range(2)]
        self._acceptances = WeakKeyDictionary[SequenceState, SequenceAcceptance]()

    def survivals(self, sequence: SequenceState, *, unresolved: bool) -> list[float]:
        """The survival of each of a sequence's next drafts.

        If they are `unresolved` (Chunk), the sequence's confidences belong to the previous ones.
        """
        found, survival = [], 1.0
        if sequence.confidences:
            pairs = zip(self._calibrations[unresolved], sequence.confidences, strict=False)
            chances = [calibration(confidence) for calibration, confidence in pairs]
            # The head may have made fewer drafts than the maximum.
            chances += self._means[len(chances) :]
        else:
            chances = self._conditional(self._acceptances.get(sequence))
        for chance in chances:
            survival *= chance
            found.append(survival)
        return found

    def _conditional(self, own: SequenceAcceptance | None) -> list[float]:
        if own is None:
            return self._means
        return [
            (MEAN_WEIGHT * mean + accepted) / (MEAN_WEIGHT + verified)
            for mean, accepted, verified in zip(
                self._means, own.accepted, own.verified, strict=True
            )
        ]

    def record_verified(self, chunk: Chunk, num_accepted: int) -> None:
        """Record how many of a chunk's drafts were accepted."""
        num_drafts = len(chunk.drafts)
        if not num_drafts:
            return
        own = self._acceptances.get(chunk.sequence)
        if own is None:
            own = self._acceptances[chunk.sequence] = SequenceAcceptance(self.max_drafts)
        for position in range(min(num_drafts, num_accepted + 1)):
            accepted = position < num_accepted
            own.add(position, accepted)
            self._counts[position] += 1
            mean = self._means[position]
            self._means[position] += (accepted - mean) / min(self._counts[position], MEAN_DRAFTS)
            if position < len(chunk.confidences):
                calibration = self._calibrations[chunk.stale_confidences][position]
                calibration.add(chunk.confidences[position], accepted)


def _logit(p: float) -> float:
    edge = 1 / (1 + exp(LARGEST_LOGIT))
    p = min(max(edge, p), 1 - edge)  # a NaN counts as the smallest
    return log(p / (1 - p))


def _sigmoid(x: float) -> float:
    return 1 / (1 + exp(-min(max(x, -30.0), 30.0)))
