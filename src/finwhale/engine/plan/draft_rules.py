"""Decides how many drafts the chunks of a step verify, and how many they get. No torch.

Drafts use free pages only: no sequence is preempted for a draft.
"""

from collections.abc import Sequence as Items

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.sequences import Chunk, Sequence


class DraftRules:
    """Adds drafts to a step's chunks.

    Args:
        max_model_len: the most tokens of a sequence, drafts included.
        block_tokens: ModelConfig.draft_block_tokens.

    Attributes:
        draft_tokens: the most drafts of a sequence; 0: no drafting.
        uniform: give all decodes the same number of drafts, so that a captured step can run them.
            Placeholder drafts fill up.
    """

    def __init__(self, pages: PageManager, max_model_len: int, block_tokens: int = 0) -> None:
        self.draft_tokens = 0
        self.uniform = False
        self._pages, self._max_model_len, self._block_tokens = pages, max_model_len, block_tokens

    def add_to_decodes(self, chunks: list[Chunk], budget: int) -> None:
        """Let decodes verify drafts: at most `budget` in total."""
        if self.draft_tokens and not (self.uniform and self._add_uniform(chunks, budget)):
            self._add_available(chunks, budget)

    def add_proposals(self, chunks: Items[Chunk]) -> None:
        """Let chunks that complete their sequences get drafts after the step."""
        if self.draft_tokens:
            for chunk in chunks:
                if chunk.completes and not chunk.propose:
                    chunk.propose = self._num_proposals(chunk)

    def schedule_ahead(self, chunks: Items[Chunk]) -> list[Chunk]:
        """Schedule the next step of decodes while the number of their accepted drafts is unknown.

        Args:
            chunks: the decodes of the in-flight step, all with the same number of drafts.

        Returns:
            The next chunks. Empty: the step must wait for the result of the one in flight.
        """
        count = len(chunks[0].drafts)
        if count != self.draft_tokens:
            return []
        following = []
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.start + 1
            if len(sequence.token_ids) + 1 >= sequence.max_len:
                continue  # The in-flight step samples this sequence's last token.
            # If all drafts are accepted, the chunk begins `count` tokens later. Rows for the next
            # drafts follow it.
            end = start + 1 + count
            if not self._has_room(sequence, start, self._with_drafts(end + count, count)):
                return []
            following.append(Chunk(sequence, start, end, (0,) * count, count, floats=True))
        return following

    def _add_uniform(self, chunks: list[Chunk], budget: int) -> bool:
        """Let all decodes verify and get the same number of drafts; False: there is no room.

        A sequence with fewer drafts verifies placeholders too: arbitrary tokens that may be right.
        """
        count = self.draft_tokens
        if count * len(chunks) > budget:
            return False
        for chunk in chunks:
            if not self._has_room(
                chunk.sequence, chunk.start, self._with_drafts(chunk.end + count, count)
            ):
                return False
        for chunk in chunks:
            drafts = chunk.sequence.drafts[:count]
            chunk.num_placeholders = count - len(drafts)
            chunk.drafts = (*drafts, *[0] * chunk.num_placeholders)
            chunk.end += count
            chunk.propose = count
        return True

    def _add_available(self, chunks: list[Chunk], budget: int) -> None:
        """Let decodes verify the drafts that they have, as far as budget and pages allow."""
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
        """Number of drafts that a sequence can get after a step. Allocates pages for their rows."""
        sequence = chunk.sequence
        # A step gives one token more than it accepts drafts. It lies in row `end` at most.
        most = min(sequence.max_len - chunk.known - 2, sequence.max_len - chunk.end + 1)
        count = min(self.draft_tokens, most)
        end = self._with_drafts(chunk.end, count)
        if end > chunk.end and not self._has_room(sequence, chunk.end, end):
            count = 0 if self._block_tokens else 1
        return max(0, count)

    def _has_room(self, sequence: Sequence, start: int, end: int) -> bool:
        """Allocate the pages for tokens start..end-1 if enough are free; returns whether it did."""
        if end > self._max_model_len:
            return False
        if end > sequence.room:
            self._pages.trim(sequence.tables, sequence.num_computed)
            if not self._pages.fits(sequence.tables, end):
                return False
            sequence.room = self._pages.grow(sequence.tables, start, end, decodes=True)
        return True

    def _with_drafts(self, end: int, count: int) -> int:
        """The end of the rows that the draft head writes when it makes `count` drafts and the
        newest token is at `end`.
        """
        if count < 1:
            return end
        return end + (self._block_tokens or count - 1)
