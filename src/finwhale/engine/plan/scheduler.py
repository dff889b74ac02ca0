"""Which sequences run next. Pure Python: no torch.

One budget of tokens a step: first every running sequence's next token, then prompts, in order of
priority and arrival. A sequence is admitted when there are pages for all its tokens so far; what it
generates later may find none left, and then the last in order gives its pages back and waits to be
read again (preemption). What it had read often still lies in the prefix index.
"""

import sys
from bisect import insort
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import count

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.prefix_index import Block, PrefixIndex
from finwhale.engine.plan.sequences import PENDING, Chunk, Sequence

# Tokens of a step in which sequences decode, of max_num_batched_tokens. On one H200 (Flash, 8
# layers, 128 sequences) a decode takes 8.2 ms and a step with three quarters of 2,048 tokens 20.4,
# 2.5 times as long; one with all of them and no decode 21.8.
MIXED_SHARE = (3, 4)
# Tokens of a step for a prompt that needs several steps, while anyone else has something to read or
# decodes. They get fewer as its context grows, for one at DOUBLE_COST takes twice as long; but
# FEWEST_LONG at least.
LONG_SHARE = (1, 4)
DOUBLE_COST = 65536
FEWEST_LONG = 32
# Admissions that may pass over the longest waiting request because it has a lower priority.
PATIENCE = 64
# Blocks that admission leaves free: one of so many.
WATERMARK = 100


@dataclass(slots=True)
class SchedulerCounts:
    """What happened since the start.

    Attributes:
        prompt_tokens, cached_tokens: of admitted prompts, and how many of them were found.
        preemptions: sequences that gave their pages back to be read again.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Holds the waiting and the running sequences.

    Args:
        prefix_caching: let sequences go on from blocks that others have read.
        max_model_len: no token stands further back, drafts included.

    Attributes:
        draft_tokens: how many drafts a sequence may have; 0: none.
        alike: let all decodes have so many drafts, real or not, that a captured step serves them.
        waiting: in order of priority and arrival.
        running: in the same order.
        followers: those that wait for a block that a running sequence is about to read.
        prefix: the blocks that were read; None: not kept.
    """

    def __init__(
        self,
        pages: PageManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_caching: bool = True,
        max_model_len: int = sys.maxsize,
    ) -> None:
        self.pages = pages
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.mixed_tokens = _share(max_num_batched_tokens, MIXED_SHARE)
        self.long_tokens = _share(max_num_batched_tokens, LONG_SHARE)
        self.max_model_len = max_model_len
        self.draft_tokens = 0
        self.alike = False
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.followers: dict[bytes, list[Sequence]] = {}
        self.counts = SchedulerCounts()
        # A model of window layers alone has no blocks to find.
        self.prefix = PrefixIndex(pages) if prefix_caching and pages.keeping else None
        self._coming: dict[bytes, Sequence] = {}
        self._arrivals = count()
        self._passed_over = 0
        self._num_blocks = pages.free_blocks

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.followers)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + sum(map(len, self.followers.values()))

    def add(self, sequence: Sequence) -> None:
        assert self._blocks(sequence.max_len) <= self._num_blocks
        sequence.arrival = next(self._arrivals)
        insort(self.waiting, sequence, key=_order)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, their pages given; empty when there is nothing to read."""
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
            if self.draft_tokens:
                if not (self.alike and self._add_alike(chunks, budget - taken)):
                    self._add_drafts(chunks, budget - taken)
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
        while budget > kept and self.waiting and len(self.running) < self.max_num_seqs:
            # Who just gave its pages back must not take them again.
            admitted = self._admit() if self.counts.preemptions == preempted else None
            if admitted is None:
                break
            if self._is_long(admitted):
                long.append(admitted)
                kept = share
            else:
                budget -= self._read(admitted, budget - kept, chunks)
        if long:
            turn = min(long, key=_order)
            least = min(FEWEST_LONG, kept)
            part = max(least, kept * DOUBLE_COST // (DOUBLE_COST + turn.num_computed))
            self._read(turn, min(budget, part) if decodes else budget, chunks)
        if self.draft_tokens:
            for chunk in chunks:
                if chunk.completes and not chunk.propose:
                    chunk.propose = self._num_proposals(chunk)
        return chunks

    def again(self, chunks: Items[Chunk]) -> list[Chunk]:
        """The same sequences' next step, before it is known how many tokens that of `chunks` gives.

        All have as many drafts. Empty: the next step must know, or something else is to be done.
        """
        count = len(chunks[0].drafts)
        living = [chunk for chunk in chunks if chunk.sequence.running]
        others = self.waiting or self.followers
        if others and len(self.running) < self.max_num_seqs:
            return []
        if count != self.draft_tokens or len(living) < len(self.running):
            return []
        following = []
        for chunk in living:
            sequence, start = chunk.sequence, chunk.start + 1
            if len(sequence.token_ids) + 1 >= sequence.max_len:
                continue  # Its last token is being chosen.
            # It may begin `count` tokens later, and rows of the next guesses stand behind it.
            end = start + 1 + count
            if not self._has_room(sequence, start, _with_guesses(end + count, count)):
                return []
            following.append(Chunk(sequence, start, end, (0,) * count, count, floats=True))
        return following

    def _add_alike(self, chunks: list[Chunk], budget: int) -> bool:
        """Let all decodes verify as many drafts and get as many; False: there is no room for it.

        Who was drafted fewer verifies any tokens: they may even be right.
        """
        count = self.draft_tokens
        if count * len(chunks) > budget:
            return False
        for chunk in chunks:
            if not self._has_room(
                chunk.sequence, chunk.start, _with_guesses(chunk.end + count, count)
            ):
                return False
        for chunk in chunks:
            drafts = chunk.sequence.drafts[:count]
            chunk.num_any = count - len(drafts)
            chunk.drafts = (*drafts, *[0] * chunk.num_any)
            chunk.end += count
            chunk.propose = count
        return True

    def _add_drafts(self, chunks: list[Chunk], budget: int) -> None:
        """Let decodes verify what was drafted for them.

        Nobody gives pages back for a draft.
        """
        taken = 0
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.start
            count = min(len(sequence.drafts), self.draft_tokens, budget - taken)
            count = min(count, sequence.max_len - chunk.end - 1)
            if count < 1:
                continue
            end = chunk.end + count
            if self._has_room(sequence, start, end):
                chunk.drafts = tuple(sequence.drafts[: end - chunk.end])
                chunk.end = end
                taken += len(chunk.drafts)

    def _num_proposals(self, chunk: Chunk) -> int:
        """How many drafts there can be after a step, their rows of the MTP layer given pages."""
        sequence = chunk.sequence
        # The step gives at least one token, and a verification one more than it accepts. All
        # drafts but the last are read: the first as row `end` at most.
        most = min(sequence.max_len - chunk.known - 2, sequence.max_len - chunk.end + 1)
        count = min(self.draft_tokens, most)
        if count > 1 and not self._has_room(sequence, chunk.end, chunk.end + count - 1):
            count = 1
        return max(0, count)

    def _has_room(self, sequence: Sequence, start: int, end: int) -> bool:
        """Give the pages for tokens start..end-1 if they are there without anybody yielding."""
        if end > self.max_model_len:
            return False
        if end > sequence.room:
            self.pages.trim(sequence.tables, sequence.num_computed)
            if not self.pages.fits(sequence.tables, end):
                return False
            sequence.room = self.pages.grow(sequence.tables, start, end, decodes=True)
        return True

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
        """Give the pages for tokens up to `end`, whoever must yield; False: it did itself."""
        if end <= sequence.room:
            return True
        start = sequence.num_computed
        if end == start + 1:
            # A decode gives back what it can only where it takes: it never holds more than so.
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
        insort(self.waiting, sequence, key=_order)

    def _admit(self) -> Sequence | None:
        """The next in line, running with the blocks that are found; None: it must wait."""
        while self.waiting:
            sequence = self._next_in_line()
            if sequence.token_ids[-1] == PENDING:
                return None
            known, resumable = self._match(sequence)
            if self._follows(sequence, resumable):
                continue
            found = known[:resumable]
            needed = self._blocks(len(sequence.token_ids)) - sum(b.users > 0 for b in found)
            if self.running and self.pages.keeping:
                needed += self._num_blocks // WATERMARK + sum(map(self._promised, self.running))
            if needed > self.pages.free_blocks:
                assert self.running
                return None
            self.waiting.remove(sequence)
            self._start(sequence, known, resumable)
            return sequence
        return None

    def _next_in_line(self) -> Sequence:
        first = self.waiting[0]
        if first.priority == self.waiting[-1].priority:
            return first
        oldest = min(self.waiting, key=lambda s: s.arrival)
        if oldest is first:
            return first
        if self._passed_over >= PATIENCE:
            # From now on it is as urgent as the most urgent one.
            self.waiting.remove(oldest)
            oldest.priority = first.priority
            insort(self.waiting, oldest, key=_order)
        return self.waiting[0]

    def _match(self, sequence: Sequence) -> tuple[list[Block], int]:
        if self.prefix is None:
            return [], 0
        self.prefix.extend_keys(sequence.keys, sequence.token_ids)
        # The last token is always read: its logits give the next.
        last = (len(sequence.token_ids) - 1) // self.prefix.block_tokens
        return self.prefix.match(sequence.keys[:last])

    def _follows(self, sequence: Sequence, resumable: int) -> bool:
        """Put a sequence aside if a running one is about to read what it would read next."""
        last = None
        for key in sequence.keys[resumable : (len(sequence.token_ids) - 1) // self._block_tokens]:
            leader = self._coming.get(key)
            if leader is None or leader.priority > sequence.priority:
                break
            last = key
        if last is None:
            return False
        self.waiting.remove(sequence)
        self.followers.setdefault(last, []).append(sequence)
        return True

    def _start(self, sequence: Sequence, known: list[Block], resumable: int) -> None:
        passes_over = self.waiting and self.waiting[-1].priority != sequence.priority
        if passes_over and min(s.arrival for s in self.waiting) < sequence.arrival:
            self._passed_over += 1
        else:
            self._passed_over = 0
        sequence.tables = self.pages.new_tables()
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
            for key in sequence.keys[resumable:]:
                self._coming.setdefault(key, sequence)
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.counts.prompt_tokens += sequence.num_prompt
            self.counts.cached_tokens += sequence.num_cached
        insort(self.running, sequence, key=_order)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    @property
    def _block_tokens(self) -> int:
        return self.pages.groups[0].block_tokens

    def _promised(self, sequence: Sequence) -> int:
        """Blocks that a sequence has yet to be given for the tokens that it was admitted with."""
        group = self.pages.keeping[0]
        given = sequence.tables[group.name].end * group.tokens_per_page // group.block_tokens
        return self._blocks(len(sequence.token_ids)) - given

    def computed(self, chunks: Items[Chunk]) -> None:
        """The chunks are in the cache; pages that nobody needs any more go back."""
        for chunk in chunks:
            sequence, end = chunk.sequence, chunk.end
            sequence.num_computed = end
            if end >= sequence.due:
                known = end - chunk.pending
                if known >= sequence.due:
                    self._settle(sequence, known, decodes=chunk.decodes)

    def verified(self, chunk: Chunk, num_accepted: int) -> None:
        """So many of a chunk's drafts stand in token_ids now; what was read after them is undone.

        Nothing has to be cleared: rows are found by their position, and whoever reads a position
        again overwrites its rows before any token sees them. Rows of compressor state that a step
        leaves out are never needed here, for a step of at most max_verify_tokens may be undone.
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
        if self._coming.get(key) is sequence:
            self._came(key)

    def _came(self, key: bytes) -> None:
        """Nobody reads this block any more: who waited for it is in line again."""
        del self._coming[key]
        for sequence in self.followers.pop(key, ()):
            insort(self.waiting, sequence, key=_order)

    def _stop(self, sequence: Sequence) -> None:
        """Take the pages of a running sequence back."""
        self.running.remove(sequence)
        sequence.running = False
        sequence.num_computed = 0
        sequence.drafts = []
        self.pages.release(sequence.tables)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """A sequence neither uses blocks of others nor promises any."""
        if self.prefix is None:
            return
        for key in sequence.keys[len(sequence.chain) :]:
            if self._coming.get(key) is sequence:
                self._came(key)
        self.prefix.release(sequence.chain)
        sequence.newest = None

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, whether it runs or waits, and its pages back."""
        if sequence.running:
            self._stop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            key = next(key for key, some in self.followers.items() if sequence in some)
            self.followers[key].remove(sequence)
            if not self.followers[key]:
                del self.followers[key]

    def reset_prefix_cache(self) -> None:
        """Forget every block; what runs goes on, and leaves none behind."""
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
        for line in (self.waiting, self.running):
            assert line == sorted(line, key=_order)
        for sequence in (*self.waiting, *(s for some in self.followers.values() for s in some)):
            assert not sequence.running and not sequence.chain and not sequence.num_computed
        assert self.followers.keys() <= self._coming.keys()
        for key, sequence in self._coming.items():
            assert sequence.running and key in sequence.keys[len(sequence.chain) :]


def _with_guesses(end: int, count: int) -> int:
    """Where the rows end that guesses of `count` drafts behind a step's last token take."""
    return end + max(0, count - 1)


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.priority, sequence.arrival


def _share(tokens: int, part: tuple[int, int]) -> int:
    return max(1, tokens * part[0] // part[1])
