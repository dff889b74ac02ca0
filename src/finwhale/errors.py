"""Errors that a user can cause. Each carries one clear line: what was found, what was wanted."""


class FinwhaleError(Exception):
    """Base of every error that a user can cause; the command line prints it without a traceback."""


class CheckpointError(FinwhaleError):
    """A checkpoint cannot be read: a missing, truncated, misshapen or unknown tensor or config."""


class RequestError(FinwhaleError):
    """One request cannot be served: its prompt or its sampling values are wrong."""


class ResourceError(FinwhaleError):
    """What was asked for does not fit the memory or the device at hand."""


class EngineDeadError(FinwhaleError):
    """The engine broke in a way that it cannot go on from; its requests have failed."""
