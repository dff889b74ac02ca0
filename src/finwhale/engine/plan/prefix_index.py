"""The prefix cache: finds blocks of tokens that earlier sequences have computed. Pure Python.

The key of a block is a hash of its tokens and all tokens before them. A block has its pages in the
full groups, which keep every row. It may also have a *state*: the pages of the windowed groups that
a sequence needs to resume at the end of the block. If it computes all their rows again
(CacheGroup.rebuilt), every block has an empty state. Another state is larger than a block (it has
the window's rows of every layer), so the index evicts states separately. It first evicts states at
which no sequence is likely to resume. Then it evicts, least recently used first, lasting states: at
the end of a prompt, at the newest block of an output, where two prompts diverge, and where a
sequence has resumed before.
"""

import hashlib
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from finwhale.engine.plan.pages import BlockTable, BlockTables, PageManager

if TYPE_CHECKING:  # it imports torch
    from finwhale.models.cache import CacheGroup

KEY_BYTES = 16
State = Mapping[str, tuple[int, ...]]


@dataclass(slots=True, eq=False)
class Block:
    """One block of tokens, together with all blocks before it.

    Attributes:
        pages: pages of the full groups, by group name.
        users: number of running sequences that contain this block.
        state: pages of the windowed groups that a sequence needs to resume after this block; None:
            they are not cached.
        saved, state_saved: the store has the block, and its state, or is about to write them
            (stored_prefixes.py).
    """

    key: bytes
    parent: "Block | None"
    pages: State
    users: int = 0
    state: State | None = None
    saved: bool = False
    state_saved: bool = False


class CacheEvents(Protocol):
    """Is told which blocks are cached, and counts the events that it drops. No method may wait."""

    dropped: int

    def stored(self, block: Block, token_ids: Sequence[int]) -> None:
        """Called with the block's own tokens."""

    def removed(self, block: Block) -> None: ...
    def cleared(self) -> None: ...
    def close(self) -> None: ...


class PrefixIndex:
    """All cached blocks. Their pages stay cached until running sequences need the memory.

    The index evicts only blocks that no running sequence uses, least recently used first, and a
    block before its parent.

    Args:
        salt: a secret that all processes of a deployment share, so that the same tokens have the
            same keys in all of them. None: a random salt.

    Attributes:
        blocks: the cached blocks by key.
        events: is told of the changes; None: nobody is.
        num_evicted: number of blocks that were evicted because others needed their pages.
        num_saving: number of blocks whose pages are being copied, so eviction does not free them.
    """

    def __init__(self, pages: PageManager, salt: str | None = None) -> None:
        self.pages = pages
        self.block_tokens = pages.groups[0].block_tokens
        self.blocks: dict[bytes, Block] = {}
        self.events: CacheEvents | None = None
        self.num_evicted = self.num_saving = 0
        # The salt prevents an attacker from searching for two prompts with the same key.
        self.set_salt(salt)
        self._idle: OrderedDict[bytes, Block] = OrderedDict()
        self._passed: OrderedDict[bytes, Block] = OrderedDict()
        self._lasting: OrderedDict[bytes, Block] = OrderedDict()
        pages.reclaimer = self

    def set_salt(self, salt: str | None) -> None:
        """Give all later blocks other keys. None: a random salt."""
        secret = secrets.token_bytes(KEY_BYTES) if salt is None else salt.encode()
        self._salt = hashlib.blake2b(secret, digest_size=KEY_BYTES).digest()

    @property
    def num_idle(self) -> int:
        return max(0, len(self._idle) - self.num_saving)

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], owner: str = "") -> None:
        """Append the keys of the whole blocks of token_ids that `keys` does not have yet."""
        size = self.block_tokens
        parent = keys[-1] if keys else self.owner_key(owner)
        for end in range((len(keys) + 1) * size, len(token_ids) + 1, size):
            content = array("i", token_ids[end - size : end]).tobytes()
            parent = hashlib.blake2b(
                parent + content, digest_size=KEY_BYTES, key=self._salt
            ).digest()
            keys.append(parent)

    def owner_key(self, owner: str) -> bytes:
        """The parent key of a sequence's first block, which separates owners."""
        if not owner:
            return b""
        return hashlib.blake2b(
            owner.encode("utf-8", "surrogatepass"),
            digest_size=KEY_BYTES,
            key=self._salt,
            person=b"owner",
        ).digest()

    def match(self, keys: Iterable[bytes]) -> tuple[list[Block], int]:
        """Find the longest cached prefix.

        Returns:
            Its blocks, and the number of these blocks after which a sequence can resume.
        """
        known: list[Block] = []
        resumable = 0
        for key in keys:
            block = self.blocks.get(key)
            if block is None:
                break
            known.append(block)
            if block.state is not None:
                resumable = len(known)
        return known, resumable

    def adopt(self, blocks: Sequence[Block], tables: BlockTables) -> None:
        """Fill the tables of a new sequence so that it resumes after these blocks."""
        last = blocks[-1]
        assert last.state is not None
        end = len(blocks) * self.block_tokens
        for block in blocks:
            self._use(block)
        for group in self.pages.full_groups:
            table = tables[group.name] = BlockTable()
            table.pages.extend(page for block in blocks for page in block.pages[group.name])
        for group in self.pages.windowed_groups:
            first = group.state_pages(end).start
            tables[group.name] = BlockTable(first, list(last.state.get(group.name, ())))
        self.pages.hold({name: table.pages for name, table in tables.items()})
        self.pages.renew(tables)
        self._keep(last, lasting=True)

    def add(
        self, chain: list[Block], key: bytes, tables: BlockTables, token_ids: Sequence[int] = ()
    ) -> Block:
        """Append the block that a sequence has computed after `chain`, or its cached copy."""
        block = self.blocks.get(key)
        if block is None:
            block = self._insert(chain, key, self._pages_of(len(chain), tables), token_ids)
        elif not block.users:
            # Two copies of the same rows exist. Free the copy that no sequence uses.
            pages = self._pages_of(len(chain), tables)
            self.pages.drop(block.pages)
            block.pages = pages
        self.use(chain, block)
        return block

    def use(self, chain: list[Block], block: Block) -> None:
        """Append a cached block to `chain`, which `release` must get later."""
        self._use(block)
        chain.append(block)

    def _insert(
        self, chain: list[Block], key: bytes, pages: State, token_ids: Sequence[int]
    ) -> Block:
        block = Block(key, chain[-1] if chain else None, pages)
        if not self.pages.has_states:
            block.state = {}
        self.blocks[key] = self._idle[key] = block
        if self.events is not None:
            begin = len(chain) * self.block_tokens
            self.events.stored(block, token_ids[begin : begin + self.block_tokens])
        return block

    def add_loaded(
        self, chain: list[Block], key: bytes, pages: State, token_ids: Sequence[int] = ()
    ) -> None:
        """Append the block whose pages were loaded to `chain`, or its cached copy. The references
        of the pages become the index's.
        """
        block = self.blocks.get(key)
        if block is None:
            block = self._insert(chain, key, pages, token_ids)
            block.saved = True
        else:
            self.pages.drop(pages)
        self.use(chain, block)

    def add_loaded_state(self, block: Block, state: State) -> None:
        """Keep the state whose pages were loaded. Their references become the index's."""
        if block.state is None:
            block.state, block.state_saved = state, True
        else:
            self.pages.drop(state)
        self._keep(block, lasting=True)

    def add_state(self, block: Block, end: int, tables: BlockTables, *, lasting: bool) -> None:
        """Keep the state at the end of `block`, which is token `end`.

        Args:
            lasting: a sequence is likely to resume there, so the state is evicted late.
        """
        if block.state is None:
            state = {}
            for group in self.pages.windowed_groups:
                table, wanted = tables[group.name], group.state_pages(end)
                first = wanted.start - table.first
                pages = tuple(table.pages[first : first + len(wanted)])
                assert len(pages) == len(wanted) and all(pages)
                state[group.name] = pages
            self.pages.hold(state)
            block.state = state
        if lasting or block.key not in self._lasting:
            self._keep(block, lasting)

    def is_lasting(self, block: Block) -> bool:
        """Whether a sequence is likely to resume at the end of a block that has a state."""
        return block.key in self._lasting

    def evict_early(self, block: Block) -> None:
        """Make the state of a block one of the first to evict: no sequence is likely to resume."""
        if self._lasting.pop(block.key, None) is not None:
            self._passed[block.key] = block

    def release(self, chain: list[Block]) -> None:
        """Remove a sequence from the users of its blocks."""
        for block in reversed(chain):
            block.users -= 1
            if not block.users:
                self._idle[block.key] = block
        chain.clear()

    def clear(self) -> None:
        """Evict all blocks. No sequence may be using one."""
        events, self.events = self.events, None
        while self._idle:
            self._drop(self._idle.popitem(last=False)[1])
        assert not self.blocks
        self.events = events
        if events is not None:
            events.cleared()

    def reclaim(self, group: "CacheGroup") -> None:
        pool = self.pages.pools[group.name]
        while not pool.num_free:
            if group.keep is None:
                if not self._idle:
                    return
                self.num_evicted += 1
                self._drop(self._idle.popitem(last=False)[1])
            else:
                states = self._passed or self._lasting
                if not states:
                    return
                self._drop_state(next(iter(states.values())))

    def _pages_of(self, number: int, tables: BlockTables) -> State:
        """Reference and return the pages of a sequence's block number `number`."""
        pages = {}
        for group in self.pages.full_groups:
            count = group.pages_of_block
            pages[group.name] = tuple(
                tables[group.name].pages[number * count : (number + 1) * count]
            )
        self.pages.hold(pages)
        return pages

    def _use(self, block: Block) -> None:
        if not block.users:
            del self._idle[block.key]
        block.users += 1

    def _keep(self, block: Block, lasting: bool) -> None:
        if not block.state:
            return
        self._passed.pop(block.key, None)
        self._lasting.pop(block.key, None)
        (self._lasting if lasting else self._passed)[block.key] = block

    def _drop(self, block: Block) -> None:
        del self.blocks[block.key]
        if self.events is not None:
            self.events.removed(block)
        self._drop_state(block)
        self.pages.drop(block.pages)

    def _drop_state(self, block: Block) -> None:
        self._passed.pop(block.key, None)
        self._lasting.pop(block.key, None)
        if block.state is not None:
            self.pages.drop(block.state)
            block.state = None
