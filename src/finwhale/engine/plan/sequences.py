"""Sequences, and the parts of them that a step reads. Pure Python: no torch."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from finwhale.engine.plan.pages import BlockTables
from finwhale.engine.plan.prefix_index import Block
from finwhale.engine.plan.sampling import RequestSampling
from finwhale.engine.plan.step_plan import PENDING
from finwhale.request import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """One continuation of one prompt.

    Attributes:
        key: unique among living sequences.
        index: which of the request's n.
        token_ids: prompt, then output; PENDING where the id is not known yet.
        num_prompt: tokens of the prompt.
        max_len: tokens of prompt and output at most.
        priority: lower goes first.
        sampling: how its tokens are chosen; None: no token is chosen for it.
        slot: what step plans call it while it runs; -1: it does not run.
        num_computed: tokens whose state is in the cache.
        sampled_row: where its pending token stands among the ids that the device chose last.
        drafts: what the MTP layer expects after token_ids, to be verified.
        num_cached: tokens of the prompt that were found when it was first admitted; None: it was
            not yet.
        tables: its pages.
        running: whether it has pages.
        arrival: its place in line.
        room: tokens that it may have before it needs more pages.
        due: known tokens at which a block is complete, or pages of a prompt go back.
        keys: of its whole blocks.
        chain: the blocks that it uses.
        sharing: whether its blocks are entered.
        parted: tokens that it has in common with another, if it could not go on from there.
        newest: the last block of output that it completed.
    """

    key: str
    request_id: str
    index: int
    token_ids: list[int]
    num_prompt: int
    max_len: int
    params: SamplingParams
    priority: int = 0
    sampling: RequestSampling | None = None
    slot: int = -1
    num_computed: int = 0
    sampled_row: int = 0
    drafts: list[int] = field(default_factory=list)
    num_cached: int | None = None
    tables: BlockTables = field(default_factory=BlockTables)
    running: bool = False
    arrival: int = -1
    room: int = 0
    due: int = 0
    keys: list[bytes] = field(default_factory=list)
    chain: list[Block] = field(default_factory=list)
    sharing: bool = True
    parted: int = 0
    newest: Block | None = None

    @property
    def remaining(self) -> int:
        """Tokens to read before the next can be chosen."""
        return len(self.token_ids) - self.num_computed


@dataclass(slots=True)
class Chunk:
    """Tokens start..end-1 of a sequence, to be read in this step.

    Attributes:
        drafts: those of them behind token_ids, which the step verifies.
        propose: how many drafts the MTP layer makes after the step; there are pages for them.
        num_any: of the drafts, those that were not drafted: any tokens, for the number's sake.
        floats: the step before is not known yet: this one begins at `start` or as many tokens
            later as that has right drafts, and its drafts are on the device.
    """

    sequence: Sequence
    start: int
    end: int
    drafts: tuple[int, ...] = ()
    propose: int = 0
    num_any: int = 0
    floats: bool = False

    def land(self, num_accepted: int, drafts: Items[int]) -> None:
        """It is known now where it begins, and what its drafts are."""
        assert self.floats and len(drafts) == len(self.drafts)
        self.start += num_accepted
        self.end += num_accepted
        self.drafts = tuple(drafts)
        self.floats = False

    @property
    def known(self) -> int:
        """Where the drafts begin."""
        return self.end - len(self.drafts)

    @property
    def ids(self) -> list[int]:
        """Of its tokens, the drafts included."""
        if self.floats:
            return [0] * (self.end - self.start)
        ids = self.sequence.token_ids[self.start : self.known]
        return [*ids, *self.drafts] if self.drafts else ids

    @property
    def next_id(self) -> int:
        """The known token behind its last one."""
        return self.sequence.token_ids[self.known]

    @property
    def completes(self) -> bool:
        """Whether the last known token is read, so that its logits give the next."""
        return self.end - len(self.drafts) == len(self.sequence.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether it is a token that was generated, not the rest of a prompt."""
        return self.floats or (self.known == self.start + 1 and self.completes)

    @property
    def num_logits(self) -> int:
        """Rows of its logits that are wanted, its last ones."""
        return 1 + len(self.drafts) if self.completes else 0

    @property
    def pending(self) -> bool:
        """Whether the id of its last token is still on the device."""
        return self.sequence.token_ids[self.end - len(self.drafts) - 1] == PENDING
