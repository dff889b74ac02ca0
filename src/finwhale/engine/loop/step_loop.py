"""One step of the engine after the other, with the overlap of host and device."""

from collections import deque
from collections.abc import Callable, Sequence

from finwhale.engine.loop.in_flight import InFlightStep
from finwhale.engine.loop.lanes import Lane
from finwhale.engine.plan.prefill_turns import PrefillTurns
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

    A step of data-parallel ranks has a part for each lane that has anything to compute.

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
            parts: list[tuple[Lane, InFlightStep]] = []
            try:
                for lane in self._lanes:
                    if (part := lane.launch()) is not None:
                        parts.append((lane, part))
            finally:  # a lane whose part is planned counts on it
                if parts:
                    self.in_flight.append(parts)
                    self._send()
            if not parts:
                return

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
