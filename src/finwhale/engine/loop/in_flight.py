"""Running sequences, and the steps that were launched for them and whose tokens are not known."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from finwhale.chat.detokenizer import Detokenizer
from finwhale.engine.loop.metrics import Clock
from finwhale.engine.loop.stop_strings import StopChecker
from finwhale.engine.plan.sequences import Chunk
from finwhale.engine.plan.sequences import Sequence as RunningSequence
from finwhale.engine.rank.host_transfer import Arrival, Instant
from finwhale.engine.rank.sampler import Sampling
from finwhale.request import CompletionOutput, RequestOutput


@dataclass(slots=True)
class Stream:
    """The text side of one running sequence.

    Attributes:
        ends: token ids that end it.
        stop_after: stop strings are looked for once this has been generated; None: from the start.
        needs_history: the host must know all of its tokens before the next is chosen.
    """

    sequence: RunningSequence
    request: "Request"
    output: CompletionOutput
    ends: frozenset[int]
    detokenizer: Detokenizer | None
    stop: StopChecker | None
    stop_after: int | None
    clock: Clock
    needs_history: bool
    ended: bool = False

    def read(self, detokenizer: Detokenizer, token_id: int) -> bool:
        """Add a token's text to the output; whether a stop string ends it here."""
        text, stop, output = detokenizer.next(token_id), self.stop, self.output
        if self.stop_after is not None:
            if token_id == self.stop_after:
                self.stop_after = None
        elif stop is not None:
            text = stop.feed(text)
        # The only reference to a text: the interpreter appends in place, however long it is.
        whole, output.text = output.text, ""
        whole += text
        output.text = whole
        return stop is not None and stop.matched is not None

    def close(self) -> None:
        """Add the text that was held back."""
        if self.detokenizer is not None:
            if self.stop is None:
                self.output.text += self.detokenizer.finish()
            elif self.stop.matched is None:
                self.output.text += self.stop.flush() + self.detokenizer.finish()


@dataclass(slots=True)
class Request:
    output: RequestOutput
    unfinished: int


class Rows:
    """Who gets a token in a step, row by row; often the same for many steps.

    Attributes:
        sequences, streams, keys: one a row.
        historic: the streams that need their history.
        outputs: of their requests, each once.
    """

    __slots__ = ("historic", "keys", "outputs", "sequences", "streams")

    def __init__(self, streams: list[Stream]) -> None:
        self.streams = streams
        self.sequences = [stream.sequence for stream in streams]
        self.keys = [sequence.key for sequence in self.sequences]
        self.historic = [stream for stream in streams if stream.needs_history]
        outputs = {stream.sequence.request_id: stream.request.output for stream in streams}
        self.outputs = list(outputs.values())


@dataclass(slots=True)
class Flight:
    """A step that was launched and whose tokens are not known yet.

    Attributes:
        rows: who gets a token.
        places: where in each one's token_ids it will stand.
        logits: [M,V] until tokens are chosen from them.
        sampling: the tokens.
        chunks: of the streams, where the engine drafts; then places are not used.
        proposed: their next drafts, [B,K] for those chunks that have any.
        instants: before the forward, after the choice, after the drafts.
        alike: all decode with as many drafts, and the next step may go on from it on the device.
        followed: that was tried.
    """

    rows: Rows
    places: list[int]
    logits: Tensor | None
    sampling: Sampling | None = None
    chunks: Sequence[Chunk] = ()
    proposed: Arrival | None = None
    instants: Sequence[Instant] = ()
    alike: bool = False
    followed: bool = False

    @property
    def undecided(self) -> bool:
        return self.logits is not None

    def drop_ended(self) -> list[int] | None:
        """Leave out the streams that have ended; the rows of the others, None: all are left."""
        streams = self.rows.streams
        left = [row for row, stream in enumerate(streams) if not stream.ended]
        if len(left) == len(streams):
            return None
        self.rows = Rows([streams[row] for row in left])
        self.places = [self.places[row] for row in left]
        return left
