"""Errors that a user can cause or must handle. The message says what was found and what was wanted.

A message is one line.
"""


class FinwhaleError(Exception):
    """Base of every error of this package; the command line prints it without a traceback."""


class CheckpointError(FinwhaleError):
    """A checkpoint cannot be read: a tensor or config.json is missing, broken or unexpected."""


class RequestError(FinwhaleError):
    """One request cannot be served: its prompt or its sampling parameters are wrong."""


class ResourceError(FinwhaleError):
    """The request or the model does not fit the memory or the device."""


class EngineDeadError(FinwhaleError):
    """The engine failed and cannot continue; all its requests have failed. Make a new engine."""
