"""Chooses drafts with the random noise that the model's draws at the same positions will use.

A request that is not greedy draws the token with the largest logit + temperature * noise, and the
noise is a function of its seed, its continuation, the position and the token (ops/sampling). The
draft head chooses its drafts in the same way from its own logits, with the same noise. Two
distributions with total variation distance TV then choose the same token with probability at least
(1 - TV) / (1 + TV). If the head chose its most likely token instead, the model would accept it only
with the probability that the model gives it. Output tokens depend only on the model's draws.

Drafts ignore top_k and the limits of probability, which would need more kernels for each draft and,
with several ranks, all logits. They also ignore penalties, biases and grammars.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from finwhale.engine.plan.step_plan import SamplingSettings
from finwhale.engine.steps.host_transfer import send
from finwhale.engine.steps.sampler import draw_arrays
from finwhale.models.step_inputs import ChooseDraft
from finwhale.ops.sampling import Filters, Sample, SamplingBatch

# The position of a draw is the number of output tokens before it. After the last verified token, at
# position p of the text, come the newest token and then draft 0, at p + 2.
FIRST_DRAFT = 2


def choose_drafts(
    sample: Sample, settings: Sequence[SamplingSettings], last_B: Tensor
) -> ChooseDraft:
    """Choose drafts in steps that the host plans.

    Args:
        sample: samples from the model's logits (Model.sample).
        settings: the settings of each of the B sequences.
        last_B: [B] int64: positions of the last verified tokens.
    """
    random_rows = [row for row, one in enumerate(settings) if not one.greedy]
    if not random_rows:
        return lambda logits, k: sample(logits, SamplingBatch()).ids_S
    rows = [settings[row] for row in random_rows]
    first_R, rows_R, temperature_R, seeds_R, indices_R = send(
        last_B.device,
        np.array([FIRST_DRAFT - one.num_prompt for one in rows], np.int64),
        np.array(random_rows, np.int64),
        *draw_arrays(rows),
    )
    filters = Filters(
        rows_R=rows_R if len(rows) < len(settings) else None,
        temperature_R=temperature_R,
        seeds_R=seeds_R,
        indices_R=indices_R,
    )
    first_R = first_R + last_B.index_select(0, rows_R)

    def choose(logits_BX: Tensor, k: int) -> Tensor:
        return sample(logits_BX, SamplingBatch(filters=filters, positions_R=first_R + k)).ids_S

    return choose


class StaticDraftNoise:
    """The settings of the rows of captured steps, at fixed addresses.

    One graph serves any mixture of greedy rows and rows that draw: a greedy row has temperature 0,
    for which the kernel computes no noise. So a draft takes as many launches as if all rows were
    greedy, and the positions of all drafts take one more.
    """

    def __init__(self, num_rows: int, num_drafts: int, device: torch.device) -> None:
        self._held: list[SamplingSettings] | None = None
        self._device = device
        self._block = torch.zeros(3 + num_drafts, num_rows, dtype=torch.int64, device=device)
        self._seeds, self._indices = self._block[:2]
        self._temperatures = self._block[2].view(torch.float32)[:num_rows]
        self._first = self._block[3:]
        self.fill((), {})

    def fill(self, slots: Sequence[int], settings: Mapping[int, SamplingSettings]) -> None:
        """Send the settings of a step's rows if they differ from the last step's."""
        rows = [settings[slot] for slot in slots]
        if rows == self._held:
            return
        # Padding is greedy. Its position is -1, and the positions of its drafts are not negative.
        words = np.zeros(self._block.shape, np.int64)
        words[3:] = np.arange(1, 1 + len(self._first))[:, None]
        count = len(rows)
        words[2].view(np.float32)[:count], words[0, :count], words[1, :count] = draw_arrays(rows)
        further = [FIRST_DRAFT - 1 - one.num_prompt for one in rows]
        words[3:, :count] += np.array(further, np.int64)
        self._block.copy_(send(self._device, words)[0])
        self._held = rows

    def choose_drafts(self, sample: Sample, last_B: Tensor) -> ChooseDraft:
        """See `choose_drafts`. The rows are the first B rows of `fill`."""
        size = len(last_B)
        filters = Filters(
            rows_R=None,
            temperature_R=self._temperatures[:size],
            seeds_R=self._seeds[:size],
            indices_R=self._indices[:size],
        )
        positions_KB = last_B + self._first[:, :size]

        def choose(logits_BX: Tensor, k: int) -> Tensor:
            batch = SamplingBatch(filters=filters, positions_R=positions_KB[k])
            return sample(logits_BX, batch).ids_S

        return choose
