"""Measures the memory that the largest steps need, before the cache is sized.

The largest steps are a decode with as many sequences as a step may have, and a prefill with as many
tokens, unless graphs run all of them. They run at the end of the longest context, with logits and
every kind of sampling, and write their state to one page.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import torch
from torch import Tensor

from finwhale.engine.start.kv_cache import CachePlan, allocate_cache
from finwhale.engine.steps.inputs import PAGE, aligned, synthetic_inputs
from finwhale.engine.steps.step_limits import StepLimits
from finwhale.models.cache import CacheGroup, PagedCache
from finwhale.models.protocol import Model
from finwhale.models.step_inputs import DraftStart, Inline, StepInputs
from finwhale.ops import Ops
from finwhale.ops.sampling import (
    AllowedTokens,
    Bias,
    Filters,
    LogprobRows,
    Penalties,
    SamplingBatch,
)
from finwhale.request import MAX_LOGPROBS

P = ParamSpec("P")
# The driver's memory for one captured graph of some thousand kernels, without its tensors.
GRAPH_BYTES = 16 * 2**20


class BetweenGraphs(Inline):
    """Segments that measure what functions between captured graphs allocate for themselves.

    Args:
        max_len, most: bounds of the sequences' and of the prompts' lengths.

    Attributes:
        most_bytes: of the function that allocates most.
    """

    def __init__(self, device: torch.device, max_len: int, most: int) -> None:
        self.device, self.max_len, self.most, self.most_bytes = device, max_len, most, 0

    def eager(self, fn: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run `fn` as between the graphs of a prompt, and of a step whose tokens are decodes."""
        for max_query in (1, self.most):
            bounded: Any = [
                arg.bounded(self.max_len, max_query) if isinstance(arg, StepInputs) else arg
                for arg in args
            ]
            before = torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            fn(*bounded, **kwargs)
            used = torch.cuda.max_memory_allocated(self.device) - before
            self.most_bytes = max(self.most_bytes, used)


class LargestSteps:
    """Runs the largest steps on a model, and measures their memory.

    Args:
        cache: a cache with at least two pages of each group; the second page is overwritten.
    """

    def __init__(self, model: Model, groups: Sequence[CacheGroup], cache: PagedCache) -> None:
        self.model, self.groups, self.cache = model, tuple(groups), cache
        self.device = model.device
        for pages in cache.pages.values():
            # Tokens of these steps read rows that were never written, so those must be finite.
            pages[PAGE].zero_()

    @classmethod
    def alone(cls, model: Model, groups: Sequence[CacheGroup], ops: Ops) -> "LargestSteps":
        """Make the steps with their own cache of a few pages."""
        pages = CachePlan({g.name: PAGE + 1 for g in groups}, 0, 0, 0)
        packed = ops.capabilities.packed_cache
        cache = allocate_cache(groups, pages, model.dtype, model.device, packed)
        return cls(model, groups, cache)

    def workspace_bytes(self, largest: StepLimits) -> int:
        """GPU memory that the steps need besides weights and cache, captured graphs included.

        Raises:
            torch.OutOfMemoryError: the GPU does not have enough memory.
        """
        workspace = self._peak(lambda: self.run(largest))
        if largest.captures_all_prefills:
            # Not needed at the same time: the sum leaves room for gaps in torch's memory.
            workspace += self._between_graphs(largest)
        if largest.graphs:
            # Graphs have their own pool: the memory of the largest graph, and what each one keeps.
            workspace += max(
                self._peak(lambda: self.decode(largest)),
                self._peak(lambda: self.prefill(max(largest.graphs), largest)),
            )
            if largest.draft_tokens:
                # Each graph that verifies holds its logits and residual streams.
                rows = sum(largest.decode_graphs)
                rows += sum(largest.verify_graphs) * sum(1 + n for n in largest.drafts if n)
                streams = math.prod(self.model.residual_shape) * self.model.dtype.itemsize
                workspace += rows * (len(self.model.vocab_part) * 4 + streams)
            workspace += largest.num_graphs * GRAPH_BYTES
        return workspace

    def _peak(self, run: Callable[[], None]) -> int:
        """Bytes that torch's allocator needs for `run`, fragmentation included.

        The allocator keeps gaps between the weights: several hundred MB that temporaries of loading
        left. `run` may use them, but captured graphs have a pool of their own, and the cache may
        take the gaps first. So this returns the larger of two peaks: what `run` allocates, and what
        the allocator takes from the driver.
        """
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return max(
            torch.cuda.max_memory_reserved(self.device) - reserved,
            torch.cuda.max_memory_allocated(self.device) - allocated,
        )

    @torch.inference_mode()
    def run(self, largest: StepLimits) -> None:
        """Run the largest steps, one after the other, but no prefill if graphs run all of them."""
        if not largest.captures_all_prefills:
            self.prefill(largest.num_tokens, largest)
        self.decode(largest)

    @torch.inference_mode()
    def prefill(self, num_tokens: int, largest: StepLimits) -> None:
        """Run the last num_tokens tokens of one sequence, or of as many sequences as needed."""
        self._run(_lengths(num_tokens, largest.max_len), largest)

    @torch.inference_mode()
    def _between_graphs(self, largest: StepLimits) -> int:
        """Bytes that functions between the graphs of the largest prefill allocate at most.

        They depend on a step's bounds. All tokens of a data-parallel rank may be decodes, beside a
        prompt of another rank. Padding fits all bounds.
        """
        lengths = _lengths(largest.num_tokens, largest.max_len)
        inputs = self._inputs(lengths, largest.max_len)
        inputs.tokens.positions.fill_(-1)
        held = BetweenGraphs(self.device, largest.max_len, max(lengths))
        self.model(inputs, self.cache, held)
        return held.most_bytes

    @torch.inference_mode()
    def decode(self, largest: StepLimits) -> None:
        self._run([1] * largest.num_seqs, largest)
        if largest.draft_tokens:
            # A context shorter than 1 + K tokens limits the number of drafts.
            verified = min(1 + largest.draft_tokens, largest.max_len)
            count = min(largest.num_seqs, max(1, largest.num_tokens // verified))
            # A captured step has all its tokens, even if no step may have so many.
            count = max(count, *largest.verify_graphs, 1)
            self._run([verified] * count, largest)

    def _run(self, lengths: Sequence[int], largest: StepLimits) -> None:
        inputs = self._inputs(lengths, largest.max_len)
        streams = self.model(inputs, self.cache, Inline())
        rows = largest.num_seqs * (1 + largest.draft_tokens)
        logits = self.model.compute_logits(streams[:rows])
        self.model.sample(
            logits, all_sampling_options(len(logits), self.model.config.vocab_size, self.device)
        )
        if largest.draft_tokens:
            assert self.model.draft_head is not None
            drafted = self.model.draft_head(inputs, streams, inputs.token_ids, self.cache, Inline())
            if not drafted.numel():
                drafted = streams  # A head that drafts in blocks computes logits of as many values.
            self.model.draft_head.compute_logits(drafted[: largest.num_seqs]).argmax(-1)
            block = self.model.config.draft_block_tokens
            if block and largest.max_len > block:
                last = self._inputs([1] * largest.num_seqs, largest.max_len - block)
                draft_after(self.model, last, self.cache)

    def _inputs(self, lengths: Sequence[int], max_len: int) -> StepInputs:
        vocab_size = self.model.config.vocab_size
        return synthetic_inputs(lengths, max_len, self.groups, self.device, vocab_size=vocab_size)


def _lengths(num_tokens: int, max_len: int) -> list[int]:
    """Lengths of as few sequences as have num_tokens."""
    full, rest = divmod(num_tokens, max_len)
    return [max_len] * full + [rest] * bool(rest)


def largest_transfer(groups: Sequence[CacheGroup], largest: StepLimits, vocab_size: int) -> int:
    """Bytes that the host sends at most at once: a step's inputs, or the tokens of its grammars."""
    pages = 0
    for group in groups:
        first = group.first_needed(max(0, largest.max_len - largest.num_tokens))
        first_page = first // group.tokens_per_page
        pages += aligned(-(-largest.max_len // group.tokens_per_page) - first_page)
    # A sequence has the numbers of its pages (int32) and a few more values; a token has four.
    # Each array is aligned.
    inputs = 4 * largest.num_seqs * (pages + 2 * len(groups) + 16) + 32 * largest.num_tokens + 1024
    masks = largest.num_seqs * (1 + largest.draft_tokens) * (vocab_size // 8 + 16)
    return max(inputs, masks)


def draft_after(model: Model, last: StepInputs, cache: PagedCache) -> None:
    """Draft as many tokens as the head can after the last tokens of sequences.

    Any token is chosen as a draft: sampling has its own steps.
    """
    assert model.draft_head is not None
    ids = last.token_ids
    shape = (len(ids), *model.residual_shape)
    start = DraftStart(
        hidden=torch.zeros(shape, dtype=model.dtype, device=model.device),
        newest_ids=ids,
        tokens=last.tokens,
        tables=last.tables,
        lane_rows=len(ids),
    )
    most = model.config.max_draft_tokens
    model.draft_head.draft(start, most, cache, Inline(), lambda logits, k: ids)


def all_sampling_options(num_rows: int, vocab_size: int, device: torch.device) -> SamplingBatch:
    """A batch with every sampling option on every row, and masks that allow every token."""
    rows = torch.arange(num_rows, device=device)

    def each(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    top_k = min(64, vocab_size)
    return SamplingBatch(
        filters=Filters(
            rows_R=rows,
            temperature_R=each(1.0, torch.float32),
            seeds_R=rows,
            indices_R=rows,
            min_p_R=each(0.01, torch.float32),
            top_k_rows_K=rows,
            top_k_K=each(top_k, torch.int64),
            max_top_k=top_k,
            top_p_rows_P=rows,
            top_p_P=each(0.9, torch.float64),
        ),
        positions_R=rows,
        penalties=Penalties(
            rows_N=rows,
            ids_N=rows % vocab_size,
            counts_N=each(1.0, torch.float32),
            repetition_N=each(1.1, torch.float32),
            frequency_N=each(0.1, torch.float32),
            presence_N=each(0.1, torch.float32),
        ),
        bias=Bias(rows_N=rows, ids_N=rows % vocab_size, values_N=each(0.5, torch.float32)),
        allowed=AllowedTokens(
            rows_G=rows,
            words_GW=torch.full(
                (num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device
            ),
        ),
        logprobs=(LogprobRows(rows_G=rows, num_top=min(MAX_LOGPROBS, vocab_size)),),
    )


def without_filters(batch: SamplingBatch) -> SamplingBatch:
    """A batch with only the random draws of another."""
    f = batch.filters
    assert f is not None
    draws = Filters(
        rows_R=f.rows_R, temperature_R=f.temperature_R, seeds_R=f.seeds_R, indices_R=f.indices_R
    )
    return SamplingBatch(filters=draws, positions_R=batch.positions_R)


def remaining_bytes(device: torch.device, utilization: float) -> int:
    """Bytes of GPU memory left, if at most the fraction `utilization` of it may be used."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free))
