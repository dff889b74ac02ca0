"""Calls every operator of a model once for each launch signature, so that kernels are built ahead.

A kernel is compiled once for each launch signature. The signatures of a step follow from its number
of tokens, whether each sequence has only one token, the longest sequence, and the number of rows
whose logits are wanted. The kernel files publish the sizes at which their signatures change
(LaunchSizes). This module makes a step for each class of sizes and runs it through one layer of
each kind.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ParamSpec

import torch
from torch import Tensor

from finwhale.engine.start.memory import all_sampling_options, draft_after, without_filters
from finwhale.engine.steps.inputs import synthetic_inputs
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.cache import CacheGroup, PagedCache
from finwhale.models.protocol import Model
from finwhale.models.step_inputs import StepInputs
from finwhale.ops import Ops
from finwhale.ops.builds.sizes import LaunchSizes
from finwhale.ops.drafts import PlannedTokens, VerifiedStep
from finwhale.ops.paging import MAX_DECODE_QUERY
from finwhale.ops.sampling import SamplingBatch

P = ParamSpec("P")

# Context of a step if an earlier step has covered all contexts of its signatures.
ORDINARY_CONTEXT = 16384


class _BoundVariants:
    """Segments that run the eager part of a layer once for each of several bounds.

    Args:
        bounds: (length of the longest sequence, most tokens of one sequence in the step).
    """

    breaks = False

    def __init__(self, bounds: Sequence[tuple[int, int]]) -> None:
        self._bounds = bounds

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        for bounds in self._bounds:
            changed = (arg.bounded(*bounds) if isinstance(arg, StepInputs) else arg for arg in args)
            fn(*changed, **kwargs)  # type: ignore[arg-type]


class LaunchEnumerator:
    """Calls a model's operators with arbitrary tensors, once for each launch signature.

    Args:
        cache: a cache with at least two pages of each group.
        largest: the largest steps, and the sizes of captured steps. If it captures no decodes, they
            run without a graph.
    """

    def __init__(
        self,
        model: Model,
        groups: Sequence[CacheGroup],
        ops: Ops,
        cache: PagedCache,
        largest: StepLimits,
    ) -> None:
        self.model, self.groups, self.ops, self.cache = model, tuple(groups), ops, cache
        self.largest = largest
        self.device = model.device
        self.drafts = largest.draft_tokens
        self.sizes = LaunchSizes(ops, model.launch_sizes)
        self.divided = model.divided_steps
        if self.divided is not None:
            self.own_sizes = LaunchSizes(ops, self.divided.sizes)

    @torch.inference_mode()
    def __call__(self) -> None:
        with self.model.without_collectives():
            self._call_all()

    def _call_all(self) -> None:
        for num_tokens, max_query, bounds in self.steps():
            self._launch_step(num_tokens, max_query, bounds)
        longest, block = self.largest.max_len, self.model.config.draft_block_tokens
        for num_seqs in self._draft_passes():
            last = self._inputs(num_seqs, longest - block, 1).bounded(longest, 1)
            draft_after(self.model, last, self.cache)
        if self.drafts:
            self._launch_verification()
        most = self.largest.num_seqs * (1 + self.drafts)
        for rows in sorted({*self.sizes.rows(most), *self.largest.decode_graphs}):
            self._launch_logits(rows)
        # Sampling kernels have one signature with filters and one without. Log-probabilities use
        # none of these kernels, and would look up a token that was not drawn.
        whole, part = self.model.config.vocab_size, len(self.model.vocab_part)
        every = replace(all_sampling_options(1, whole, self.device), logprobs=())
        logits = torch.zeros((1, whole), device=self.device)
        self.ops.sample(logits, every)
        self.ops.sample(logits, without_filters(every))
        if part < whole:
            logits = torch.zeros((1, part), device=self.device)
            self.model.sample(logits, without_filters(every))

    def steps(self) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """Yield (number of tokens, most tokens of one sequence, bounds of the eager part).

        A bound is (length of the longest sequence, most tokens of one sequence in the step).
        """
        largest, seen = self.largest, set[tuple[object, ...]]()
        decodes, prefills = set(largest.decode_graphs), set(largest.prefill_graphs)
        captured = largest.always_captured
        # The draft head is not captured: it runs on any number of tokens.
        free = not largest.captures_decodes or self.drafts > 0
        if free:
            decodes |= set(self.sizes.tokens(1, largest.num_seqs))
            prefills |= set(self.sizes.tokens(2, captured))
        prefills |= set(self.sizes.tokens(captured + 1, largest.num_tokens))
        # DeepGEMM's kernels are built for every number of rows up to the most of a weight.
        prefills.add(largest.num_tokens)
        if self.divided is not None:
            if free or self.divided.least > captured:
                prefills.add(min(self.divided.least - 1, largest.num_tokens))
            per_rank = self.divided.tokens_per_rank
            own = self.own_sizes.tokens(per_rank(self.divided.least), per_rank(largest.num_tokens))
            prefills |= {count * self.divided.num_ranks for count in own}
            # Some kernels run on all tokens in these steps only.
            first = max(captured + 1, self.divided.least)
            prefills |= set(self.sizes.tokens(first, largest.num_tokens))
        # Steps with one token of each sequence that are not decodes.
        ones = {n for n in prefills if n <= largest.num_seqs}
        for n in sorted(decodes | ones):
            if free or n in ones:
                yield n, 1, self._bounds(n, (1,), seen)
            else:
                yield n, 1, [(length, 1) for length in self._captured_contexts()]
        if self.drafts:
            # Steps of any width may be ragged, so they all declare the longest verification.
            longest = 1 + self.drafts
            verified = set(self.sizes.tokens(2, largest.num_seqs * longest))
            sizes = decodes.union(largest.verify_graphs)
            verified |= {size * (1 + count) for size in sizes for count in largest.drafts if count}
            for n in sorted(verified):
                yield n, longest, self._bounds(n, (longest,), seen)
        for n in sorted(prefills):
            # The eager part of a captured step may have one token of each sequence.
            yield n, n, self._bounds(n, (1, n), seen)

    def _draft_passes(self) -> list[int]:
        """Numbers of sequences whose draft passes, in blocks, cover every class of steps."""
        block = self.model.config.draft_block_tokens
        largest = self.largest
        if not self.drafts or not block or largest.max_len <= block:
            return []
        found = {size // block for size in self.sizes.tokens(1, largest.num_seqs * block)}
        return sorted({*found, *largest.verify_graphs, 1, largest.num_seqs} - {0})

    def _captured_contexts(self) -> list[int]:
        """Contexts of captured decodes: the longest one, and powers of two below it.

        A captured decode uses the longest context only. If the memory is too small for it, startup
        runs this again with a shorter context, for which most kernels are then built already.
        """
        longest = self.largest.max_len
        return [longest, *(2**i for i in range(12, longest.bit_length()))]

    def _bounds(
        self, num_tokens: int, queries: Sequence[int], seen: set[tuple[object, ...]]
    ) -> list[tuple[int, int]]:
        """Bounds of every class of contexts, unless an earlier step has covered them."""
        found = []
        for query in queries:
            lengths = self.sizes.contexts(num_tokens, self.largest.max_len)
            key: tuple[object, ...] = (
                self.sizes.context_class(num_tokens),
                query <= MAX_DECODE_QUERY,
            )
            own = 0 if self.divided is None else self.divided.tokens_per_rank(num_tokens)
            if own:
                lengths = sorted({*lengths, *self.own_sizes.contexts(own, self.largest.max_len)})
                key = *key, self.own_sizes.context_class(own)
            if key in seen:
                lengths = [min(self.largest.max_len, ORDINARY_CONTEXT)]
            seen.add(key)
            found += [(length, query) for length in lengths]
        return found

    def _launch_step(
        self, num_tokens: int, max_query: int, bounds: Sequence[tuple[int, int]]
    ) -> None:
        inputs = self._inputs(num_tokens, self.largest.max_len, max_query)
        segments = _BoundVariants(bounds)
        streams = self.model.run_one_of_each(inputs, self.cache, segments)
        if inputs.prompts is not None and max_query <= MAX_DECODE_QUERY:
            # A decode's windows begin at position 0, which is another signature.
            self.model.run_one_of_each(replace(inputs, prompts=None), self.cache, segments)
        if self.drafts and self.model.draft_head is not None:
            self.model.draft_head(inputs, streams, inputs.token_ids, self.cache, segments)

    def _launch_verification(self) -> None:
        """Launch the operators around a step that verifies drafts. Every step launches the same."""
        width = 1 + max(drafts for _, drafts in self.largest.draft_kinds)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

        step = VerifiedStep(
            ids_N=zeros(width),
            positions_N=zeros(width),
            first_B=zeros(1),
            token_indices_BP=zeros(1, width - 1),
        )
        planned = PlannedTokens(
            ids_S=zeros(width),
            sources_N=zeros(width),
            positions_N=zeros(width),
            links_N=zeros(width),
        )
        self.ops.continue_tokens(planned, zeros(2, 2, width), zeros(width), zeros(width))
        self.ops.accept_drafts(zeros(width), step, zeros(1, width), zeros(1, width))

    def _launch_logits(self, rows: int) -> None:
        shape = (rows, *self.model.residual_shape)
        streams = torch.empty(shape, dtype=self.model.dtype, device=self.device)
        logits = self.model.compute_logits(streams)
        self.model.sample(logits, SamplingBatch())
        if logits.shape[1] < self.model.config.vocab_size:
            # Steps with filters sample from the joined logits of all ranks.
            joined = torch.empty((rows, self.model.config.vocab_size), device=self.device)
            self.ops.sample(joined, SamplingBatch())
        if self.drafts and self.model.draft_head is not None:
            self.model.draft_head.compute_logits(streams)

    def _inputs(self, num_tokens: int, max_len: int, max_query: int) -> StepInputs:
        """A step with the layout of the engine's steps. Positions and pages are arbitrary. It has
        prompts (StepInputs) if it may be the prefill of one.
        """
        lengths = [1] * num_tokens if max_query == 1 else [num_tokens]
        inputs = synthetic_inputs(
            lengths,
            max_len,
            self.groups,
            self.device,
            vocab_size=self.model.config.vocab_size,
            max_query=max_query,
        )
        decode = max_query <= 1 + self.drafts and max_query < num_tokens
        return replace(inputs, prompts=None) if decode else inputs
