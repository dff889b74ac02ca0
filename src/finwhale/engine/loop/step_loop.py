"""One step of the engine after the other, with the overlap of host and device."""

from collections import deque
from collections.abc import Callable, Sequence

from finwhale.engine.loop.in_flight import InFlightStep
from finwhale.engine.loop.lanes import Lane
from finwhale.engine.plan.prefill_turns import PrefillTurns
from finwhale.engine.plan.sequences import Chunk
from finwhale.request import RequestOutput


class StepLoop:
    """The steps of one engine.

    On a GPU, the host works one step ahead. While the device runs step n, one call of `launch` and
    one of `collect` do the following:

        host                                              device
        launch   schedule the chunks of step n + 1        forward of step n
                 make its plan, pass it to the ranks      sampling of step n, then its drafts
        collect  wait for the tokens of step n            forward of step n + 1, which takes the
                 append them to their requests            tokens of step n on the device
                 launch the sampling of step n + 1,       sampling of step n + 1
                 if it needs the tokens of step n

    On a CPU, `launch` launches no step ahead, and the same calls run in order.

    A step of data-parallel ranks has a part for each lane that has anything to compute. Either the
    device runs the drafts of all parts by itself, or of none.

    Args:
        send: sends the ranks what the lanes have planned.

    Attributes:
        in_flight: the launched steps whose tokens are not known yet, oldest first: the parts of
            each.
    """

    def __init__(self, lanes: Sequence[Lane], send: Callable[[], None]) -> None:
        self._lanes, self._send = lanes, send
        self._turns: PrefillTurns | None = None
        if len(lanes) > 1:
            self._turns = PrefillTurns([lane.scheduler for lane in lanes])
        self.in_flight: deque[list[tuple[Lane, InFlightStep]]] = deque()

    def launch(self, steps_ahead: int) -> None:
        """Launch the next step, and up to `steps_ahead` further ones, as far as they can be planned
        now.
        """
        while len(self.in_flight) <= steps_ahead:
            if self._turns is not None:
                self._turns.decide()
            scheduled, on_device = self._schedule()
            parts: list[tuple[Lane, InFlightStep]] = []
            try:
                for lane, chunks in scheduled:
                    parts.append((lane, lane.launch(chunks, on_device=on_device)))
            finally:  # a lane whose part is planned counts on it
                if parts:
                    self.in_flight.append(parts)
                    self._send()
            if not parts:
                return

    def _schedule(self) -> tuple[list[tuple[Lane, Sequence[Chunk]]], bool]:
        """Schedule the next step.

        Returns:
            The lanes that have a part in it, with their chunks; none: no step can be launched now.
            And whether the device continues with the drafts by itself.
        """
        lanes = self._lanes
        launcher, chooser = lanes[0].launcher, lanes[0].scheduler.drafting.chooser
        if chooser is not None:
            chooser.begin_step()
        ahead = launcher.drafts and any(lane.in_flight for lane in lanes)
        each = [(lane, lane.launcher.schedule(lane.in_flight)) for lane in lanes]
        found = [(lane, chunks) for lane, chunks in each if chunks]
        on_device = launcher.drafts and launcher.fit_device([chunks for _, chunks in found])
        # A prompt of one lane ends the steps ahead of all, and no lane loses a turn.
        if ahead and not (on_device and all(chunks or not lane.in_flight for lane, chunks in each)):
            return [], False
        return found, on_device

    def collect(self) -> list[RequestOutput]:
        """Collect all parts of the oldest step (Lane.collect)."""
        touched: list[RequestOutput] = []
        for lane, part in self.in_flight[0]:
            if lane.in_flight and lane.in_flight[0] is part:  # a lane may have discarded it
                touched += lane.collect()
        self.in_flight.popleft()
        self.forget_discarded()
        return touched

    def forget_discarded(self) -> None:
        """Forget the steps of which the lanes have discarded every part."""
        while self.in_flight:
            for lane, _ in self.in_flight[-1]:
                if lane.in_flight:
                    return
            self.in_flight.pop()
