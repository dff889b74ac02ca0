"""How many drafts the chunks of a step verify and get. Pure Python: no torch.

No sequence is preempted for a draft: a draft needs free pages.
"""

from collections.abc import Sequence as Items

from finwhale.engine.plan.pages import PageManager
from finwhale.engine.plan.sequences import Chunk, Sequence


class DraftRules:
    """Adds drafts to a step's chunks.

    Args:
        max_model_len: no token stands further back, drafts included.

    Attributes:
        draft_tokens: how many drafts a sequence may have; 0: none.
        alike: give all decodes the same number of drafts, real or not, so that a captured step
            serves them.
    """

    def __init__(self, pages: PageManager, max_model_len: int) -> None:
        self.draft_tokens = 0
        self.alike = False
        self._pages, self._max_model_len = pages, max_model_len

    def add_to_decodes(self, chunks: list[Chunk], budget: int) -> None:
        """Let decodes verify drafts, at most `budget` together."""
        if self.draft_tokens and not (self.alike and self._add_alike(chunks, budget)):
            self._add_some(chunks, budget)

    def add_proposals(self, chunks: Items[Chunk]) -> None:
        """Let the chunks that complete their sequences get drafts."""
        if self.draft_tokens:
            for chunk in chunks:
                if chunk.completes and not chunk.propose:
                    chunk.propose = self._num_proposals(chunk)

    def again(self, chunks: Items[Chunk]) -> list[Chunk]:
        """The same decodes' next step, before it is known how many tokens `chunks` give.

        All have the same number of drafts. Empty: the step must wait until that is known.
        """
        count = len(chunks[0].drafts)
        if count != self.draft_tokens:
            return []
        following = []
        for chunk in chunks:
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
        """Let all decodes verify and get the same number of drafts; False: there is no room.

        A sequence that was drafted fewer verifies arbitrary tokens, which may even be right.
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

    def _add_some(self, chunks: list[Chunk], budget: int) -> None:
        """Let decodes verify what was drafted for them."""
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
        """How many drafts there can be after a step. Allocates pages for their MTP rows."""
        sequence = chunk.sequence
        # The step gives at least one token, and a verification one more than it accepts. All
        # drafts but the last are read: the first as row `end` at most.
        most = min(sequence.max_len - chunk.known - 2, sequence.max_len - chunk.end + 1)
        count = min(self.draft_tokens, most)
        if count > 1 and not self._has_room(sequence, chunk.end, chunk.end + count - 1):
            count = 1
        return max(0, count)

    def _has_room(self, sequence: Sequence, start: int, end: int) -> bool:
        """Allocate the pages for tokens start..end-1 if that preempts no sequence."""
        if end > self._max_model_len:
            return False
        if end > sequence.room:
            self._pages.trim(sequence.tables, sequence.num_computed)
            if not self._pages.fits(sequence.tables, end):
                return False
            sequence.room = self._pages.grow(sequence.tables, start, end, decodes=True)
        return True


def _with_guesses(end: int, count: int) -> int:
    """Where the rows end that guesses of `count` drafts behind a step's last token take."""
    return end + max(0, count - 1)
