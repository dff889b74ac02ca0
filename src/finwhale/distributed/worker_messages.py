"""The messages that a worker process and its owner send each other on the worker's socket."""

import logging
from dataclasses import dataclass
from typing import Any

from finwhale.errors import FinwhaleError

STOP = b""  # the owner's last message to a worker


@dataclass(frozen=True, slots=True)
class Phase:
    """The phase of its start that a worker begins. The first report shows that its process runs."""

    name: str


CONNECTING = Phase("connecting")
OPENING = Phase("opening the model")


@dataclass(frozen=True, slots=True)
class Opened:
    """The worker is ready to read messages from its inbox. `about` is plain data for the owner."""

    about: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker cannot continue.

    Attributes:
        kind: the class of the error that the owner's process raises while it starts.
    """

    kind: type[FinwhaleError]
    message: str


@dataclass(frozen=True, slots=True)
class Status:
    """A new status of the worker: plain data."""

    status: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a function that the owner sent.

    Attributes:
        pickled: made by plain `pickle`; multiprocessing's pickler would share a tensor's memory.
    """

    pickled: bytes


@dataclass(frozen=True, slots=True)
class LaneResults:
    """The results of a data-parallel rank's step, made by `pickle`."""

    pickled: bytes


# A message that a worker sends to its owner.
Report = Phase | Opened | Failed | Status | Answer | LaneResults | logging.LogRecord
