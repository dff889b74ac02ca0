"""One step of the engine after the other, with the overlap of host and device."""

import ctypes
from collections import deque

from finwhale.engine.loop.in_flight import InFlightStep
from finwhale.engine.loop.launching import Launcher
from finwhale.engine.loop.outputs import Outputs
from finwhale.engine.loop.results import Results
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

    Attributes:
        in_flight: the launched steps whose tokens are not known yet, oldest first.
    """

    def __init__(self, launcher: Launcher, results: Results, outputs: Outputs) -> None:
        self._launcher, self._results, self._outputs = launcher, results, outputs
        self.in_flight: deque[InFlightStep] = deque()

    def launch(self, steps_ahead: int) -> None:
        """Launch the next step, and up to `steps_ahead` further ones, as far as they can be planned
        now.
        """
        while len(self.in_flight) <= steps_ahead:
            step = self._launcher.launch(self._outputs.streams, self.in_flight)
            if step is None:
                return
            self.in_flight.append(step)

    def collect(self) -> list[RequestOutput]:
        """Wait for the tokens of the oldest in-flight step, and append them to their requests;
        returns the requests that changed.
        """
        step, *later = self.in_flight
        tokens = self._results.read(step, later)
        self.in_flight.popleft()
        touched = self._outputs.record(step, tokens)
        self._results.record_appended()
        self.discard_if_idle()
        self._launcher.sample_waiting(self.in_flight)
        return touched

    def discard_if_idle(self) -> None:
        """If no sequence remains, discard the steps still in flight."""
        if not self._outputs.streams:
            self.in_flight.clear()
            self._launcher.drop_rows()

    def abandon(self) -> None:
        """Keep the in-flight steps as long as the process lives: freeing a step of a failed device
        would end it.
        """
        for step in self.in_flight:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(step))
        self.in_flight.clear()
