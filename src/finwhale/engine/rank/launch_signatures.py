"""Every class of step that a model can meet, walked through one layer of each kind.

What a kernel's launch fixes follows from a few numbers of the step: its tokens N, whether each
sequence has one, the longest sequence, the rows whose logits are wanted. Each launch function takes
them in steps (up to 16, up to 64, powers of two, ..) and by whether they are multiples of 16, so
that numbers close enough to each other, for each remainder that matters, meet all classes. Nothing
here knows a kernel; a test walks every number and finds no class that this leaves out.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ParamSpec

import torch
from torch import Tensor

from finwhale.engine.rank.memory import PAGE, Largest, every_choice
from finwhale.engine.rank.static_inputs import aligned
from finwhale.models.protocol import CacheGroup, Model, PagedCache, StepInputs
from finwhale.ops import Ops
from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.sampling import SamplingBatch

P = ParamSpec("P")

# Numbers up to here all; beyond, each at most a tenth more than the one before.
ALL_UP_TO = 40
GROWTH = 1.1
# Remainders by 16 that launches tell apart: multiples, what pads to a multiple by 4 or 8, others.
REMAINDERS = (0, 1, 5, 13)
# Steps of up to so many tokens share a token's keys between programs, by how many keys it has.
SHARED_UP_TO = 64
# Where any number of tokens may run without a graph, those of them that meet all contexts: they
# differ in the heads of a program and in whether there are enough programs for every share.
ALL_CONTEXTS = (1, 2, 3, 4, 9, 17, 33, 65)
# The context of all larger ones but one, which has all contexts: there they change nothing else.
ORDINARY_CONTEXT = 16384
# Keys of a share: beyond so many tokens of context there are enough for the most shares.
SHARE_TOKENS, MOST_SHARED = 4096, 2**18


def numbers(first: int, last: int) -> list[int]:
    """Numbers of first..last in which every class of a step's size occurs."""
    found = set(range(first, min(last, ALL_UP_TO) + 1)) | {first, last} if first <= last else set()
    edge = float(ALL_UP_TO)
    while edge < last:
        base = int(edge) // 16 * 16
        found |= {base + r for r in REMAINDERS}
        edge = max(edge * GROWTH, edge + 16)
    power = 1
    while power <= last:
        found |= {power - 1, power, power + 1}
        power *= 2
    return sorted(n for n in found if first <= n <= last)


def contexts(longest: int, shared: bool) -> list[int]:
    """Bounds of the longest sequence in which every class of one occurs.

    shared: where steps of few tokens divide a sequence's keys by how many there are.
    """
    found = {longest, *range(1, 8)}
    edge = 8.0
    while edge < longest:
        base = -(-int(edge) // 128) * 128
        found |= {base - 1, base, base + 4}
        edge = max(edge * GROWTH, edge + 128) if edge >= 128 else edge * 2
    if shared:
        found |= set(range(SHARE_TOKENS, min(longest, MOST_SHARED), SHARE_TOKENS))
    return sorted(n for n in found if 1 <= n <= longest)


class _Bounds:
    """Segments that run what depends on the host's bounds once for each of several."""

    def __init__(self, own: StepInputs, others: Sequence[StepInputs]) -> None:
        self._own, self._others = own, others

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        for inputs in self._others:
            changed = tuple(inputs if arg is self._own else arg for arg in args)
            fn(*changed, **kwargs)  # type: ignore[arg-type]


class Walk:
    """Calls a model's operators with tensors of anything, once for each class of step.

    Args:
        cache: with two pages of each group at least.
        largest: how large steps may be, and which are captured.
        eager: whether decodes may run without a graph.
    """

    def __init__(
        self,
        model: Model,
        groups: Sequence[CacheGroup],
        ops: Ops,
        cache: PagedCache,
        largest: Largest,
        *,
        eager: bool,
    ) -> None:
        self.model, self.groups, self.ops, self.cache = model, tuple(groups), ops, cache
        self.largest, self.eager = largest, eager
        self.device = model.device
        self.drafts = largest.draft_tokens

    @torch.inference_mode()
    def __call__(self) -> None:
        for num_tokens, max_query, bounds in self.steps():
            self._step(num_tokens, max_query, bounds)
        most = self.largest.num_seqs * (1 + self.drafts)
        for rows in sorted({*numbers(1, most), *self.largest.decode_graphs}):
            self._logits(rows)
        # Every kernel of choices has one form. Log-probabilities have none, and would look up a
        # token that was not drawn.
        logits = torch.zeros((1, self.model.config.vocab_size), device=self.device)
        self.ops.sample(logits, replace(every_choice(logits), logprobs=()))

    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """(tokens, tokens of one sequence at most, bounds of those that run in it): a bound is the
        longest sequence and, again, the tokens of one at most.
        """
        largest = self.largest
        decodes, prefills = set(largest.decode_graphs), set(largest.prefill_graphs)
        captured = max(prefills, default=0)
        # The MTP layer is not captured: it runs on any number of tokens.
        free = self.eager or self.drafts > 0
        if free:
            decodes |= set(numbers(1, largest.num_seqs))
            prefills |= set(numbers(2, captured))
        prefills |= set(numbers(captured + 1, largest.num_tokens))
        # Steps of one token of each sequence that are no decodes.
        ones = {n for n in prefills if n <= largest.num_seqs}
        for n in sorted(decodes | ones):
            yield n, 1, [(length, 1) for length in self._lengths(n, n in ones or free)]
        for width in (1 + count for count in largest.drafts if count):
            # Verifications, captured or not: a few tokens of each sequence.
            for n in sorted(
                {size * width for size in decodes} | set(numbers(2, largest.num_seqs * width))
            ):
                yield n, width, [(length, width) for length in self._lengths(n, True)]
        # The smallest, and the first of those that do not share keys, captured or not.
        first = {min(prefills), *sorted(n for n in prefills if n > SHARED_UP_TO)[:1]}
        first.add(captured + 1)
        for n in sorted(prefills):
            lengths = self._lengths(n, n <= SHARED_UP_TO or n in first)
            queries = (1, n) if n in first else (n,)
            yield n, n, [(length, q) for length in lengths for q in queries]

    def _lengths(self, num_tokens: int, every: bool) -> list[int]:
        """Contexts of a step: where its kernels depend on them all, else an ordinary one."""
        longest = self.largest.max_len
        if self.eager or self.drafts:
            every &= num_tokens in ALL_CONTEXTS
        if every:
            return contexts(longest, shared=num_tokens <= SHARED_UP_TO and self.eager)
        if num_tokens <= SHARED_UP_TO:
            # A captured decode: one context, which follows from the memory that is left.
            return [longest, *(2**i for i in range(12, longest.bit_length()))]
        return [min(longest, ORDINARY_CONTEXT)]

    def _step(self, num_tokens: int, max_query: int, bounds: Sequence[tuple[int, int]]) -> None:
        inputs = self._inputs(num_tokens, self.largest.max_len, max_query)
        segments = _Bounds(inputs, [_bounded(inputs, *bound) for bound in bounds])
        streams = self.model.run_one_of_each(inputs, self.cache, segments)
        if self.drafts and self.model.draft_head is not None:
            self.model.draft_head(inputs, streams, inputs.token_ids, self.cache, segments)

    def _logits(self, rows: int) -> None:
        shape = (rows, *self.model.residual_shape)
        streams = torch.empty(shape, dtype=self.model.dtype, device=self.device)
        self.ops.sample(self.model.compute_logits(streams), SamplingBatch())
        if self.drafts and self.model.draft_head is not None:
            self.model.draft_head.compute_logits(streams, 0)

    def _inputs(self, num_tokens: int, max_len: int, max_query: int) -> StepInputs:
        """A step whose tokens lie as the engine's: positions and pages are never read."""
        num_seqs = num_tokens if max_query == 1 else 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        tables = {}
        for group in self.groups:
            pages = zeros(num_seqs, aligned(-(-max_len // group.tokens_per_page))) + PAGE
            tables[group.name] = PageTable(pages, zeros(num_seqs), group.rows_per_page)
        return StepInputs(
            token_ids=zeros(num_tokens, dtype=torch.int64),
            tokens=Tokens(
                positions=zeros(num_tokens, dtype=torch.int64),
                sequence=zeros(num_tokens),
                query_start=zeros(num_seqs + 1),
                max_len=max_len,
                max_query=max_query,
            ),
            tables=tables,
        )


def _bounded(inputs: StepInputs, max_len: int, max_query: int) -> StepInputs:
    t = inputs.tokens
    tokens = Tokens(t.positions, t.sequence, t.query_start, max_len, max_query)
    return StepInputs(token_ids=inputs.token_ids, tokens=tokens, tables=inputs.tables)
