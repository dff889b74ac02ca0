"""A lane: the requests that share one cache, and the steps that compute their tokens.

An engine has one lane, or one for each of its data-parallel ranks. A lane has a scheduler, pages
and a prefix cache of its own, and knows nothing of the others.
"""

import ctypes
from collections import deque
from collections.abc import Sequence

from finwhale.engine.loop.in_flight import InFlightStep
from finwhale.engine.loop.launching import Launcher
from finwhale.engine.loop.outputs import Outputs
from finwhale.engine.loop.results import Results
from finwhale.engine.plan.scheduler import Scheduler
from finwhale.engine.plan.sequences import Chunk
from finwhale.request import RequestOutput

# A sequence's output counts as much work as this many tokens of a prompt.
OUTPUT_WORK = 1024


class Lane:
    """One lane of an engine.

    Attributes:
        in_flight: the launched steps whose tokens are not known yet, oldest first.
    """

    def __init__(
        self, scheduler: Scheduler, launcher: Launcher, results: Results, outputs: Outputs
    ) -> None:
        self.scheduler, self.outputs = scheduler, outputs
        self.launcher, self.results = launcher, results
        self.in_flight: deque[InFlightStep] = deque()

    @property
    def has_work(self) -> bool:
        moves = self.scheduler.admission.moves_prefixes
        return self.scheduler.has_work or moves or bool(self.outputs.touched)

    def cached_tokens(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's tokens this lane has, given the keys of the prompt's blocks."""
        prefix = self.scheduler.prefix
        return 0 if prefix is None else prefix.match(keys)[1] * prefix.block_tokens

    def launch(self, chunks: Sequence[Chunk], *, on_device: bool) -> InFlightStep:
        """Launch the step after those in flight (Launcher.launch)."""
        launch, streams, follows = self.launcher.launch, self.outputs.streams, bool(self.in_flight)
        step = launch(chunks, streams, on_device=on_device, follows=follows)
        self.in_flight.append(step)
        return step

    def collect(self) -> list[RequestOutput]:
        """Wait for the tokens of the oldest in-flight step, and append them to their requests;
        returns the requests that changed.
        """
        step, *later = self.in_flight
        tokens = self.results.read(step, later)
        self.in_flight.popleft()
        touched = self.outputs.record(step, tokens)
        self.results.record_appended()
        self.discard_if_idle()
        self.launcher.sample_waiting(self.in_flight)
        return touched

    def discard_if_idle(self) -> None:
        """If no sequence remains, discard the steps still in flight."""
        if not self.outputs.streams:
            self.in_flight.clear()
            self.launcher.drop_rows()

    def abandon(self) -> None:
        """Keep the in-flight steps as long as the process lives: freeing a step of a failed device
        would end it.
        """
        for step in self.in_flight:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(step))
        self.in_flight.clear()

    def close(self) -> None:
        """Close what the scheduler tells of its cache."""
        stored, prefix = self.scheduler.admission.stored, self.scheduler.prefix
        if stored is not None:
            stored.close()
        if prefix is not None and prefix.events is not None:
            prefix.events.close()
            prefix.events = None


def choose_lane(
    lanes: Sequence[Lane], prompt: Sequence[int], owner: str, count: int
) -> tuple[Lane, int]:
    """The lane that would have the least work with a request of `count` continuations, and the
    request's work there. Of a long prompt, a cached prefix decides.
    """
    if len(lanes) == 1:
        return lanes[0], 0
    keys: list[bytes] = []
    if (prefix := lanes[0].scheduler.prefix) is not None:
        prefix.extend_keys(keys, prompt[:-1], owner)  # all lanes have one salt
    most = len(prompt) + count * OUTPUT_WORK
    works = [most - lane.cached_tokens(keys) for lane in lanes]
    index = min(range(len(lanes)), key=lambda i: lanes[i].outputs.work + works[i])
    return lanes[index], works[index]
