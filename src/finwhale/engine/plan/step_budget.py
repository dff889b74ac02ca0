"""How many tokens of prompts a step reads beside decodes. No torch.

A step takes the time of its decodes, and a time for each token of a prompt, which grows with the
number of tokens before it. With a target interval, a step reads as many tokens as fit into the
time that its decodes leave. These times are learned from the steps that run.

Budgets are in tokens at the beginning of a prompt. A later token counts more (`growth`).
"""

from collections import deque
from collections.abc import Sequence
from heapq import nlargest
from statistics import median

from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.step_sizes import StepSizes

# A token takes twice as long with this many tokens before it. Flash, 8 layers on one H200: the
# tokens of prompts of 8,192, 131,072 and 524,288 took 10.4, 12.6 and 19.2 us.
DOUBLE_CONTEXT = 2**18
# Share of the largest step with decodes that prompts get however many sequences decode, and that a
# prompt longer than a step gets beside shorter ones. If the target leaves less time, prompts get
# LEAST_TOKENS.
LONG_SHARE = (1, 3)
LEAST_TOKENS = 32
# Before any time is known, a step with a target reads this share of what it may without one.
FIRST_SHARE = (1, 8)
# A time is the median of its last TIMES measurements.
TIMES = 9
# Of the last EXPECTED steps, all but SLOWER took no longer, relative to the time that was expected,
# than the target allows. A step aims at no less than 1/MOST_SLOWER of the target.
EXPECTED, SLOWER, MOST_SLOWER = 64, 2, 1.5


class StepBudget:
    """The budget of prompts in steps with decodes.

    Args:
        target_seconds: the longest time of a step with decodes; None: the largest step.

    Attributes:
        long_tokens: LONG_SHARE in tokens.
    """

    def __init__(self, sizes: StepSizes, target_seconds: float | None = None) -> None:
        self._most, self._target = sizes.mixed_tokens, target_seconds
        self.long_tokens = max(1, sizes.mixed_tokens * LONG_SHARE[0] // LONG_SHARE[1])
        # Times of steps without prompts, by the number of bits of their number of sequences.
        self._decodes: dict[int, deque[float]] = {}
        self._token_seconds: deque[float] = deque(maxlen=TIMES)
        # Times of steps as multiples of the expected ones.
        self._ratios: deque[float] = deque(maxlen=EXPECTED)

    def beside(self, num_decodes: int, num_tokens: int) -> int:
        """The budget for prompts beside decodes that have `num_tokens` tokens, drafts included."""
        most = max(self._most - num_tokens, self.long_tokens)
        if self._target is None:
            return most
        if not self._token_seconds:
            return max(1, most * FIRST_SHARE[0] // FIRST_SHARE[1])
        slowest = nlargest(SLOWER + 1, self._ratios) or [1.0]
        aim = self._target / min(max(1.0, slowest[-1]), MOST_SLOWER)
        left = aim - self._decode_seconds(num_decodes)
        return min(most, max(LEAST_TOKENS, int(left / median(self._token_seconds))))

    def of_long_prompt(self, budget: int) -> int:
        """What a prompt longer than a step takes of a budget that nothing else needs."""
        return budget // 2 if self._target is None else budget

    def record(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Record how long a step took."""
        if self._target is None:
            return
        prompts = [chunk for chunk in chunks if chunk.num_known > 1]
        num_decodes = len(chunks) - len(prompts)
        if not prompts:
            times = self._decodes.setdefault(num_decodes.bit_length(), deque(maxlen=TIMES))
            times.append(seconds)
            return
        if not num_decodes and self._token_seconds:
            return  # Tokens of larger steps are cheaper.
        tokens = sum((c.end - c.start) * growth((c.start + c.end) // 2) for c in prompts)
        decodes = self._decode_seconds(num_decodes) if num_decodes else 0.0
        if len(self._token_seconds) == TIMES:
            expected = decodes + tokens * median(self._token_seconds)
            self._ratios.append(seconds / expected)
        # Above 0 even if the step took no longer than one without prompts.
        rest = max(seconds - decodes, 0.1 * seconds)
        self._token_seconds.append(rest / tokens)

    def _decode_seconds(self, num_decodes: int) -> float:
        size = num_decodes.bit_length()
        nearest = min(self._decodes, key=lambda other: abs(other - size), default=None)
        return 0.0 if nearest is None else median(self._decodes[nearest])


def growth(context: int) -> float:
    """How many times as long a token takes after `context` tokens as at the beginning."""
    return 1 + context / DOUBLE_CONTEXT
