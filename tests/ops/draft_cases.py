"""Steps, blocks and weights for the tests of the operators around drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.support.op_case import Draw
from torch import Tensor

from finwhale.ops.drafts import ConfidenceWeight, PlannedTokens, VerifiedStep
from finwhale.ops.mhc import HcHeadWeight, MhcParams
from finwhale.ops.paging import PageTable, Tokens

# Lengths of the sequences, the most tokens of one of them, tokens and sequences with padding.
STEPS: tuple[tuple[tuple[int, ...], int, int, int], ...] = (
    ((1,), 2, 1, 1),
    ((1,), 1, 1, 1),
    ((4,), 4, 4, 1),
    ((3, 1, 4, 2), 4, 12, 6),
    ((8, 5, 1, 8, 2), 8, 40, 5),
    ((1, 1, 1), 8, 4, 4),
    ((5, 6, 5, 2, 3, 4, 1), 6, 48, 8),
)
# With larger values than a model's, which no tolerance hides.
PARAMS = MhcParams(num_iters=20, eps=1e-2, rms_eps=1e-1)
# Positions of the last verified tokens; -1 is padding. Around the start of the text, of the window
# and of pages.
LAST = (0, 1, 6, 63, 64, 127, 128, 129, 190, 200, 1000, -1, -1)


def continuation(num_tokens: int, rows: int, width: int, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of continue_tokens; every third token has an id from the host."""
    draw = Draw(seed)
    links = draw.integers(rows * width, num_tokens)
    links[::3] = rows * width + draw.integers(width, len(links[::3]))
    last = draw.integers(1000, 2, rows + 1, width)
    last[1, -1] = 0
    planned = PlannedTokens(
        ids_S=draw.integers(3000, 2 * num_tokens, low=2000),
        sources_N=draw.integers(max(1, 2 * num_tokens), num_tokens),
        positions_N=draw.integers(10**6, num_tokens, low=-1),
        links_N=links,
    )
    return planned, last, torch.full((num_tokens,), -7), torch.full((num_tokens,), -7)


@dataclass(frozen=True)
class Verification:
    """A step with the arguments of accept_drafts, and the numbers of drafts that it accepts."""

    step: VerifiedStep
    chosen: Tensor
    next_ids: Tensor
    advanced: Tensor
    accepted: list[int]

    def args(self) -> tuple[Tensor, VerifiedStep, Tensor, Tensor]:
        """Written tensors are new in each call."""
        return self.chosen, self.step, self.next_ids.clone(), self.advanced.clone()


def verification(
    lengths: Sequence[int], width: int, num_tokens: int, num_seqs: int, seed: int = 0
) -> Verification:
    """Each sequence accepts a random number of drafts. Those after a wrong one may be right."""
    draw = Draw(seed)
    # A kernel that compares the last token, or the memory after it, would accept a draft too many.
    memory = draw.integers(50, num_tokens + 1)
    memory[-1] = memory[-2]
    ids = memory[:-1]
    chosen = draw.integers(50, num_tokens)
    positions = torch.full((num_tokens,), -1)
    first = torch.full((num_seqs,), num_tokens - 1)
    # As the engine does for a draft that there is not, beside the least number that is allowed.
    token_indices = torch.full((num_seqs, width - 1), num_tokens + 7)
    token_indices[:, ::2] = num_tokens - 1
    accepted, start = [0] * num_seqs, 0
    for row, length in enumerate(lengths):
        at, first[row] = range(start, start + length), start
        positions[start : start + length] = 100 * row + torch.arange(length)
        token_indices[row, : length - 1] = torch.tensor(list(at)[:-1], dtype=torch.int64)
        accepted[row] = int(draw.integers(length, 1))
        for k, index in enumerate(list(at)[:-1]):
            chosen[index] = ids[index + 1] + (k == accepted[row])
        start += length
    # The token after the last one of a sequence is another sequence's, even if it is equal.
    for index in range(num_tokens - 1):
        if not (token_indices == index).any():
            chosen[index] = ids[index + 1]
    chosen[-1] = ids[-1]
    step = VerifiedStep(
        ids_N=ids, positions_N=positions, first_B=first, token_indices_BP=token_indices
    )
    old = draw.integers(50, 2, num_seqs, width)
    return Verification(step, chosen, old[0], old[1], accepted)


def one_each(positions: Sequence[int]) -> Tokens:
    count = torch.arange(len(positions) + 1, dtype=torch.int32)
    return Tokens(torch.tensor(positions, dtype=torch.int64), count[:-1], count, 1100, 1)


def window_table(
    positions: Sequence[int], rows_per_page: int, window: int, block: int
) -> PageTable:
    """Make a page table for each sequence's window and block. It is a part of a larger tensor."""
    needed = [(range(max(0, last + 1 - window), last + 1 + block),) for last in positions]
    return Draw().page_table(needed, rows_per_page)[0]


def confidence_weight(
    width: int, markov: int, vocab_size: int = 40, seed: int = 1
) -> ConfidenceWeight:
    draw = Draw(seed)
    head = HcHeadWeight(
        fn=draw.normal(4, 4 * width, scale=(4 * width) ** -0.5),
        scale=draw.normal(1).abs(),
        base=draw.normal(4),
        norm=draw.normal(width),
    )
    proj = draw.normal(1, width + markov, scale=width**-0.5)
    return ConfidenceWeight(head, proj, draw.normal(vocab_size, markov) if markov else None)
