"""Decides how many drafts a step's chunks verify, and how many new ones they get. No torch.

Drafts use free pages only: no sequence is preempted for a draft.
"""

from collections.abc import Sequence

from finwhale.engine.plan.draft_policy import DraftChooser
from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.sequences import Chunk, SequenceState


class DraftRules:
    """Sets the drafts of a step's chunks.

    Args:
        max_model_len: the most tokens of a sequence, drafts included.
        block_tokens: ModelConfig.draft_block_tokens.

    Attributes:
        chooser: chooses the number of drafts; None: no drafting.
        uniform: let all decodes get the same number of drafts, so that a captured step can run
            them, even if a sequence ends before it can use all of them.
    """

    def __init__(self, pages: PageManager, max_model_len: int, block_tokens: int = 0) -> None:
        self.chooser: DraftChooser | None = None
        self.uniform = False
        self._pages, self._max_model_len, self._block_tokens = pages, max_model_len, block_tokens

    @property
    def draft_tokens(self) -> int:
        """Number of drafts that a sequence gets in a step at present."""
        return 0 if self.chooser is None else self.chooser.kind.drafts

    def add_to_decodes(self, chunks: Sequence[Chunk], budget: int) -> None:
        """Let decodes verify drafts: at most `budget` in total."""
        if self.chooser is None:
            return
        limits = []
        for chunk in chunks:
            sequence = chunk.sequence
            most = min(len(sequence.drafts), budget, sequence.max_len - chunk.end - 1)
            if most > 0 and not self._try_allocate(sequence, chunk.start, chunk.end + most):
                most = 0
            limits.append(max(0, most))
            budget -= limits[-1]
        self._set_drafts(chunks, limits, unresolved=False)

    def add_proposals(self, chunks: Sequence[Chunk]) -> None:
        """Let chunks that complete their sequences get drafts after the step."""
        count = self.draft_tokens
        if not count:
            return
        uniform = self.uniform and all(
            chunk.decodes
            and self._try_allocate(chunk.sequence, chunk.start, self._with_drafts(chunk.end, count))
            for chunk in chunks
        )
        for chunk in chunks:
            if chunk.completes:
                chunk.propose = count if uniform else self._num_proposals(chunk)

    def schedule_ahead(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Schedule the next step of decodes while the number of their accepted drafts is unknown.

        Args:
            chunks: the decodes of the in-flight step.

        Returns:
            The next chunks. Empty: the step must wait for the result of the one in flight.
        """
        assert self.chooser is not None
        following, limits = [], []
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.start + 1
            if len(sequence.token_ids) + 1 >= sequence.max_len:
                continue  # The in-flight step samples this sequence's last token.
            # If all drafts are accepted, the chunk begins that many tokens later.
            latest = start + 1 + len(chunk.drafts) + chunk.propose
            if not self._try_allocate(sequence, start, latest):
                return []
            following.append(Chunk(sequence, start, start + 1, unresolved=True))
            limits.append(chunk.propose)
        if not following:
            return []
        accepted = {chunk.sequence.key: len(chunk.drafts) for chunk in chunks}
        self._set_drafts(following, limits, unresolved=True)
        for chunk in following:
            # The rows of the next drafts follow the chunk.
            end = self._with_drafts(chunk.end + accepted[chunk.sequence.key], self.draft_tokens)
            if not self._try_allocate(chunk.sequence, chunk.start, end):
                return []
            chunk.propose = self.draft_tokens
        return following

    def _set_drafts(
        self, chunks: Sequence[Chunk], limits: Sequence[int], *, unresolved: bool
    ) -> None:
        assert self.chooser is not None
        sequences = [chunk.sequence for chunk in chunks]
        counts = self.chooser.choose(sequences, limits, unresolved=unresolved)
        for chunk, count in zip(chunks, counts, strict=True):
            if count:
                drafts = (0,) * count if unresolved else tuple(chunk.sequence.drafts[:count])
                chunk.drafts = drafts
                chunk.end += count
                chunk.confidences = chunk.sequence.confidences
                chunk.stale_confidences = unresolved

    def _num_proposals(self, chunk: Chunk) -> int:
        """Number of drafts that a sequence can get after a step. Allocates pages for their rows."""
        sequence = chunk.sequence
        # A step adds the accepted drafts and one more token, in row `end` or before.
        most = min(sequence.max_len - chunk.known - 2, sequence.max_len - chunk.end + 1)
        count = min(self.draft_tokens, most)
        end = self._with_drafts(chunk.end, count)
        if end > chunk.end and not self._try_allocate(sequence, chunk.end, end):
            count = 0 if self._block_tokens else 1
        return max(0, count)

    def _try_allocate(self, sequence: SequenceState, start: int, end: int) -> bool:
        """Allocate the pages for tokens start..end-1 if enough are free; returns whether it did."""
        if end > self._max_model_len:
            return False
        if end > sequence.allocated_tokens:
            self._pages.trim(sequence.tables, sequence.num_computed)
            if not self._pages.fits(sequence.tables, end):
                return False
            sequence.allocated_tokens = self._pages.grow(sequence.tables, start, end, decodes=True)
        return True

    def _with_drafts(self, end: int, count: int) -> int:
        """The end of the rows that the draft head writes when it makes `count` drafts and the
        newest token is at `end`.
        """
        if count < 1:
            return end
        return end + (self._block_tokens or count - 1)
