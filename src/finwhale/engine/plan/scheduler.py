"""Decides which sequences run in the next step. Pure Python: no torch.

Each step has one budget of tokens. It goes first to the next token of every running sequence, then
to prefill, in order of priority and arrival. Beside decodes, prompts have a budget of their own
(step_budget.py), and one that is longer than a step leaves half of it to others. A sequence is
admitted when there are pages for all its tokens so far (admission.py). If there are no pages left
for its output later, the scheduler preempts the last sequence in order. That sequence frees its
pages, waits, and is prefilled again; the prefix cache often still has its blocks.
"""

import sys
import time
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from finwhale.engine.plan.admission import Admission, in_order
from finwhale.engine.plan.draft_rules import DraftRules
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.prefix_index import Block, PrefixIndex
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.plan.step_budget import LEAST_TOKENS, StepBudget, growth
from finwhale.engine.plan.step_plan import PromptBounds
from finwhale.engine.plan.step_sizes import StepSizes


@dataclass(slots=True)
class SchedulerCounts:
    """Counters since the start. EngineMetrics (loop/metrics.py) explains them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_hits: int = 0
    preemptions: int = 0


class Scheduler:
    """Chooses the chunks of each step among the waiting and the running sequences.

    Args:
        prefix_caching: let sequences reuse blocks that others have computed.
        prefix_salt: salt of the blocks' keys (PrefixIndex).
        max_model_len: the most tokens of a sequence, drafts included.
        draft_block_tokens: ModelConfig.draft_block_tokens.
        target_seconds: of the budget.

    Attributes:
        budget: the budget of prompts beside decodes.
        admission: the waiting sequences.
        drafting: the rules for drafts.
        holds_prompts: no prompt begins or continues (prefill_turns.py).
        others_decode: another lane's sequences wait for this lane's prompts (prefill_turns.py).
        running: the running sequences, in order of priority and arrival.
        prefix: the prefix cache; None: the engine has none.
    """

    def __init__(
        self,
        pages: PageManager,
        *,
        sizes: StepSizes,
        prefix_caching: bool = True,
        prefix_salt: str | None = None,
        max_model_len: int = sys.maxsize,
        draft_block_tokens: int = 0,
        target_seconds: float | None = None,
    ) -> None:
        self.pages = pages
        self.sizes = sizes
        self.budget = StepBudget(sizes, target_seconds)
        self.running: list[SequenceState] = []
        self.holds_prompts = self.others_decode = False
        self.counts = SchedulerCounts()
        # A model with window layers only has no blocks to cache.
        self.prefix: PrefixIndex | None = None
        if prefix_caching and pages.full_groups:
            self.prefix = PrefixIndex(pages, prefix_salt)
        self.admission = Admission(pages, self.prefix, self.running)
        self.drafting = DraftRules(pages, max_model_len, draft_block_tokens)
        self._free_slots = list(reversed(range(sizes.num_seqs)))
        self._freed_slots: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.num_waiting)

    @property
    def has_prompts(self) -> bool:
        """Whether a prompt waits for its next chunk, or a sequence that might start now."""
        return self._might_admit or any(sequence.remaining > 1 for sequence in self.running)

    @property
    def _might_admit(self) -> bool:
        return len(self.running) < self.sizes.num_seqs and self.admission.might_admit

    @property
    def has_decodes(self) -> bool:
        return any(sequence.remaining == 1 for sequence in self.running)

    @property
    def num_waiting(self) -> int:
        return self.admission.num_waiting

    def add(self, sequence: SequenceState) -> None:
        self.admission.add(sequence)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, with their pages; empty when there is nothing to compute."""
        self.admission.advance_loads()
        chunks: list[Chunk] = []
        prefilling: list[SequenceState] = []
        preempted = self.counts.preemptions
        budget = self.sizes.num_tokens
        for sequence in self.running:
            start, known = sequence.num_computed, len(sequence.token_ids)
            if known >= sequence.max_len:
                continue  # An in-flight step samples its last token.
            if known - start > 1:
                prefilling.append(sequence)
            elif len(chunks) < budget:
                end = start + 1
                if end <= sequence.allocated_tokens or self._make_room(sequence, end, chunks):
                    chunks.append(Chunk(sequence, start, end))
        taken = 0
        if chunks:
            self.drafting.add_to_decodes(chunks, budget - len(chunks))
            taken = sum(chunk.end - chunk.start for chunk in chunks)
        decodes = bool(chunks) or self.others_decode
        if decodes:
            budget = min(budget - taken, self.budget.beside(len(chunks), taken))
        if self.holds_prompts:
            budget = 0
        prefilling = [s for s in prefilling if s.running]
        long = [s for s in prefilling if self._is_long(s)]
        # Leave at least half of the budget to short prompts.
        share = max(1, min(self.budget.long_tokens, budget // 2))
        kept = share if long else 0
        for sequence in prefilling:
            if sequence not in long:
                budget -= self._prefill(sequence, budget - kept, chunks, decodes)
        while budget > kept and len(self.running) < self.sizes.num_seqs:
            # A sequence that was just preempted must not take its pages again.
            found = self.admission.admit() if self.counts.preemptions == preempted else None
            if found is None:
                break
            admitted = self._start(*found)
            if self._is_long(admitted):
                long.append(admitted)
                kept = share
            else:
                budget -= self._prefill(admitted, budget - kept, chunks, decodes)
        if long:
            turn = min(long, key=in_order)
            if decodes:
                budget = max(min(kept, budget), self.budget.of_long_prompt(budget))
            self._prefill(turn, budget, chunks, decodes)
        self.drafting.add_proposals(chunks)
        return chunks

    def schedule_ahead(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The next step of in-flight decodes (DraftRules.schedule_ahead).

        Empty: the next step needs the result of `chunks`, or might admit a sequence.
        """
        self.admission.advance_loads()
        living = [chunk for chunk in chunks if chunk.sequence.running]
        if self._might_admit or not living or len(living) < len(self.running):
            return []
        return self.drafting.schedule_ahead(living)

    def _is_long(self, sequence: SequenceState) -> bool:
        return sequence.remaining > self.sizes.num_tokens

    def _prefill(
        self, sequence: SequenceState, budget: int, chunks: list[Chunk], decodes: bool = False
    ) -> int:
        """Add the longest chunk of a prompt that fits the budget; returns what it takes of it.

        Args:
            decodes: sequences decode in the step, so a token counts the time that it takes.
        """
        start = sequence.num_computed
        weight = growth(start) if decodes else 1.0
        most = max(round(budget / weight), min(budget, LEAST_TOKENS))
        end = start + min(sequence.remaining, most)
        if end <= start or not sequence.running or not self._make_room(sequence, end, chunks):
            return 0
        chunks.append(Chunk(sequence, start, end))
        return round((end - start) * weight)

    def record_step(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Record how long a step took."""
        self.budget.record(chunks, seconds)
        if self.admission.stored is not None:
            self.admission.stored.speed.record(chunks, seconds)

    def _make_room(self, sequence: SequenceState, end: int, chunks: list[Chunk]) -> bool:
        """Allocate the pages for tokens up to `end`; preempts other sequences if necessary.

        Returns:
            Whether it succeeded. If not, the sequence itself was preempted.
        """
        if end <= sequence.allocated_tokens:
            return True
        start = sequence.num_computed
        if end == start + 1:
            # A decode frees pages only here, before it needs new ones.
            self.pages.trim(sequence.tables, start)
        while not self.pages.fits(sequence.tables, end):
            last = self.running[-1]
            self._preempt(last)
            chunks[:] = [chunk for chunk in chunks if chunk.sequence is not last]
            if last is sequence:
                return False
        decodes = sequence.remaining == 1
        sequence.allocated_tokens = self.pages.grow(sequence.tables, start, end, decodes)
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        self.counts.preemptions += 1
        sequence.store_tries = 0
        if self.admission.stored is not None:
            self.admission.stored.preempt(sequence)
        self._stop(sequence)
        self.admission.put_back(sequence)

    def preempt_all(self) -> None:
        """Preempt every running sequence, so that all state is computed again."""
        for sequence in reversed(self.running[:]):
            self._preempt(sequence)

    def _start(self, sequence: SequenceState, known: list[Block], resumable: int) -> SequenceState:
        """Start an admitted sequence (Admission.admit), and return it."""
        sequence.tables = self.pages.new_tables()
        sequence.slot = self._free_slots.pop()
        sequence.running = True
        sequence.allocated_tokens = sequence.next_bookkeeping = 0
        sequence.last_output_block = None
        sequence.sharing, cached = True, 0
        if self.prefix is not None:
            size = self.prefix.block_tokens
            sequence.shared_until = len(known) * size if len(known) > resumable else 0
            if resumable:
                self.prefix.adopt(known[:resumable], sequence.tables)
                sequence.blocks.extend(known[:resumable])
                if self.admission.stored is not None:
                    self.admission.stored.save_chain(sequence.blocks, sequence.prefix_owner)
            cached = resumable * size
        replay = self.pages.replay_tokens
        sequence.num_computed = max(0, cached - replay)
        if replay:
            whole = sequence.params.prompt_logprobs is not None
            end = cached if whole else max(cached, sequence.num_prompt)
            sequence.bounds = PromptBounds(cached, end)
        if sequence.num_cached is None:
            sequence.num_cached = cached
            sequence.admitted = time.monotonic()
            self.counts.prompt_tokens += sequence.num_prompt
            self.counts.cached_tokens += sequence.num_cached
            self.counts.cache_hits += sequence.num_cached > 0
        insort(self.running, sequence, key=in_order)
        return sequence

    def record_computed(self, chunks: Sequence[Chunk]) -> None:
        """Record that these chunks are in the cache, and free pages that no later token needs."""
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.end
            sequence.num_computed = end
            if end >= sequence.next_bookkeeping:
                known = end - chunk.pending
                if known >= sequence.next_bookkeeping:
                    self._cache_and_trim(sequence, known, decodes=chunk.decodes)

    def record_verified(self, chunk: Chunk, num_accepted: int) -> None:
        """Record that the first `num_accepted` drafts of a chunk were accepted; token_ids has them.

        The other drafts are undone, but nothing has to be cleared: rows are found by their
        position, and the step that computes a position again overwrites its rows before any token
        sees them. A step of at most max_verify_tokens tokens writes all compressor state that the
        next step may need.
        """
        sequence, end = chunk.sequence, chunk.known + num_accepted
        sequence.num_computed = end
        if end >= sequence.next_bookkeeping:
            self._cache_and_trim(sequence, end, decodes=chunk.known == chunk.start + 1)

    def _cache_and_trim(self, sequence: SequenceState, known: int, *, decodes: bool) -> None:
        """Add complete blocks to the prefix cache, and free pages that are no longer needed.

        Args:
            known: number of tokens that are in the cache and whose ids the host knows.
        """
        sequence.next_bookkeeping = sys.maxsize
        if sequence.sharing and self.prefix is not None:
            size = self.prefix.block_tokens
            for end in range((len(sequence.blocks) + 1) * size, known + 1, size):
                self._add_block(self.prefix, sequence, end)
            sequence.next_bookkeeping = (len(sequence.blocks) + 1) * size
        again = self.pages.trim(sequence.tables, known)
        if not decodes:
            sequence.next_bookkeeping = min(sequence.next_bookkeeping, again)

    def _add_block(self, prefix: PrefixIndex, sequence: SequenceState, end: int) -> None:
        """Add the block that ends at `end` to the prefix cache, with the state at its end."""
        number = len(sequence.blocks)
        if number == len(sequence.keys):
            prefix.extend_keys(sequence.keys, sequence.token_ids[:end], sequence.prefix_owner)
        key = sequence.keys[number]
        block = prefix.add(sequence.blocks, key, sequence.tables, sequence.token_ids)
        # A request with the same prompt computes at least its last token, so it resumes before that
        # token. A longer prompt may contain this one and resume at its end.
        ends_prompt = end <= sequence.num_prompt < end + prefix.block_tokens or (
            end < sequence.num_prompt <= end + prefix.block_tokens
        )
        is_output = end > sequence.num_prompt
        lasting = ends_prompt or is_output or end == sequence.shared_until
        prefix.add_state(block, end, sequence.tables, lasting=lasting)
        if self.admission.stored is not None:
            # Each block of an output ends the request until the next one.
            saves = lasting and not is_output
            self.admission.stored.save_computed(block, sequence.prefix_owner, state=saves)
        if is_output:
            if sequence.last_output_block is not None:
                prefix.evict_early(sequence.last_output_block)
            sequence.last_output_block = block
        self.admission.release_followers(key, sequence)

    def _stop(self, sequence: SequenceState) -> None:
        """Free the pages and the slot of a running sequence."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        self._freed_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.running = False
        sequence.num_computed = 0
        sequence.drafts = []
        self.pages.release(sequence.tables)
        self.admission.needed = None
        self._detach(sequence)

    def _detach(self, sequence: SequenceState) -> None:
        """Detach a sequence from the prefix cache: it uses no blocks and no sequence follows it."""
        if self.prefix is None:
            return
        self.admission.remove_leader(sequence)
        self.prefix.release(sequence.blocks)
        sequence.last_output_block = None

    def take_freed(self) -> list[int]:
        """Return the slots that became free since the last call."""
        freed, self._freed_slots = self._freed_slots, []
        return freed

    def return_freed(self, slots: list[int]) -> None:
        """Let `take_freed` return these slots again, because their step was not launched."""
        self._freed_slots += slots

    def finish(self, sequence: SequenceState) -> None:
        """Remove a running or waiting sequence, and free its pages."""
        if sequence.running:
            if self.admission.stored is not None:
                self.admission.stored.end(sequence)
            self._stop(sequence)
        else:
            self.admission.remove(sequence)

    def reset_prefix_cache(self) -> None:
        """Evict every block. Running sequences continue, but add no more blocks."""
        if self.prefix is None:
            return
        for sequence in self.running:
            self._detach(sequence)
            sequence.sharing = False
        self.admission.cancel_loads()
        self.prefix.clear()
