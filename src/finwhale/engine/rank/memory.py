"""One budget of a GPU's memory: what the largest steps take is measured before the cache is sized.

The largest steps: as many tokens as a step may have, and as many decodes, at the end of the longest
context, with logits and every kind of sampling. Their state goes to one page.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from finwhale.engine.rank.kv_cache import CachePlan, allocate_cache
from finwhale.engine.rank.static_inputs import aligned
from finwhale.models.protocol import CacheGroup, Inline, Model, PagedCache, StepInputs
from finwhale.ops import Ops
from finwhale.ops.paging import PageTable, Tokens
from finwhale.ops.sampling import (
    AllowedTokens,
    Bias,
    Filters,
    LogprobRows,
    Penalties,
    SamplingBatch,
)
from finwhale.request import MAX_LOGPROBS

PAGE = 1  # what all tokens of these steps read and write; page 0 is nobody's
# What the driver keeps for one captured graph beside its tensors: some thousand kernels.
GRAPH_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """How large steps may be.

    Attributes:
        num_tokens: of a step with prompts.
        num_seqs: of a decode.
        max_len: tokens of the longest sequence.
        decode_graphs, prefill_graphs: sizes in tokens that are captured.
        drafts: that decodes may verify beside their own token; where it is none alone, the MTP
            layer never runs.
    """

    num_tokens: int
    num_seqs: int
    max_len: int
    decode_graphs: tuple[int, ...] = ()
    prefill_graphs: tuple[int, ...] = ()
    drafts: tuple[int, ...] = (0,)

    @property
    def draft_tokens(self) -> int:
        return max(self.drafts)


class LargestSteps:
    """Runs them on a model, and says what they take.

    Args:
        cache: with two pages of each group at least; the second is overwritten.
    """

    def __init__(
        self,
        model: Model,
        groups: Sequence[CacheGroup],
        ops: Ops,
        cache: PagedCache,
    ) -> None:
        self.model, self.groups, self.ops, self.cache = model, tuple(groups), ops, cache
        self.device = model.device
        for pages in cache.pages.values():
            # Tokens of these steps read rows that nobody wrote: they must be numbers.
            pages[PAGE].zero_()

    @classmethod
    def alone(cls, model: Model, groups: Sequence[CacheGroup], ops: Ops) -> "LargestSteps":
        """With a cache of their own, of a few pages."""
        pages = CachePlan({g.name: PAGE + 1 for g in groups}, 0, 0, 0)
        packed = ops.capabilities.packed_cache
        cache = allocate_cache(groups, pages, model.dtype, model.device, packed)
        return cls(model, groups, ops, cache)

    def workspace_bytes(self, largest: Largest) -> int:
        """What they take of a GPU beside weights and cache, captured graphs included.

        Raises:
            torch.OutOfMemoryError: more than there is.
        """
        workspace = self._peak(lambda: self.run(largest))
        graphs = largest.decode_graphs + largest.prefill_graphs
        if graphs:
            # Graphs have memory of their own: that of the largest, and what each one keeps.
            workspace += max(
                self._peak(lambda: self.decode(largest)),
                self._peak(lambda: self.prefill(max(graphs), largest)),
            )
            num_graphs = len(graphs)
            if largest.draft_tokens:
                # Each pair has a verify graph and a draft graph; the draft graph reads the residual
                # streams.
                rows = sum(largest.decode_graphs) * sum(1 + count for count in largest.drafts)
                streams = math.prod(self.model.residual_shape) * self.model.dtype.itemsize
                workspace += rows * (self.model.config.vocab_size * 4 + streams)
                num_graphs += (2 * len(largest.drafts) - 1) * len(largest.decode_graphs)
            workspace += num_graphs * GRAPH_BYTES
        return workspace

    def _peak(self, run: Callable[[], None]) -> int:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    @torch.inference_mode()
    def run(self, largest: Largest) -> None:
        """All of them, one after the other."""
        self.prefill(largest.num_tokens, largest)
        self.decode(largest)

    @torch.inference_mode()
    def prefill(self, num_tokens: int, largest: Largest) -> None:
        """One sequence's last num_tokens tokens, or as many whole sequences as it takes."""
        full, rest = divmod(num_tokens, largest.max_len)
        self._run([largest.max_len] * full + [rest] * bool(rest), largest)

    @torch.inference_mode()
    def decode(self, largest: Largest) -> None:
        self._run([1] * largest.num_seqs, largest)
        if largest.draft_tokens:
            # Short contexts have room for their drafts alone; a step for all tokens of a batch.
            verified = min(1 + largest.draft_tokens, largest.max_len)
            count = min(largest.num_seqs, max(1, largest.num_tokens // verified))
            self._run([verified] * count, largest)

    def _run(self, lengths: Sequence[int], largest: Largest) -> None:
        inputs = self._inputs(lengths, largest.max_len)
        streams = self.model(inputs, self.cache, Inline())
        rows = largest.num_seqs * (1 + largest.draft_tokens)
        logits = self.model.compute_logits(streams[:rows])
        self.ops.sample(logits, every_choice(logits))
        if largest.draft_tokens:
            assert self.model.draft_head is not None
            streams = self.model.draft_head(inputs, streams, inputs.token_ids, self.cache, Inline())
            self.model.draft_head.compute_logits(streams[: largest.num_seqs], 0).argmax(-1)

    def _inputs(self, lengths: Sequence[int], max_len: int) -> StepInputs:
        """Sequences of max_len tokens, of which the last lengths[b] are read."""
        starts = [max_len - length for length in lengths]
        positions = torch.cat([torch.arange(start, max_len) for start in starts])
        sequence = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(
            torch.tensor(lengths)
        )
        query_start = torch.tensor([0, *lengths]).cumsum(0).int()
        return StepInputs(
            token_ids=(positions % self.model.config.vocab_size).to(self.device),
            tokens=Tokens(
                positions=positions.to(self.device),
                sequence=sequence.to(self.device),
                query_start=query_start.to(self.device),
                max_len=max_len,
                max_query=max(lengths),
            ),
            tables={group.name: self._table(group, starts, max_len) for group in self.groups},
        )

    def _table(self, group: CacheGroup, starts: Sequence[int], max_len: int) -> PageTable:
        first = torch.tensor([group.first_needed(s) // group.tokens_per_page for s in starts])
        width = max(1, -(-max_len // group.tokens_per_page) - int(first.min()))
        return PageTable(
            torch.full((len(starts), aligned(width)), PAGE, dtype=torch.int32, device=self.device),
            first.int().to(self.device),
            group.rows_per_page,
        )


def every_choice(logits: Tensor) -> SamplingBatch:
    """All that requests can ask for on every row of [S,V] logits, each with every token allowed."""
    num_rows, vocab_size = logits.shape
    rows = torch.arange(num_rows, device=logits.device)

    def each(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=logits.device)

    top_k = min(64, vocab_size)
    return SamplingBatch(
        filters=Filters(
            rows_R=rows,
            temperature_R=each(1.0, torch.float32),
            min_p_R=each(0.01, torch.float32),
            top_k_rows_K=rows,
            top_k_K=each(top_k, torch.int64),
            max_top_k=top_k,
            top_p_rows_P=rows,
            top_p_P=each(0.9, torch.float64),
        ),
        uniform_R=each(0.5, torch.float64),
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
                (num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=logits.device
            ),
        ),
        logprobs=(LogprobRows(rows_G=rows, num_top=min(MAX_LOGPROBS, vocab_size)),),
    )


def left_bytes(device: torch.device, utilization: float) -> int:
    """Bytes that may still be taken of a GPU of which `utilization` may be used in all."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * utilization) - (total - free))


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors and arrays in a structure of data classes, tuples, lists and dicts."""
    found: dict[int, int] = {}

    def visit(item: Any) -> None:
        if hasattr(item, "nbytes"):
            found[id(item)] = int(item.nbytes)
        elif is_dataclass(item):
            for field in fields(item):
                visit(getattr(item, field.name))
        elif isinstance(item, dict):
            visit(list(item.values()))
        elif isinstance(item, list | tuple):
            for part in item:
                visit(part)

    visit(value)
    return sum(found.values())
