"""Text output of unfinished sequences, and in-flight steps: launched steps with unknown tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from finwhale.chat.detokenizer import Detokenizer
from finwhale.chat.stop_strings import StopChecker
from finwhale.engine.loop.metrics import Clock
from finwhale.engine.loop.routed_experts import ExpertRecord
from finwhale.engine.plan.draft_policy import NO_DRAFTS, StepKind
from finwhale.engine.plan.executor import PendingResult, PromptScores
from finwhale.engine.plan.sampling import History
from finwhale.engine.plan.sequences import Chunk, SequenceState
from finwhale.request import CompletionOutput, ExpertIds, RequestOutput


@dataclass(slots=True)
class TextStream:
    """One unfinished sequence and its text output.

    Attributes:
        ends: token ids that end the sequence.
        stop_after: look for stop strings only after this token; None: from the start.
        ended: the sequence gets no more tokens.
        routed: the routed experts of its tokens so far; None: the request wants none.
    """

    sequence: SequenceState
    request: "Request"
    output: CompletionOutput
    ends: frozenset[int]
    detokenizer: Detokenizer | None
    stop: StopChecker | None
    stop_after: int | None
    clock: Clock
    ended: bool = False
    routed: ExpertRecord | None = None

    def add_token(self, detokenizer: Detokenizer, token_id: int) -> bool:
        """Add a token's text to the output; returns whether a stop string ends the text here."""
        text, stop, output = detokenizer.next(token_id), self.stop, self.output
        if self.stop_after is not None:
            if token_id == self.stop_after:
                self.stop_after = None
        elif stop is not None and len(output.token_ids) > self.sequence.params.min_tokens:
            text = stop.feed(text)
        # Keep only one reference to the text, so that the interpreter appends in place.
        whole, output.text = output.text, ""
        whole += text
        output.text = whole
        return stop is not None and stop.matched is not None

    def close(self) -> None:
        """Add the text that the stop-string check held back."""
        if self.detokenizer is not None:
            if self.stop is None:
                self.output.text += self.detokenizer.finish()
            elif self.stop.matched is None:
                self.output.text += self.stop.flush() + self.detokenizer.finish()


@dataclass(slots=True)
class Request:
    """An unfinished request.

    Attributes:
        work: the work that it gives its lane (lanes.py).
        unfinished: number of its sequences that have not ended.
        first: continuation 0.
    """

    output: RequestOutput
    work: int = 0
    unfinished: int = 0
    first: SequenceState | None = None


class Rows:
    """The sequences that get tokens in a step, in order. Many steps share one object.

    Attributes:
        sequences, streams: one for each row.
        random_rows: the rows that need random draws, because they are not greedy.
        history_rows: the rows whose sampling needs the previous tokens (penalties, grammars,
            min_tokens).
        outputs: the output of each request that has a row.
    """

    __slots__ = ("history_rows", "outputs", "random_rows", "sequences", "streams")

    def __init__(self, streams: list[TextStream]) -> None:
        self.streams = streams
        self.sequences = [stream.sequence for stream in streams]
        self.random_rows: list[int] = []
        self.history_rows: list[int] = []
        for row, sequence in enumerate(self.sequences):
            assert sequence.sampling is not None
            if not sequence.sampling.settings.greedy:
                self.random_rows.append(row)
            if sequence.sampling.history.needed:
                self.history_rows.append(row)
        outputs = {stream.sequence.request_id: stream.request.output for stream in streams}
        self.outputs = list(outputs.values())

    @property
    def outdated(self) -> bool:
        """Whether one of `history_rows` no longer needs the previous tokens: it has min_tokens."""
        sampling = [self.sequences[row].sampling for row in self.history_rows]
        return not all(each is not None and each.history.needed for each in sampling)


@dataclass(slots=True)
class InFlightStep:
    """A launched step whose tokens are not known yet.

    Attributes:
        token_indices: for each row, the index of its (first) new token in token_ids.
        result: the pending result; None: sampling is not launched yet.
        planned: all chunks of the step.
        scores: log-probabilities of prompt tokens, once the step has been collected.
        routed: the routed experts of the step's tokens, once it has been collected; None: no
            sequence wants them.
        chunks: the rows' chunks.
        histories: the history of each row of logits; empty if no row needs one.
        kind: the kind of decode step, in an engine that drafts.
        began: time of the launch (time.monotonic()), in an engine that drafts.
        on_device: the next step may continue from this one on the device.
        followed: the engine has tried to launch that next step.
    """

    rows: Rows
    token_indices: list[int]
    result: PendingResult | None = None
    planned: Sequence[Chunk] = ()
    scores: Sequence[PromptScores] = ()
    routed: ExpertIds | None = None
    chunks: Sequence[Chunk] = ()
    histories: list[History] = field(default_factory=list)
    kind: StepKind = NO_DRAFTS
    began: float = 0.0
    on_device: bool = False
    followed: bool = False

    def drop_ended(self) -> list[int] | None:
        """Remove the sequences that have ended; returns the remaining rows, None: all of them."""
        streams = self.rows.streams
        left = [row for row, stream in enumerate(streams) if not stream.ended]
        if len(left) == len(streams):
            return None
        self.rows = Rows([streams[row] for row in left])
        self.token_indices = [self.token_indices[row] for row in left]
        self.chunks = [self.chunks[row] for row in left]
        return left
