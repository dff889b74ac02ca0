"""A stepper that also prefills several texts, and moves sequences to other pages."""

from collections.abc import Sequence

from finwhale.bench import stepping
from finwhale.engine.plan.sequences import Chunk, SequenceState


class Stepper(stepping.Stepper):
    def prefilled(self, texts: Sequence[Sequence[int]]) -> list[Chunk]:
        """Prefill each text without its last token. Returns chunks that decode the last tokens."""
        chunks = []
        for token_ids in texts:
            sequence, end = self.sequence(token_ids), len(token_ids)
            if end > 1:
                self.step([(sequence, end - 1)])
            self.pages.grow(sequence.tables, end - 1, end)
            chunks.append(Chunk(sequence, end - 1, end))
        return chunks

    def moved(self, sequence: SequenceState) -> SequenceState:
        """Move the sequence to other pages: copy the bytes page by page, overwrite every byte of
        the old pages, and release `sequence`.
        """
        end = sequence.num_computed
        other = self.sequence(sequence.token_ids)
        self.pages.grow(other.tables, 0, end)
        self.pages.trim(other.tables, end)
        for name, pages in self.runner.cache.pages.items():
            old, new = sequence.tables[name], other.tables[name]
            assert old.first == new.first
            for source, target in zip(old.pages, new.pages, strict=True):
                assert bool(source) == bool(target) and (source != target or not source)
                if source:
                    pages[target] = pages[source]
                    pages[source] = 255  # values become NaN
        other.num_computed = end
        self.release(sequence)
        return other
