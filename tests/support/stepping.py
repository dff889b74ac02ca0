"""A stepper that also prefills several texts, and moves sequences to other pages."""

from collections.abc import Sequence

from finwhale.engine.loop.engine import Engine
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.engine.ranks.local_executor import LocalExecutor
from finwhale.engine.ranks.ranks import first_rank
from tools import stepping


class Stepper(stepping.Stepper):
    """A stepper of an engine on one rank, or of one rank of an engine without cached prefixes."""

    def __init__(self, engine: Engine | LocalExecutor) -> None:
        self._engine = engine if isinstance(engine, Engine) else None
        assert self._engine is None or not self._engine.has_work
        super().__init__(
            engine if isinstance(engine, LocalExecutor) else first_rank(engine.executor)
        )

    def sequence(self, token_ids: Sequence[int]) -> SequenceState:
        if self._engine is not None:
            # The engine's cached prefixes use the same pages, so free them.
            self._engine.reset_prefix_cache()
        return super().sequence(token_ids)

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
