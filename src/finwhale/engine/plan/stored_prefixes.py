"""Moves the prefix cache's blocks and states to and from a prefix store. Pure Python: no torch.

A block is saved when a sequence has computed it, and a state where a sequence is likely to resume:
at the end of a prompt, where two prompts diverge, and at the end of a request. While a record is
copied from the device, its pages keep a reference.

A waiting sequence whose next blocks are not in the cache may cause a *load*. To the queue, a load
is the leader of these blocks (admission.py): the sequence, and others with the same prefix, follow
it until they can reuse the blocks. If anything fails, they compute the blocks themselves. Until the
sequence is admitted, the load keeps the blocks, and the room that the sequence needs besides.
"""

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.prefix_index import Block, PrefixIndex, State
from finwhale.engine.plan.prefix_store import Record, StoreCounts, StoreName
from finwhale.engine.plan.sequences import Chunk, SequenceState

logger = logging.getLogger(__name__)

# Fewer blocks are computed: a load takes at least two steps.
LEAST_BLOCKS = 2
# After this many failed loads, a sequence computes what the store may have.
MOST_TRIES = 2
# The most states on their way. The windowed groups have pages for so many beside those that running
# sequences need (kv_cache.py).
MOVING_STATES = 8
# The store is switched off if it reads fewer than LEAST_SPEED times the tokens per second that
# prefill computes. A rate counts when it was measured for LEAST_SECONDS.
LEAST_SPEED, LEAST_SECONDS = 3, 2.0
# It is switched off too if a search, or the records of one load, take longer.
LONGEST_S = 30.0
# Most searches end in this time without a find. Then their sequences need not wait for a step.
FIND_S = 0.002
# Saves that found no room when a sequence ended are tried again for so long. The sequence's answer
# may wait for them.
LONGEST_FLUSH_S = 1.0


class Transfer(Protocol):
    """A record on its way between the store and the device.

    Attributes:
        done: it has ended, and the pages may be used.
        failed: it has ended without success.
    """

    done: bool
    failed: bool


class Transfers(Protocol):
    """Moves records between the store and pages of the device (store/transfers.py)."""

    counts: StoreCounts

    def find(self, records: Sequence[Record]) -> "Future[list[bool]]":
        """PrefixStore.contains, on another thread."""

    def load(self, record: Record, pages: State) -> Transfer: ...

    def save(self, record: Record, pages: State) -> Transfer | None:
        """Begin to save a record; None: too many others are on their way."""

    def saving(self, keys: Collection[bytes]) -> bool:
        """Return whether a save of one of these blocks is still under way."""

    def advance(self) -> None:
        """Launch the copies that can begin, and note which have ended."""

    def give_up_loads(self) -> None:
        """Let the loads whose records are not read yet fail now."""

    def close(self) -> None:
        """Wait until the files are written, and end the store's threads. No call may follow."""


@dataclass(slots=True, eq=False)
class Load:
    """Blocks that are being loaded for waiting sequences.

    Attributes:
        sequence: the one that caused the load.
        chain: the cached blocks before the loaded ones.
        first: number of cached blocks after which the sequence could resume.
        keys: of the blocks after these: first of the cached ones, then of those to load.
        found: which records the store has: those of `keys`, then those of their states, if there
            are any. None: this is known.
        parts: the pages of each block to load, then those of the state after the last key, and
            their transfers.
        reserved: number of blocks that the sequence will need besides those in `chain` and `parts`.
        deadline: when `found`, or then the parts, must be complete (time.monotonic()).
        failed: the blocks will not be added to the cache.
        complete: the blocks are in the cache, and in `chain`.
    """

    sequence: SequenceState
    chain: list[Block]
    first: int
    keys: list[bytes]
    found: "Future[list[bool]] | None"
    reserved: int
    deadline: float
    parts: list[tuple[State, Transfer]] = field(default_factory=list)
    failed: bool = False
    complete: bool = False
    priority: float = float("-inf")  # every sequence may follow

    @property
    def num_cached(self) -> int:
        """How many of `keys` are of cached blocks."""
        return len(self.chain) - self.first

    @property
    def is_late(self) -> bool:
        parts = (transfer.done for _, transfer in self.parts)
        done = self.found.done() if self.found is not None else all(parts)
        return not done and time.monotonic() > self.deadline

    def num_stored(self, found: Sequence[bool]) -> int:
        """How many of `keys` can be cached: up to the last one with a state in the store, if
        blocks have states.
        """
        stored, count = 0, len(self.keys)
        for number in range(count):
            if number >= self.num_cached and not found[number]:
                break
            if len(found) == count or found[count + number]:
                stored = number + 1
        return stored


@dataclass(slots=True, eq=False)
class Flush:
    """Blocks of a sequence that has ended, of which some are not saved yet.

    Attributes:
        request_id: whose answer waits until the store has the blocks; empty: it does not wait.
        deadline: when the blocks are given up (time.monotonic()).
    """

    request_id: str
    owner: str
    chain: list[Block]
    deadline: float


@dataclass(slots=True)
class StoreSpeed:
    """Compares how fast a store reads with how fast prefill computes.

    Attributes:
        counts: of the store.
        block_tokens: tokens of a block.
        tokens, seconds: of steps of mostly prefill.
    """

    counts: StoreCounts
    block_tokens: int
    tokens: int = 0
    seconds: float = 0.0

    def record(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Record how long a step took, if most of its tokens are of prompts."""
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        if sum(c.end - c.start for c in chunks if c.num_known == 1) < tokens / 2:
            self.tokens += tokens
            self.seconds += seconds

    def why_too_slow(self) -> str:
        """Why the store is not worth using; empty: it is, or this is not known yet."""
        counts = self.counts
        if min(counts.read_seconds, self.seconds) < LEAST_SECONDS:
            return ""
        reads = counts.read_blocks * self.block_tokens / counts.read_seconds
        computes = self.tokens / self.seconds
        if reads >= LEAST_SPEED * computes:
            return ""
        return (
            f"it reads {reads:,.0f} tokens per second, less than {LEAST_SPEED} times the "
            f"{computes:,.0f} that prefill computes"
        )


class StoredPrefixes:
    """The loads and saves of one engine.

    Args:
        saves_all: save every block. If not, save the blocks that a second sequence uses, and when
            such a sequence ends, the rest of its blocks.

    Attributes:
        name: of the store; None: a test's.
        loads: the loads, oldest first.
        flushes: the flushes, oldest first.
        off: why the store is not used any more; empty: it is used.
    """

    def __init__(
        self,
        pages: PageManager,
        prefix: PrefixIndex,
        transfers: Transfers,
        *,
        saves_all: bool = True,
        name: StoreName | None = None,
    ) -> None:
        self._pages, self._prefix, self._transfers = pages, prefix, transfers
        self._saves_all, self.name = saves_all, name
        self.counts = transfers.counts
        self.loads: list[Load] = []
        self.flushes: list[Flush] = []
        self.off = ""
        self._told_of_late = False
        self.speed = StoreSpeed(transfers.counts, prefix.block_tokens)
        self._saves: list[tuple[Record, State, Transfer]] = []
        self._moving_states = 0

    def close(self) -> None:
        """End the store's work. No call may follow."""
        self._transfers.close()

    @property
    def busy(self) -> bool:
        moving = not all(load.complete for load in self.loads)
        return moving or bool(self._saves or self.flushes)

    # --- Saves ------------------------------------------------------------------------------------

    def save_computed(self, block: Block, owner: str, *, state: bool) -> None:
        """Save a block that was computed, and with `state` the state at its end."""
        if self._saves_all:
            self._save_block(block, owner)
            if state:
                self._save_state(block, owner)

    def save_chain(self, blocks: Sequence[Block], owner: str) -> bool:
        """Save the blocks of a sequence, and the states where another is likely to resume; returns
        whether there was room for all.
        """
        skipped = self.counts.skipped
        for block in blocks:
            self._save_block(block, owner)
            if block is blocks[-1] or self._prefix.is_lasting(block):
                self._save_state(block, owner)
        return self.counts.skipped == skipped

    def end(self, sequence: SequenceState) -> None:
        """Save what a sequence that ends has not saved yet, and note the use of its blocks."""
        blocks, owner = sequence.blocks, sequence.prefix_owner
        if not blocks or self.off:
            return
        saves = self._saves_all or bool(sequence.num_cached)
        complete = not saves or self.save_chain(blocks, owner)
        key = self._prefix.owner_key(owner)
        used = [Record(b.key, "block", key) for b in blocks if b.saved]
        used += [Record(b.key, "state", key) for b in blocks if b.state_saved]
        self._transfers.find(used)
        if sequence.saves_first or not complete:
            until = time.monotonic() + LONGEST_FLUSH_S
            flush = Flush(sequence.request_id if sequence.saves_first else "", owner, [], until)
            for block in blocks:
                self._prefix.use(flush.chain, block)
            self.flushes.append(flush)

    def is_flushing(self, request_id: str) -> bool:
        return any(flush.request_id == request_id for flush in self.flushes)

    def _flush(self, flush: Flush) -> bool:
        """Save what is left of a flush; returns whether it has ended."""
        skipped = self.counts.skipped
        complete = self.save_chain(flush.chain, flush.owner)
        self.counts.skipped = skipped  # the next call tries again
        if flush.request_id:
            complete &= not self._transfers.saving({block.key for block in flush.chain})
        if not complete and not self.off:
            if time.monotonic() < flush.deadline:
                return False
            if flush.request_id and not self._told_of_late:
                self._told_of_late = True
                logger.warning(
                    "the prefix store did not save a prompt within %.0f s: a decode server will "
                    "compute the prompt again",
                    LONGEST_FLUSH_S,
                )
        self._prefix.release(flush.chain)
        return True

    def preempt(self, sequence: SequenceState) -> None:
        """Save where a sequence can resume if its blocks are evicted. They are not saved here, so
        that other sequences get the pages at once.
        """
        if sequence.blocks and sequence.blocks[-1].saved:
            self._save_state(sequence.blocks[-1], sequence.prefix_owner)

    def _save_block(self, block: Block, owner: str) -> None:
        if not block.saved:
            record = Record(block.key, "block", self._prefix.owner_key(owner))
            block.saved = self._save(record, block.pages)

    def _save_state(self, block: Block, owner: str) -> None:
        if block.state and not block.state_saved:
            record = Record(block.key, "state", self._prefix.owner_key(owner))
            block.state_saved = self._save(record, block.state)

    def _save(self, record: Record, pages: State) -> bool:
        """Begin to save a record, unless too much else is on its way."""
        if self.off:
            return False
        has_room = record.kind == "block" or self._moving_states < MOVING_STATES
        transfer = self._transfers.save(record, pages) if has_room else None
        if transfer is None:
            self.counts.skipped += 1
            return False
        self._pages.hold(pages)
        self._saves.append((record, pages, transfer))
        self._count(record, 1)
        return True

    def _count(self, record: Record, more: int) -> None:
        """Count a record whose pages are held by a save."""
        if record.kind == "state":
            self._moving_states += more
        else:
            self._prefix.num_saving += more

    # --- Loads ------------------------------------------------------------------------------------

    def reserved_from(self, sequence: SequenceState) -> int:
        """Number of free blocks that other sequences will need when they have been loaded."""
        return sum(load.reserved for load in self.loads if load.sequence is not sequence)

    def begin_load(
        self,
        sequence: SequenceState,
        known: Sequence[Block],
        resumable: int,
        keys: list[bytes],
        num_blocks: int,
    ) -> Load | None:
        """Look for blocks of a waiting sequence in the store; None: it should compute them.

        Args:
            known: the cached blocks, of which it could resume after `resumable`.
            keys: of all blocks after these `resumable`.
            num_blocks: that the sequence needs in all.
        """
        if self.off or len(keys) < LEAST_BLOCKS or sequence.store_tries >= MOST_TRIES:
            return None
        sequence.store_tries += 1
        found = self._transfers.find(self._records(sequence, keys))
        with suppress(TimeoutError):
            if not any(found.result(FIND_S)):
                sequence.store_tries = MOST_TRIES
                return None
        reserved, deadline = num_blocks - resumable, time.monotonic() + LONGEST_S
        load = Load(sequence, [], resumable, keys, found, reserved, deadline)
        for block in known:
            self._prefix.use(load.chain, block)
        self.loads.append(load)
        return load

    def end_load(self, sequence: SequenceState) -> None:
        """Let go of what was loaded for a sequence, which is admitted now or has ended."""
        for load in [load for load in self.loads if load.sequence is sequence]:
            load.reserved = 0
            if load.complete:
                self._release(load)

    def make_room(self) -> bool:
        """Let go of what waiting sequences have loaded; returns whether there was any."""
        complete = [load for load in self.loads if load.complete]
        for load in complete:
            self._release(load)
        return bool(complete)

    def _release(self, load: Load) -> None:
        """Let go of a load's blocks and its state."""
        self._prefix.release(load.chain)
        self._moving_states -= 1
        self.loads.remove(load)

    def _records(self, sequence: SequenceState, keys: Sequence[bytes]) -> list[Record]:
        owner = self._prefix.owner_key(sequence.prefix_owner)
        blocks = [Record(key, "block", owner) for key in keys]
        states = [Record(key, "state", owner) for key in keys if self._pages.has_states]
        return blocks + states

    def advance(self) -> list[tuple[Load, list[bytes]]]:
        """Continue loads and saves; returns the keys that loads lead no longer."""
        self._transfers.advance()
        why = "" if self.off or not self.loads else self._why_useless()
        if why:
            self.off = why
            logger.warning("the prefix store is switched off until the next start: %s", why)
            self._transfers.give_up_loads()
            released = self.cancel()
            for load in self.loads:
                load.found = None
            return released
        for record, pages, transfer in self._saves:
            if transfer.done:
                self._pages.drop(pages)
                self._count(record, -1)
        self._saves = [save for save in self._saves if not save[2].done]
        self.flushes = [flush for flush in self.flushes if not self._flush(flush)]
        released = []
        for load in [load for load in self.loads if not load.complete]:
            has_room = self._moving_states < MOVING_STATES
            if load.found is not None and load.found.done() and has_room:
                released.append((load, self._start(load, load.found.result())))
            if load.found is None and all(transfer.done for _, transfer in load.parts):
                released.append((load, load.keys))
                self._finish(load)
        if released:
            self._transfers.advance()  # begins what `_start` added
        return released

    def _why_useless(self) -> str:
        """Why the store is too slow to be used; empty: it is not."""
        if any(load.is_late for load in self.loads):
            return f"a load took longer than {LONGEST_S:.0f} s"
        return self.speed.why_too_slow()

    def cancel(self) -> list[tuple[Load, list[bytes]]]:
        """Let no load add blocks to the cache any more, and end all flushes; returns the keys that
        loads lead no longer. Their pages are free when their transfers have ended.
        """
        self.make_room()
        for flush in self.flushes:
            self._prefix.release(flush.chain)
        self.flushes = []
        released = []
        for load in self.loads:
            load.failed, load.reserved = True, 0
            self._prefix.release(load.chain)
            released.append((load, load.keys))
            load.keys = []
        return released

    def _start(self, load: Load, found: Sequence[bool]) -> list[bytes]:
        """Load the blocks up to the last one with a state; returns the keys of the others."""
        load.found, load.deadline = None, time.monotonic() + LONGEST_S
        stored, cached = load.num_stored(found), load.num_cached
        if stored < LEAST_BLOCKS or stored - cached > self._pages.free_blocks or load.failed:
            stored = 0
        missing, load.keys = load.keys[stored:], load.keys[:stored]
        load.reserved -= stored if load.reserved else 0
        if not stored:
            load.sequence.store_tries = MOST_TRIES
            return missing
        records = self._records(load.sequence, load.keys)
        self._moving_states += 1
        end = (load.first + stored) * self._prefix.block_tokens
        of_block = {group: group.pages_of_block for group in self._pages.full_groups}
        of_state = {group: len(group.state_pages(end)) for group in self._pages.windowed_groups}
        parts = [(record, of_block) for record in records[cached:stored]]
        if self._pages.has_states:
            parts.append((records[-1], of_state))
        for record, num_pages in parts:
            pages = self._pages.allocate_several(num_pages)
            load.parts.append((pages, self._transfers.load(record, pages)))
        return missing

    def _finish(self, load: Load) -> None:
        """Add the blocks to the prefix cache, unless a transfer failed."""
        load.failed = load.failed or any(transfer.failed for _, transfer in load.parts)
        if load.failed or not load.parts:
            for pages, _ in load.parts:
                self._pages.drop(pages)
            self._moving_states -= bool(load.parts)
            self._prefix.release(load.chain)
            self.loads.remove(load)
            return
        load.sequence.store_tries = MOST_TRIES
        new = load.keys[load.num_cached :]
        blocks, states = load.parts[: len(new)], load.parts[len(new) :]
        for key, (pages, _) in zip(new, blocks, strict=True):
            self._prefix.add_loaded(load.chain, key, pages, load.sequence.token_ids)
        for state, _ in states:
            self._prefix.add_loaded_state(load.chain[load.first + len(load.keys) - 1], state)
        self.counts.loads += 1
        self.counts.loaded_tokens += len(blocks) * self._prefix.block_tokens
        load.keys, load.parts, load.complete = [], [], True
        if not load.reserved:  # its sequence has ended
            self._release(load)
