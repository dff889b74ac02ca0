"""Sequences, and the chunks of them that a step computes. Pure Python: no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from finwhale.engine.plan.pages import BlockTables
from finwhale.engine.plan.prefix_index import Block
from finwhale.engine.plan.sampling import RequestSampling
from finwhale.engine.plan.step_plan import PENDING, PromptBounds
from finwhale.request import SamplingParams


@dataclass(slots=True, eq=False, weakref_slot=True)
class SequenceState:
    """One continuation of one prompt: its tokens, its pages and its place in the schedule.

    Attributes:
        key: unique among living sequences.
        index: index among the request's n continuations.
        token_ids: prompt, then output; PENDING where the host does not know the id yet.
        num_prompt: number of prompt tokens.
        max_len: the most tokens of prompt and output together.
        priority: sequences with a lower value run first.
        sampling: sampling settings; None: the sequence gets no tokens.
        slot: the sequence's number in step plans while it runs; -1: it does not run.
        num_computed: number of tokens whose state is in the cache.
        sampled_row: row of its pending token among the ids that the device sampled last.
        drafts: the draft head's drafts after token_ids, not verified yet.
        confidences: the head's confidences in the last drafts that the host knows (Drafts); empty:
            it has none.
        num_cached: number of prompt tokens that the prefix cache had at the first admission; None:
            the sequence was never admitted.
        bounds: of its prompt since the last admission; None: the model does not need them.
        admitted: time of the first admission (time.monotonic()).
        tables: the sequence's pages.
        running: whether the sequence has pages.
        arrival: position in the order of arrival.
        allocated_tokens: the most tokens for which the sequence's pages are enough.
        next_bookkeeping: number of known tokens at which the sequence completes a block for the
            prefix cache, or no longer needs some pages of its prompt.
        prefix_owner: only sequences of the same owner share cached prefixes.
        keys: prefix-cache keys of its complete blocks.
        blocks: the cached blocks that it uses.
        sharing: whether the scheduler adds its blocks to the prefix cache.
        shared_until: number of tokens in common with cached blocks, if it could not resume there.
        last_output_block: the last block of output that it completed.
        saves_first: the answer waits until the store has its blocks (StoredPrefixes.Flush).
        store_tries: number of times that the store was asked for its blocks (stored_prefixes.py).
        prompt_logprobs: number of most likely tokens to return with each prompt token's
            log-probability, while some are missing. Such a sequence computes its whole prompt,
            without cached prefixes. None: none are missing.
        num_routed: number of first tokens whose routed experts the host has or does not want; the
            sequence computes all later ones. None: it wants none.
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
    confidences: Sequence[float] = ()
    num_cached: int | None = None
    bounds: PromptBounds | None = None
    admitted: float = 0.0
    tables: BlockTables = field(default_factory=BlockTables)
    running: bool = False
    arrival: int = -1
    allocated_tokens: int = 0
    next_bookkeeping: int = 0
    prefix_owner: str = ""
    keys: list[bytes] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    sharing: bool = True
    shared_until: int = 0
    last_output_block: Block | None = None
    saves_first: bool = False
    store_tries: int = 0
    prompt_logprobs: int | None = None
    num_routed: int | None = None

    @property
    def num_reusable(self) -> int:
        """The most tokens that cached prefixes may provide."""
        if self.prompt_logprobs is not None:
            return 0  # a cached prefix has no logits
        # The last token is always computed, because its logits give the next token.
        most = len(self.token_ids) - 1
        return most if self.num_routed is None else min(most, self.num_routed)

    @property
    def remaining(self) -> int:
        """Number of tokens to compute before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed


@dataclass(slots=True)
class Chunk:
    """Tokens start..end-1 of a sequence, which one step computes.

    Attributes:
        drafts: the chunk's last tokens, which come after token_ids and which the step verifies.
        propose: number of drafts that the draft head makes after the step; they have pages.
        unresolved: the result of the previous step is not known yet. The chunk begins at `start`
            plus the number of drafts that the previous step accepts, and its drafts are on the
            device.
        confidences: the confidences from which the number of drafts was chosen.
        stale_confidences: `confidences` are those of the previous drafts, not of the chunk's.
    """

    sequence: SequenceState
    start: int
    end: int
    drafts: tuple[int, ...] = ()
    propose: int = 0
    unresolved: bool = False
    confidences: Sequence[float] = ()
    stale_confidences: bool = False

    def resolve(self, num_accepted: int, drafts: Sequence[int]) -> None:
        """Set the start and the drafts of an unresolved chunk once the host knows them."""
        assert self.unresolved and len(drafts) >= len(self.drafts)
        self.start += num_accepted
        self.end += num_accepted
        self.drafts = tuple(drafts[: len(self.drafts)])
        self.unresolved = False

    @property
    def known(self) -> int:
        """Position of the first draft."""
        return self.end - len(self.drafts)

    @property
    def num_known(self) -> int:
        """Number of the chunk's tokens without drafts: 1 in a decode. It stays the same when the
        step's tokens are appended.
        """
        return self.known - self.start

    @property
    def ids(self) -> list[int]:
        """Ids of the chunk's tokens, drafts included; zeros while the chunk is unresolved."""
        if self.unresolved:
            return [0] * (self.end - self.start)
        ids = self.sequence.token_ids[self.start : self.known]
        return [*ids, *self.drafts] if self.drafts else ids

    @property
    def next_id(self) -> int:
        """Id of the first token after the chunk, which must be known."""
        return self.sequence.token_ids[self.known]

    @property
    def completes(self) -> bool:
        """Whether the chunk has the last known token, whose logits give the next token."""
        return self.end - len(self.drafts) == len(self.sequence.token_ids)

    @property
    def decodes(self) -> bool:
        """Whether the chunk is a decode: one known token, the sequence's last, and its drafts."""
        return self.unresolved or (self.num_known == 1 and self.completes)

    @property
    def num_logits(self) -> int:
        """Number of the chunk's last tokens whose logits the step computes."""
        return 1 + len(self.drafts) if self.completes else 0

    @property
    def scored_ids(self) -> list[int]:
        """The prompt tokens after the chunk's tokens, if their log-probabilities are wanted."""
        sequence = self.sequence
        if sequence.prompt_logprobs is None:
            return []
        return sequence.token_ids[self.start + 1 : min(self.end + 1, sequence.num_prompt)]

    @property
    def pending(self) -> bool:
        """Whether only the device knows the id of the chunk's last token before the drafts."""
        return self.sequence.token_ids[self.end - len(self.drafts) - 1] == PENDING
