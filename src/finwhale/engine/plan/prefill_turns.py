"""Lets data-parallel lanes read prompts in the same steps. No torch.

A step takes as long as that of the lane with the most tokens. If each lane reads prompts when it
has one, most steps wait for one lane. So a lane holds its prompts for some steps, until other
lanes have prompts, too (docs/notes/2026-11-29-lanes.md). While a lane decodes, no other one reads
more of its prompts than beside its own decodes.
"""

from collections.abc import Sequence
from fractions import Fraction

from finwhale.engine.plan.scheduler import Scheduler

# The share of the lanes that begin together, and the most steps for which one waits for others.
# With few requests, the next prompt is far away, so each step of waiting needs some sequences that
# run.
SHARE = Fraction(3, 4)
MOST_STEPS, SEQUENCES_PER_STEP = 16, 16


class PrefillTurns:
    """Decides before each step whether the lanes read prompts in it."""

    def __init__(self, lanes: Sequence[Scheduler]) -> None:
        self._lanes = lanes
        self._waited = 0

    def decide(self) -> None:
        lanes = self._lanes
        wanting = sum(lane.has_prompts for lane in lanes)
        running = sum(len(lane.running) for lane in lanes)
        patience = min(MOST_STEPS, running // SEQUENCES_PER_STEP)
        holds = 0 < wanting < SHARE * len(lanes) and self._waited < patience
        self._waited = self._waited + 1 if holds else 0
        decoding = [lane.has_decodes for lane in lanes]
        for lane, decodes in zip(lanes, decoding, strict=True):
            lane.holds_prompts = holds
            lane.others_decode = sum(decoding) > decodes
