"""Which sequences run in the next step. Pure Python: no torch.

Each step has one budget of tokens: first the next token of every running sequence, then prefill, in
order of priority and arrival. A sequence is admitted when there are pages for all its tokens so far
(admission.py). Later there may be none left for what it generates; then the last sequence in order
is preempted: it frees its pages, waits, and is prefilled again. The prefix index often still has
its blocks.
"""

import sys
from bisect import insort
from collections.abc import Sequence as Items
from dataclasses import dataclass

from finwhale.engine.plan.admission import Admission, in_order
from finwhale.engine.plan.draft_rules import DraftRules
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.prefix_index import Block, PrefixIndex
from finwhale.engine.plan.sequences import Chunk, Sequence

# Share of max_num_batched_tokens that a step may have if sequences decode in it. On one H200
# (Flash, 8 layers, 128 sequences) a decode takes 8.2 ms, and a step with three quarters of 2,048
# tokens 20.4, 2.5 times as long. A step with all 2,048 tokens and no decode takes 21.8.
MIXED_SHARE = (3, 4)
# Share of a step for a prompt that needs several steps, while any other sequence prefills or
# decodes. The share shrinks as the prompt's context grows, because a chunk at DOUBLE_COST tokens
# takes twice as long; it never falls below FEWEST_LONG tokens.
LONG_SHARE = (1, 4)
DOUBLE_COST = 65536
FEWEST_LONG = 32


@dataclass(slots=True)
class SchedulerCounts:
    """What happened since the start.

    Attributes:
        prompt_tokens, cached_tokens: of admitted prompts, and how many of them were found.
        preemptions: sequences that freed their pages, to be prefilled again.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Holds the waiting and the running sequences.

    Args:
        prefix_caching: let sequences reuse blocks that others have computed.
        prefix_salt: of the blocks' keys (PrefixIndex).
        max_model_len: no token stands further back, drafts included.

    Attributes:
        admission: the waiting sequences.
        drafting: the rules for drafts.
        running: in order of priority and arrival.
        prefix: the cached blocks; None: nothing is cached.
    """

    def __init__(
        self,
        pages: PageManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        prefix_salt: str | None = None,
        max_model_len: int = sys.maxsize,
    ) -> None:
        self.pages = pages
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.mixed_tokens = _share(max_num_batched_tokens, MIXED_SHARE)
        self.long_tokens = _share(max_num_batched_tokens, LONG_SHARE)
        self.running: list[Sequence] = []
        self.counts = SchedulerCounts()
        # A model of window layers alone has no blocks to find.
        self.prefix: PrefixIndex | None = None
        if prefix_caching and pages.keeping:
            self.prefix = PrefixIndex(pages, prefix_salt)
        self.admission = Admission(pages, self.prefix, self.running)
        self.drafting = DraftRules(pages, max_model_len)
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._freed_slots: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.num_waiting)

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting

    def add(self, sequence: Sequence) -> None:
        self.admission.add(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, with their pages; empty when there is nothing to compute."""
        chunks: list[Chunk] = []
        reading: list[Sequence] = []
        preempted = self.counts.preemptions
        budget = self.max_num_batched_tokens
        for sequence in self.running:
            start, known = sequence.num_computed, len(sequence.token_ids)
            if known >= sequence.max_len:
                continue  # Its last token is being chosen.
            if known - start > 1:
                reading.append(sequence)
            elif len(chunks) < budget:
                end = start + 1
                if end <= sequence.room or self._make_room(sequence, end, chunks):
                    chunks.append(Chunk(sequence, start, end))
        decodes = bool(chunks)
        if decodes:
            taken = len(chunks)
            if self.drafting.draft_tokens:
                self.drafting.add_to_decodes(chunks, budget - taken)
                taken = sum(chunk.end - chunk.start for chunk in chunks)
            mixed = max(self.mixed_tokens - taken, self.long_tokens)
            budget = min(budget - taken, mixed)
        reading = [s for s in reading if s.running]
        long = [s for s in reading if self._is_long(s)]
        # Never all: short prompts pass.
        share = max(1, min(self.long_tokens, budget // 2))
        kept = share if long else 0
        for sequence in reading:
            if sequence not in long:
                budget -= self._read(sequence, budget - kept, chunks)
        while budget > kept and len(self.running) < self.max_num_seqs:
            # A sequence that was just preempted must not take its pages again.
            admitted = self._admit() if self.counts.preemptions == preempted else None
            if admitted is None:
                break
            if self._is_long(admitted):
                long.append(admitted)
                kept = share
            else:
                budget -= self._read(admitted, budget - kept, chunks)
        if long:
            turn = min(long, key=in_order)
            least = min(FEWEST_LONG, kept)
            part = max(least, kept * DOUBLE_COST // (DOUBLE_COST + turn.num_computed))
            self._read(turn, min(budget, part) if decodes else budget, chunks)
        self.drafting.add_proposals(chunks)
        return chunks

    def again(self, chunks: Items[Chunk]) -> list[Chunk]:
        """The decodes' next step (DraftRules.again). Empty: something else is to be done first."""
        living = [chunk for chunk in chunks if chunk.sequence.running]
        if self.num_waiting and len(self.running) < self.max_num_seqs:
            return []
        if not living or len(living) < len(self.running):
            return []
        return self.drafting.again(living)

    def _is_long(self, sequence: Sequence) -> bool:
        return sequence.remaining > self.max_num_batched_tokens

    def _read(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Plan as much of a prompt as the budget allows; returns the tokens that it took."""
        start = sequence.num_computed
        end = start + min(sequence.remaining, budget)
        if end <= start or not sequence.running or not self._make_room(sequence, end, chunks):
            return 0
        chunks.append(Chunk(sequence, start, end))
        return end - start

    def _make_room(self, sequence: Sequence, end: int, chunks: list[Chunk]) -> bool:
        """Allocate the pages for tokens up to `end`, preempting if need be.

        Returns:
            False: the sequence itself was preempted.
        """
        if end <= sequence.room:
            return True
        start = sequence.num_computed
        if end == start + 1:
            # A decode frees pages only where it takes some: it never holds more than then.
            self.pages.trim(sequence.tables, start)
        while not self.pages.fits(sequence.tables, end):
            last = self.running[-1]
            self._preempt(last)
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not last]
            if last is sequence:
                return False
        decodes = sequence.remaining == 1
        sequence.room = self.pages.grow(sequence.tables, start, end, decodes)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.counts.preemptions += 1
        self._stop(sequence)
        self.admission.put_back(sequence)

    def _admit(self) -> Sequence | None:
        """Start the next waiting sequence; None: it must wait, or there is none."""
        admitted = self.admission.admit()
        if admitted is None:
            return None
        self._start(*admitted)
        return admitted[0]

    def _start(self, sequence: Sequence, known: list[Block], resumable: int) -> None:
        sequence.tables = self.pages.new_tables()
        sequence.slot = self._free_slots.pop()
        sequence.running = True
        sequence.room = sequence.due = 0
        sequence.newest = None
        sequence.sharing = True
        if self.prefix is not None:
            size = self.prefix.block_tokens
            sequence.parted = len(known) * size if len(known) > resumable else 0
            if resumable:
                self.prefix.adopt(known[:resumable], sequence.tables)
                sequence.chain.extend(known[:resumable])
            sequence.num_computed = resumable * size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.counts.prompt_tokens += sequence.num_prompt
            self.counts.cached_tokens += sequence.num_cached
        insort(self.running, sequence, key=in_order)

    def computed(self, chunks: Items[Chunk]) -> None:
        """The chunks are in the cache: free the pages that no later token needs."""
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.end
            sequence.num_computed = end
            if end >= sequence.due:
                known = end - chunk.pending
                if known >= sequence.due:
                    self._settle(sequence, known, decodes=chunk.decodes)

    def verified(self, chunk: Chunk, num_accepted: int) -> None:
        """The first `num_accepted` drafts of a chunk are in token_ids now; the others are undone.

        Nothing has to be cleared: rows are found by their position, and the step that computes a
        position again overwrites its rows before any token sees them. Rows of compressor state that
        a step leaves out are never needed here: a step of at most max_verify_tokens can be undone.
        """
        sequence, end = chunk.sequence, chunk.known + num_accepted
        sequence.num_computed = end
        if end >= sequence.due:
            self._settle(sequence, end, decodes=chunk.known == chunk.start + 1)

    def _settle(self, sequence: Sequence, known: int, *, decodes: bool) -> None:
        """Enter the blocks that are complete, and trim; `known` tokens are read and known."""
        sequence.due = sys.maxsize
        if sequence.sharing and self.prefix is not None:
            size = self.prefix.block_tokens
            for end in range((len(sequence.chain) + 1) * size, known + 1, size):
                self._enter(self.prefix, sequence, end)
            sequence.due = (len(sequence.chain) + 1) * size
        again = self.pages.trim(sequence.tables, known)
        if not decodes:
            sequence.due = min(sequence.due, again)

    def _enter(self, prefix: PrefixIndex, sequence: Sequence, end: int) -> None:
        """Make the block that ends at `end` known, and where it ends a place to go on from."""
        place = len(sequence.chain)
        if place == len(sequence.keys):
            prefix.extend_keys(sequence.keys, sequence.token_ids[:end])
        key = sequence.keys[place]
        block = prefix.add(sequence.chain, key, sequence.tables)
        # The same prompt again reads its last token, a longer one may begin with all of it.
        ends_prompt = end <= sequence.num_prompt < end + prefix.block_tokens or (
            end < sequence.num_prompt <= end + prefix.block_tokens
        )
        is_output = end > sequence.num_prompt
        lasting = ends_prompt or is_output or end == sequence.parted
        prefix.add_state(block, end, sequence.tables, lasting=lasting)
        if is_output:
            if sequence.newest is not None:
                prefix.fade(sequence.newest)
            sequence.newest = block
        self.admission.computed(key, sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Free the pages and the slot of a running sequence."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._freed_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.running = False
        sequence.num_computed = 0
        sequence.drafts = []
        self.pages.release(sequence.tables)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """A sequence neither uses blocks of others nor promises any."""
        if self.prefix is None:
            return
        self.admission.left(sequence)
        self.prefix.release(sequence.chain)
        sequence.newest = None

    def take_freed(self) -> list[int]:
        """Slots that became free since the last call."""
        freed, self._freed_slots = self._freed_slots, []
        return freed

    def return_freed(self, slots: list[int]) -> None:
        """Let `take_freed` name these slots again: the step that named them was not launched."""
        self._freed_slots += slots

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whether it runs or waits, and free its pages."""
        if sequence.running:
            self._stop(sequence)
        else:
            self.admission.remove(sequence)

    def reset_prefix_cache(self) -> None:
        """Forget every block. Running sequences go on, and enter none."""
        if self.prefix is None:
            return
        for sequence in self.running:
            self._leave(sequence)
            sequence.sharing = False
        self.prefix.clear()

    def check_integrity(self) -> None:
        """Assert that no page, block or sequence is lost."""
        held = None
        if self.prefix is not None:
            self.prefix.check_integrity([s.chain for s in self.running])
            held = self.prefix.held()
        self.pages.check_integrity([s.tables for s in self.running], held)
        slots = [s.slot for s in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.max_num_seqs))
        assert self.running == sorted(self.running, key=in_order)
        self.admission.check_integrity()


def _share(tokens: int, part: tuple[int, int]) -> int:
    return max(1, tokens * part[0] // part[1])
