"""Which sequences run next. Pure Python: no torch.

First come, first served: every running sequence's next token, then the prompts of those that are
still being read, then new ones, all in one budget of tokens a step. A sequence is admitted when
the pages for its whole prompt and output can be reserved, so nothing that runs ever runs out.
"""

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from finwhale.engine.pages import BlockTables, PageManager
from finwhale.request import SamplingParams

# Stands in token_ids for a token that the device is still choosing; never more than one is read.
PENDING = -1


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one prompt.

    Attributes:
        key: unique among living sequences.
        index: which of the request's n.
        token_ids: prompt, then output; PENDING where the id is not known yet.
        num_prompt: tokens of the prompt.
        num_computed: tokens whose state is in the cache.
        max_len: tokens of prompt and output at most.
        sampled_row: where its pending token stands among the ids that the device chose last.
        reserved: cache tokens set aside for it.
        tables: its pages.
    """

    key: str
    request_id: str
    index: int
    token_ids: list[int]
    num_prompt: int
    max_len: int
    params: SamplingParams
    num_computed: int = 0
    sampled_row: int = 0
    reserved: int = 0
    tables: BlockTables = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..end-1 of a sequence, to be read in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def completes(self) -> bool:
        """Whether the last known token is read, so that its logits give the next."""
        return self.end == len(self.sequence.token_ids)

    @property
    def pending(self) -> bool:
        """Whether the id of its last token is still on the device."""
        return self.sequence.token_ids[self.end - 1] == PENDING


class Scheduler:
    """Holds the waiting and the running sequences.

    Args:
        capacity_tokens: tokens that the pages of the groups which keep everything hold.
        reserve_multiple: reservations are rounded up to this many tokens (one page).
    """

    def __init__(
        self,
        pages: PageManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        capacity_tokens: int,
        reserve_multiple: int,
    ) -> None:
        self.pages = pages
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.capacity_tokens = capacity_tokens
        self.reserve_multiple = reserve_multiple
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._reserved = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        sequence.reserved = -(-sequence.max_len // self.reserve_multiple) * self.reserve_multiple
        assert sequence.reserved <= self.capacity_tokens
        self.waiting.append(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, their pages given; empty when there is no work."""
        budget = self.max_num_batched_tokens
        chunks: list[Chunk] = []
        # A sequence at its end waits for its last token to be known.
        going = [s for s in self.running if len(s.token_ids) < s.max_len]
        decoding = [s for s in going if len(s.token_ids) - s.num_computed == 1]
        reading = [s for s in going if len(s.token_ids) - s.num_computed > 1]
        for sequence in decoding + reading:
            budget -= self._plan(sequence, budget, chunks)
        while self.waiting and budget and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if self._reserved + sequence.reserved > self.capacity_tokens:
                break
            self.waiting.popleft()
            self._reserved += sequence.reserved
            sequence.tables = self.pages.new_tables()
            self.running.append(sequence)
            budget -= self._plan(sequence, budget, chunks)
        return chunks

    def _plan(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        start = sequence.num_computed
        count = min(len(sequence.token_ids) - start, budget)
        if count:
            self.pages.grow(sequence.tables, start, start + count)
            chunks.append(Chunk(sequence, start, start + count))
        return count

    def computed(self, chunks: Items[Chunk]) -> None:
        """The chunks are in the cache; pages that nobody needs any more go back."""
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
            self.pages.trim(chunk.sequence.tables, chunk.end)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, waiting or running, and its pages back."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._reserved -= sequence.reserved
            self.pages.release(sequence.tables)
        else:
            self.waiting.remove(sequence)

    def check_integrity(self) -> None:
        """Assert that no page and no reservation is lost."""
        self.pages.check_integrity([s.tables for s in self.running])
        assert self._reserved == sum(s.reserved for s in self.running)
