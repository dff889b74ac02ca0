"""Cases of sampling: rows and batches for tests and benchmarks.

There is no tolerance. The values of tokens have the same bits everywhere. Two implementations
disagree on a token only if their exponentials differ in the last bit, which moves the boundary of a
min_p or a top_p, and the row draws the token at that boundary. No draw of these cases does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from finwhale.ops.sampling import (
    AllowedTokens,
    Bias,
    Filters,
    LogprobRows,
    Penalties,
    SamplingBatch,
)

VOCAB_SIZE = 129280


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The sampling settings of one row.

    Attributes:
        seen: token id to its count in the output (0: prompt only).
        allowed: for an array of token ids, whether each may be chosen; None: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    seen: Mapping[int, int] = field(default_factory=dict)
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Callable[[NDArray[np.int64]], NDArray[np.bool_]] | None = None
    num_top: int | None = None
    seed: int = 0
    index: int = 0
    position: int = 0


GREEDY = Row(temperature=0.0)
SEEN = {3: 2, 5: 0, 6: 1}
MIXED = (
    Row(),
    GREEDY,
    Row(temperature=0.7, top_k=20, seed=1),
    Row(top_p=0.9, num_top=5, seed=2**64 - 1, position=2**20),
    Row(temperature=1.5, min_p=0.05, seed=1, index=3),
    Row(temperature=0.6, top_k=50, top_p=0.95, min_p=0.01, num_top=0),
    Row(temperature=0.0, repetition=1.3, seen=SEEN, num_top=5),
    Row(repetition=1.1, frequency=0.5, presence=0.4, seen=SEEN, top_k=3),
    Row(temperature=100.0, top_k=1),
    Row(temperature=1e-30),
    Row(temperature=0.0, bias={2: 100.0, 4: -100.0}),
    Row(bias={1: 3.0, 6: -3.0}, repetition=1.2, seen=SEEN, num_top=2),
    Row(temperature=0.0, allowed=lambda ids: np.isin(ids, (1, 5)) | (ids % 33 == 32)),
    Row(allowed=lambda ids: ids % 3 == 1, top_k=5, top_p=0.9, seen=SEEN, presence=0.5),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of `rows` over `vocab_size` tokens, with normal logits of deviation `spread`."""

    name: str
    rows: Sequence[Row]
    vocab_size: int = VOCAB_SIZE
    spread: float = 3.0

    def logits(self, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
        """[S,V] float32, drawn on the CPU, so that every device gets the same values."""
        generator = torch.Generator().manual_seed(seed)
        shape = (len(self.rows), self.vocab_size)
        return (torch.randn(shape, generator=generator) * self.spread).to(device)


CASES = (
    Case("one greedy", (GREEDY,)),
    Case("all greedy", (GREEDY,) * 8),
    Case("one plain", (Row(),)),
    Case("mixed", MIXED),
    Case("mixed, tiny vocabulary", MIXED, vocab_size=7),
    Case("mixed, odd vocabulary", MIXED, vocab_size=1027),
    Case("flat", MIXED, spread=0.01),
    Case("peaked", MIXED, spread=40.0),
)


def batch(
    rows: Sequence[Row], vocab_size: int, device: torch.device | str = "cpu"
) -> SamplingBatch:
    """The rows as tensors."""

    def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    random = [i for i, row in enumerate(rows) if row.temperature > 0]
    asked = [rows[i] for i in random]
    top_k = [i for i, row in enumerate(asked) if 0 < row.top_k < vocab_size]
    top_p = [i for i, row in enumerate(asked) if row.top_p < 1]
    filters = Filters(
        rows_R=tensor(random, torch.int64),
        temperature_R=tensor([row.temperature for row in asked], torch.float32),
        seeds_R=tensor([row.seed - (row.seed >> 63 << 64) for row in asked], torch.int64),
        indices_R=tensor([row.index for row in asked], torch.int64),
        min_p_R=tensor([row.min_p for row in asked], torch.float32)
        if any(row.min_p for row in asked)
        else None,
        top_k_rows_K=tensor(top_k, torch.int64) if top_k else None,
        top_k_K=tensor([asked[i].top_k for i in top_k], torch.int64) if top_k else None,
        max_top_k=max((asked[i].top_k for i in top_k), default=0),
        top_p_rows_P=tensor(top_p, torch.int64) if top_p else None,
        top_p_P=tensor([asked[i].top_p for i in top_p], torch.float64) if top_p else None,
    )
    pairs = [(i, token, row) for i, row in enumerate(rows) for token in row.seen]
    penalties = Penalties(
        rows_N=tensor([i for i, _, _ in pairs], torch.int64),
        ids_N=tensor([token for _, token, _ in pairs], torch.int64),
        counts_N=tensor([row.seen[token] for _, token, row in pairs], torch.float32),
        repetition_N=tensor([row.repetition for _, _, row in pairs], torch.float32),
        frequency_N=tensor([row.frequency for _, _, row in pairs], torch.float32),
        presence_N=tensor([row.presence for _, _, row in pairs], torch.float32),
    )
    biased = [(i, token, value) for i, row in enumerate(rows) for token, value in row.bias.items()]
    bias = Bias(
        rows_N=tensor([i for i, _, _ in biased], torch.int64),
        ids_N=tensor([token for _, token, _ in biased], torch.int64),
        values_N=tensor([value for _, _, value in biased], torch.float32),
    )
    guided = [i for i, row in enumerate(rows) if row.allowed is not None]
    allowed = AllowedTokens(
        rows_G=tensor(guided, torch.int64),
        words_GW=torch.stack([_words(rows[i], vocab_size) for i in guided]).to(device)
        if guided
        else torch.empty(0, 0, dtype=torch.int32, device=device),
    )
    wanted: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.num_top is not None:
            wanted.setdefault(min(row.num_top, vocab_size), []).append(i)
    return SamplingBatch(
        filters=filters if random else None,
        positions_R=tensor([row.position for row in asked], torch.int64) if random else None,
        penalties=penalties if pairs else None,
        bias=bias if biased else None,
        allowed=allowed if guided else None,
        logprobs=tuple(
            LogprobRows(rows_G=tensor(group, torch.int64), num_top=num)
            for num, group in sorted(wanted.items())
        ),
    )


def _words(row: Row, vocab_size: int) -> Tensor:
    """[W] int32: one bit per token."""
    assert row.allowed is not None
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[:vocab_size] = row.allowed(np.arange(vocab_size))
    return torch.from_numpy(np.packbits(bits, bitorder="little").view(np.int32))
