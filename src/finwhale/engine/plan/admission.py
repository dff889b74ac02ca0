"""Decides which waiting sequence starts next, and when it has enough pages. No torch."""

from bisect import insort
from collections.abc import Iterable
from itertools import count

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.prefix_index import Block, PrefixIndex
from finwhale.engine.plan.sequences import SequenceState
from finwhale.engine.plan.step_plan import PENDING
from finwhale.engine.plan.stored_prefixes import Load, StoredPrefixes

# After this many admissions of sequences with a higher priority, the sequence that has waited
# longest gets the highest priority too.
PATIENCE = 64
# Admission keeps 1/WATERMARK of all blocks free.
WATERMARK = 100


Leader = SequenceState | Load


class Admission:
    """The queue of waiting sequences.

    A sequence is admitted when there are enough free pages for all its tokens so far. If a running
    sequence or a load (a leader) is about to give the next block of a waiting sequence (a
    follower), the follower waits outside the queue until it can reuse the block.

    Args:
        prefix: the prefix cache; None: the engine has none.
        running: the running sequences. The scheduler updates this list.

    Attributes:
        waiting: the queue, in order of priority and arrival.
        needed: number of free blocks for which the next in the queue waits; None: `admit` has not
            looked since the queue changed or a sequence stopped.
        followers: the followers of each block, by the block's key.
        stored: loads blocks from a prefix store; None: there is none.
    """

    def __init__(
        self, pages: PageManager, prefix: PrefixIndex | None, running: list[SequenceState]
    ) -> None:
        self.waiting: list[SequenceState] = []
        self.needed: int | None = None
        self.followers: dict[bytes, list[SequenceState]] = {}
        self.stored: StoredPrefixes | None = None
        self._pages, self._prefix, self._running = pages, prefix, running
        self._block_tokens = pages.groups[0].block_tokens
        self._num_blocks = pages.free_blocks
        # The leader that will give a block, by the block's key.
        self._leaders: dict[bytes, Leader] = {}
        self._arrivals = count()
        self._passed_over = 0

    @property
    def num_waiting(self) -> int:
        # Another thread may read this during a step, so do not iterate over a dict that changes.
        return len(self.waiting) + sum(map(len, list(self.followers.values())))

    @property
    def might_admit(self) -> bool:
        """Whether `admit` might find a sequence that can start now."""
        return bool(self.waiting) and (self.needed or 0) <= self._pages.free_blocks

    def add(self, sequence: SequenceState) -> None:
        """Add a new sequence to the queue."""
        assert self._blocks(sequence.max_len) <= self._num_blocks
        sequence.arrival = next(self._arrivals)
        self.put_back(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """Return a sequence to its place in the queue, by its priority and original arrival."""
        insort(self.waiting, sequence, key=in_order)
        self.needed = None

    def remove(self, sequence: SequenceState) -> None:
        """Remove a sequence that ends while it waits, or that `add` was kept from adding."""
        if self.stored is not None:
            self.stored.end_load(sequence)
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.needed = None
            return
        key = next((key for key, some in self.followers.items() if sequence in some), None)
        if key is None:
            return
        self.followers[key].remove(sequence)
        if not self.followers[key]:
            del self.followers[key]

    def admit(self) -> tuple[SequenceState, list[Block], int] | None:
        """Remove the next sequence from the queue, if it can start.

        Returns:
            The sequence, the longest cached prefix of its blocks, and the number of these blocks
            after which it can resume. None: no sequence can start now.
        """
        while self.waiting:
            sequence = self._next_in_queue()
            if sequence.token_ids[-1] == PENDING:
                return None
            known, resumable = self._match(sequence)
            if self._try_follow(sequence, resumable):
                continue
            found = known[:resumable]
            needed = self._blocks(len(sequence.token_ids)) - sum(b.users > 0 for b in found)
            if self._running and self._pages.full_groups:
                needed += self._num_blocks // WATERMARK + sum(
                    map(self._unallocated_blocks, self._running)
                )
            if self.stored is not None:
                needed += self.stored.reserved_from(sequence)
            if needed > self._pages.free_blocks:
                if self._running or self.moves_prefixes:
                    self.needed = needed
                    return None
                assert self.stored is not None and self.stored.make_room()
                continue
            if self._try_load(sequence, known, resumable):
                continue
            if self.stored is not None:
                self.stored.end_load(sequence)
            self.waiting.remove(sequence)
            self.needed = None
            self._count_passed_over(sequence)
            if self._prefix is not None:
                for key in sequence.keys[resumable:]:
                    self._leaders.setdefault(key, sequence)
            return sequence, known, resumable
        return None

    @property
    def moves_prefixes(self) -> bool:
        """Whether prefixes are on their way to or from the store."""
        return self.stored is not None and self.stored.busy

    def advance_loads(self) -> None:
        """Continue the loads. When a load has ended, its followers return to the queue."""
        if self.stored is not None:
            self._release_loads(self.stored.advance())

    def cancel_loads(self) -> None:
        """Let no load add blocks to the cache any more."""
        if self.stored is not None:
            self._release_loads(self.stored.cancel())

    def _release_loads(self, released: Iterable[tuple[Load, list[bytes]]]) -> None:
        for load, keys in released:
            for key in keys:
                self.release_followers(key, load)

    def _try_load(self, sequence: SequenceState, known: list[Block], resumable: int) -> bool:
        """Make a sequence a follower of a load of its next blocks, if the store may have them."""
        if self.stored is None:
            return False
        keys = sequence.keys[resumable : sequence.num_reusable // self._block_tokens]
        led = next((i for i, key in enumerate(keys) if key in self._leaders), len(keys))
        num_blocks = self._blocks(len(sequence.token_ids))
        load = self.stored.begin_load(sequence, known, resumable, keys[:led], num_blocks)
        if load is None:
            return False
        self._leaders |= dict.fromkeys(load.keys, load)
        return self._try_follow(sequence, resumable)

    def release_followers(self, key: bytes, leader: Leader) -> None:
        """Return the followers of a block to the queue, if `leader` was to give the block.

        The block is in the cache, or its leader has ended without it.
        """
        if self._leaders.get(key) is leader:
            del self._leaders[key]
            for sequence in self.followers.pop(key, ()):
                self.put_back(sequence)

    def remove_leader(self, sequence: SequenceState) -> None:
        """Release all followers of a sequence that will add no more blocks to the cache."""
        for key in sequence.keys[len(sequence.blocks) :]:
            self.release_followers(key, sequence)

    def _next_in_queue(self) -> SequenceState:
        first = self.waiting[0]
        if first.priority == self.waiting[-1].priority:
            return first
        oldest = min(self.waiting, key=lambda s: s.arrival)
        if oldest is first:
            return first
        if self._passed_over >= PATIENCE:
            # From now on this sequence has the highest priority too.
            self.waiting.remove(oldest)
            oldest.priority = first.priority
            self.put_back(oldest)
        return self.waiting[0]

    def _count_passed_over(self, sequence: SequenceState) -> None:
        priorities_differ = self.waiting and self.waiting[-1].priority != sequence.priority
        if priorities_differ and min(s.arrival for s in self.waiting) < sequence.arrival:
            self._passed_over += 1
        else:
            self._passed_over = 0

    def _match(self, sequence: SequenceState) -> tuple[list[Block], int]:
        if self._prefix is None:
            return [], 0
        self._prefix.extend_keys(sequence.keys, sequence.token_ids, sequence.prefix_owner)
        return self._prefix.match(sequence.keys[: sequence.num_reusable // self._block_tokens])

    def _try_follow(self, sequence: SequenceState, resumable: int) -> bool:
        """Make a sequence a follower if a running one is about to compute its next block."""
        last = None
        for key in sequence.keys[resumable : sequence.num_reusable // self._block_tokens]:
            leader = self._leaders.get(key)
            if leader is None or leader.priority > sequence.priority:
                break
            last = key
        if last is None:
            return False
        self.waiting.remove(sequence)
        self.followers.setdefault(last, []).append(sequence)
        return True

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _unallocated_blocks(self, sequence: SequenceState) -> int:
        """Number of blocks that a running sequence must still allocate for its tokens so far."""
        group = self._pages.full_groups[0]
        allocated = sequence.tables[group.name].end * group.tokens_per_page // group.block_tokens
        return self._blocks(len(sequence.token_ids)) - allocated


def in_order(sequence: SequenceState) -> tuple[int, int]:
    """The sort key of sequences: first their priority, then their arrival."""
    return sequence.priority, sequence.arrival
