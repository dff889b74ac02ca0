"""Errors that a user can cause or must handle.

Each message is one line. It says what was found, what was expected and what to change.
"""


class FinwhaleError(Exception):
    """Base of every error of this package; the command line prints it without a traceback."""


class CheckpointError(FinwhaleError):
    """A checkpoint cannot be read: a tensor or config.json is missing, broken or unexpected."""


class RequestError(FinwhaleError):
    """One request cannot be served: its prompt or its sampling parameters are wrong."""


class QueueFullError(FinwhaleError):
    """Too many sequences or grammars wait, or are in use; the client may try again."""


class ResourceError(FinwhaleError):
    """The machine cannot do what was asked: too little memory, no such device, no compiler."""


class OtherRankError(FinwhaleError):
    """Another rank has failed. That rank's own error says more, and should be preferred."""


class EngineDeadError(FinwhaleError):
    """The engine has failed, with all its requests, and cannot continue. Open a new engine."""


def first_line(error: BaseException | None) -> str:
    """The first line of an error's message; if it has no message, the name of its class."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
