"""The log: JSON lines, or text in a terminal; without prompts and answers by default."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from finwhale.request import RequestTimes, SamplingParams
from finwhale.server.errors import ApiError
from finwhale.server.keys import ApiKey
from finwhale.server.observe.lossy_stderr import never_block

# Errors with these codes may quote a request; a match of _QUOTATION begins the quotation.
_QUOTING = frozenset({"invalid_request", "generation_failed"})
_QUOTATION = re.compile(r"""['"`\n<]|\bgot\b""")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON, with the fields of `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {k: v for k, v in vars(record).items() if k not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """Formats a record for a person: the time, the message and the fields of `extra`.

    In a terminal, a record first erases the line on which a progress bar of another process may
    stand. That bar then draws itself again below.
    """

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._begin = "\r\x1b[2K" if terminal else ""

    def format(self, record: logging.LogRecord) -> str:
        words = [time.strftime("%H:%M:%S", time.localtime(record.created))]
        if record.levelno >= logging.WARNING:
            words.append(record.levelname.lower())
        words.append(record.getMessage())
        for name, value in vars(record).items():
            if name not in _STANDARD:
                words.append(f"{name}={json.dumps(value, default=str, ensure_ascii=False)}")
        text = self._begin + " ".join(words)
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def is_text(log_format: str) -> bool:
    """Whether the log is text. log_format: an option of ServerConfig."""
    return log_format == "text" or (log_format == "auto" and sys.stderr.isatty())


def configure(level: str, log_format: str = "auto", *, waits: bool = True) -> Callable[[], None]:
    """Writes the records of every logger to standard error.

    Args:
        waits: whether a writer waits until standard error is read; see `lossy_stderr.py`.

    Returns:
        A function that lets writers wait again.
    """
    formatter = (
        TextFormatter(terminal=sys.stderr.isatty()) if is_text(log_format) else JsonFormatter()
    )

    def notice(lost: int) -> str:
        text = f"{lost} lines of the log are lost: nobody read standard error"
        line = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
        return formatter.format(logging.makeLogRecord(line)) + "\n"

    restore = (lambda: None) if waits else never_block(notice)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # `server/api/gate.py` logs requests.
    logging.getLogger("uvicorn.access").disabled = True
    return restore


def printable(text: str, limit: int) -> str:
    """Text from a client as the log shows it: short, and without control characters."""
    shown = text if len(text) <= limit else text[:limit] + "..."
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in shown)


def note_refusal(scope: Mapping[str, Any], error: ApiError, with_text: bool) -> None:
    """Adds the reason of a refusal and the wrong parameter to the request's log line.

    Args:
        with_text: whether the log may contain text from requests. Without it, the reason ends
            before the first quotation, which may be from a prompt.
    """
    reason = error.message
    if error.code in _QUOTING and not with_text:
        reason = _QUOTATION.split(reason, maxsplit=1)[0].rstrip(" :")
    noted = {"code": error.code, "reason": printable(reason, 300)}
    if error.param is not None:
        noted["param"] = printable(error.param, 200)
    scope["state"]["refusal"] = {name: value for name, value in noted.items() if value is not None}


@dataclass(slots=True)
class RequestLog:
    """The fields that the log has about one request, at its end.

    Attributes:
        request_id: the answer's x-request-id.
        body_bytes: size of the request's body.
        begin: time of the request's arrival.
        cached: tokens of each prompt that were in the prefix cache, by the engine's request ids.
        first_token_s: time from the arrival to the first token; None before the first token.
        last_tokens: time of the latest token of each continuation, by the engine's request id and
            the continuation's index.
        key: the request's API key; None: the server needs none.
        user: whose shares it takes; see `server/edge/shares.py`.
        batch: whether it belongs to a batch, which runs after all other requests.
        cache_salt: only requests with the same value share cached prefixes; None: any.
        saves_first: whether the answer waits until the prefix store has the prompt.
        finish: the finish reason of each continuation that has ended.
        model: the name by which the request calls the model.
        params: the sampling parameters; None: the request was refused before it reached the engine.
        num_sequences: number of continuations of all its prompts.
        times: the engine's times of each prompt that has a token, by the engine's request ids.
    """

    request_id: str
    endpoint: str
    body_bytes: int
    key: ApiKey | None = None
    user: str = ""
    cache_salt: str | None = None
    saves_first: bool = False
    begin: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    output_tokens: int = 0
    first_token_s: float | None = None
    last_tokens: dict[tuple[str, int], float] = field(default_factory=dict)
    finish: list[str] = field(default_factory=list)
    stream: bool = False
    model: str = ""
    params: SamplingParams | None = None
    num_sequences: int = 0
    times: dict[str, RequestTimes] = field(default_factory=dict)
    batch: bool = False

    @property
    def cached_tokens(self) -> int:
        """The number of all prompts' tokens that were in the prefix cache."""
        return sum(self.cached.values())

    def fields(self) -> dict[str, object]:
        found: dict[str, object] = {
            "body_bytes": self.body_bytes,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "stream": self.stream,
            "finish": ",".join(self.finish),
        }
        if self.first_token_s is not None:
            found["first_token_s"] = round(self.first_token_s, 4)
        return found
