"""The step loop of an engine that does not draft: a step gives each sequence one token.

If sampling needs the previous tokens (penalties, grammars, min_tokens), the loop still launches the
forward one step ahead. Only the sampling waits until the host knows these tokens.
"""

import time
from collections.abc import Mapping, Sequence

from finwhale.engine.loop.in_flight import InFlightStep, Rows, TextStream
from finwhale.engine.loop.metrics import Meter
from finwhale.engine.loop.sampled_tokens import TokenReader
from finwhale.engine.loop.step_loop import Launcher, NewToken
from finwhale.engine.plan.step_plan import PENDING
from finwhale.engine.plan.step_planner import SamplingInputs


class PlainLoop:
    """Launches and collects the steps of an engine that does not draft (StepLoop)."""

    def __init__(self, launcher: Launcher, meter: Meter) -> None:
        self._launcher, self._meter = launcher, meter
        self._reader = TokenReader()
        self.drop_rows()

    def drop_rows(self) -> None:
        # The rows of the last step, and the rows whose sampled tokens are still on the device.
        self._rows = self._on_device = Rows([])

    def launch(
        self, streams: Mapping[str, TextStream], in_flight: Sequence[InFlightStep]
    ) -> InFlightStep | None:
        scheduler = self._launcher.scheduler
        chunks = scheduler.schedule()
        if not chunks:
            return None
        complete = [c.sequence for c in chunks if c.end == len(c.sequence.token_ids)]
        if complete != self._rows.sequences or self._rows.outdated:
            self._rows = Rows([streams[s.key] for s in complete])
        rows = self._rows
        step = InFlightStep(rows, [len(s.token_ids) for s in complete], planned=chunks)
        if rows.history_rows:
            # The host computes the masks while the forward runs.
            self._launcher.launch(chunks, None)
            if not any(complete[row].token_ids[-1] == PENDING for row in rows.history_rows):
                self._sample(step)
        else:
            step.result = self._launcher.launch(chunks, _sampling_inputs(step))
            self._set_on_device(rows)
        # On a GPU this step is still running. Other sequences may get the pages freed here, because
        # their kernels are launched later on the same CUDA stream.
        scheduler.record_computed(chunks)
        for sequence in complete:
            sequence.token_ids.append(PENDING)
        return step

    def _sample(self, step: InFlightStep) -> None:
        """Launch the sampling of a step's tokens, except for sequences that have ended since."""
        left = step.drop_ended()
        slots = tuple([s.slot for s in step.rows.sequences])
        step.result = self._launcher.sample(slots, _sampling_inputs(step), left)
        self._set_on_device(step.rows)

    def _set_on_device(self, rows: Rows) -> None:
        """Record that the sampled tokens of these rows stay on the device for the next step."""
        if rows.sequences and rows is not self._on_device:
            self._on_device = rows
            for row, sequence in enumerate(rows.sequences):
                sequence.sampled_row = row

    def collect(self, step: InFlightStep, later: Sequence[InFlightStep]) -> list[NewToken]:
        assert step.result is not None
        rows, result = step.rows, step.result.wait()
        step.scores, step.routed = result.scored, result.routed
        histories = rows.histories
        tokens = self._reader.read(result, rows.sequences, histories)
        for history, token in zip(histories, tokens, strict=False):
            if token.error is None:
                history.accept(token.token_id)
        # If a sequence ended while this step was in flight, discard the step's token for it.
        left = step.drop_ended()
        if left is not None:
            tokens = [tokens[row] for row in left]
        streams = step.rows.streams
        pairs = zip(streams, tokens, strict=True)
        self._meter.record_step(
            [s.clock for s, token in pairs if token.error is None], time.monotonic()
        )
        return list(zip(streams, step.token_indices, tokens, strict=True))

    def record_appended(self) -> None:
        """Do nothing: the engine appends every token of a plain step."""

    def sample_waiting(self, in_flight: Sequence[InFlightStep]) -> None:
        if in_flight and in_flight[0].result is None:
            self._sample(in_flight[0])


def _sampling_inputs(step: InFlightStep) -> SamplingInputs:
    sequences, token_indices = step.rows.sequences, step.token_indices
    positions = [token_indices[row] - sequences[row].num_prompt for row in step.rows.random_rows]
    return SamplingInputs(positions, step.rows.histories)
