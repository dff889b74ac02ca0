"""Which waiting sequence runs next, and whether there are pages for it. Pure Python: no torch."""

from bisect import insort
from itertools import count

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.prefix_index import Block, PrefixIndex
from finwhale.engine.plan.sequences import Sequence
from finwhale.engine.plan.step_plan import PENDING

# After this many admissions of sequences with a higher priority, the sequence that has waited
# longest gets the highest priority too.
PATIENCE = 64
# Admission keeps 1/WATERMARK of all blocks free.
WATERMARK = 100


class Admission:
    """The line of waiting sequences.

    A sequence is admitted when there are pages for all its tokens so far. A sequence whose next
    block is in a running sequence's prefill waits aside until that block can be reused.

    Args:
        prefix: the cached blocks; None: nothing is cached.
        running: the running sequences; the scheduler keeps this list.

    Attributes:
        waiting: in order of priority and arrival.
        followers: the sequences that wait for a block which a running sequence will compute.
    """

    def __init__(
        self, pages: PageManager, prefix: PrefixIndex | None, running: list[Sequence]
    ) -> None:
        self.waiting: list[Sequence] = []
        self.followers: dict[bytes, list[Sequence]] = {}
        self._pages, self._prefix, self._running = pages, prefix, running
        self._block_tokens = pages.groups[0].block_tokens
        self._num_blocks = pages.free_blocks
        # By key of a block: the running sequence that will compute it.
        self._coming: dict[bytes, Sequence] = {}
        self._arrivals = count()
        self._passed_over = 0

    @property
    def num_waiting(self) -> int:
        # Another thread may read this during a step: no iterator over a dict that changes.
        return len(self.waiting) + sum(map(len, list(self.followers.values())))

    def add(self, sequence: Sequence) -> None:
        """A new sequence arrives."""
        assert self._blocks(sequence.max_len) <= self._num_blocks
        sequence.arrival = next(self._arrivals)
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A sequence waits, at the place that its arrival gives it."""
        insort(self.waiting, sequence, key=in_order)

    def remove(self, sequence: Sequence) -> None:
        """A waiting sequence ends."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        key = next(key for key, some in self.followers.items() if sequence in some)
        self.followers[key].remove(sequence)
        if not self.followers[key]:
            del self.followers[key]

    def admit(self) -> tuple[Sequence, list[Block], int] | None:
        """Take the next sequence from the line. None: it must wait, or there is none.

        Returns:
            The sequence, the cached blocks of its beginning, and after how many of these it can
            resume.
        """
        while self.waiting:
            sequence = self._next_in_line()
            if sequence.token_ids[-1] == PENDING:
                return None
            known, resumable = self._match(sequence)
            if self._follows(sequence, resumable):
                continue
            found = known[:resumable]
            needed = self._blocks(len(sequence.token_ids)) - sum(b.users > 0 for b in found)
            if self._running and self._pages.keeping:
                needed += self._num_blocks // WATERMARK + sum(map(self._promised, self._running))
            if needed > self._pages.free_blocks:
                assert self._running
                return None
            self.waiting.remove(sequence)
            self._count_passed_over(sequence)
            if self._prefix is not None:
                for key in sequence.keys[resumable:]:
                    self._coming.setdefault(key, sequence)
            return sequence, known, resumable
        return None

    def computed(self, key: bytes, sequence: Sequence) -> None:
        """A running sequence has entered a block into the prefix index."""
        if self._coming.get(key) is sequence:
            self._release_followers(key)

    def left(self, sequence: Sequence) -> None:
        """A sequence will enter no more blocks."""
        for key in sequence.keys[len(sequence.chain) :]:
            self.computed(key, sequence)

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
            self.put_back(oldest)
        return self.waiting[0]

    def _count_passed_over(self, sequence: Sequence) -> None:
        priorities_differ = self.waiting and self.waiting[-1].priority != sequence.priority
        if priorities_differ and min(s.arrival for s in self.waiting) < sequence.arrival:
            self._passed_over += 1
        else:
            self._passed_over = 0

    def _match(self, sequence: Sequence) -> tuple[list[Block], int]:
        if self._prefix is None:
            return [], 0
        self._prefix.extend_keys(sequence.keys, sequence.token_ids)
        # The last token is always computed: its logits give the next.
        last = (len(sequence.token_ids) - 1) // self._prefix.block_tokens
        return self._prefix.match(sequence.keys[:last])

    def _follows(self, sequence: Sequence, resumable: int) -> bool:
        """Put a sequence aside if a running one is about to compute its next block."""
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

    def _release_followers(self, key: bytes) -> None:
        """No sequence computes this block any more: its followers are in line again."""
        del self._coming[key]
        for sequence in self.followers.pop(key, ()):
            self.put_back(sequence)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_tokens)

    def _promised(self, sequence: Sequence) -> int:
        """Blocks that a sequence has yet to be given for the tokens that it was admitted with."""
        group = self._pages.keeping[0]
        given = sequence.tables[group.name].end * group.tokens_per_page // group.block_tokens
        return self._blocks(len(sequence.token_ids)) - given

    def check_integrity(self) -> None:
        """Assert that every waiting sequence is in line, and follows a running one or none."""
        assert self.waiting == sorted(self.waiting, key=in_order)
        for sequence in (*self.waiting, *(s for some in self.followers.values() for s in some)):
            assert not sequence.running and not sequence.chain and not sequence.num_computed
            assert sequence.slot == -1
        assert self.followers.keys() <= self._coming.keys()
        for key, sequence in self._coming.items():
            assert sequence.running and key in sequence.keys[len(sequence.chain) :]


def in_order(sequence: Sequence) -> tuple[int, int]:
    """What sequences are sorted by."""
    return sequence.priority, sequence.arrival
