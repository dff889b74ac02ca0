"""Structured logs: one JSON object on each line, without prompts and answers by default."""

import json
import logging
import sys
import time
from dataclasses import dataclass, field

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


def configure(level: str) -> None:
    """Writes the records of every logger to standard error as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # `server/limits.py` logs requests.
    logging.getLogger("uvicorn.access").disabled = True


@dataclass(slots=True)
class RequestLog:
    """What the log says about one request at its end.

    Attributes:
        request_id: the answer's x-request-id.
        body_bytes: size of the request's body.
        begin, last_token: times of the request's arrival and of its latest token.
        first_token_s: time from the arrival to the first token; None before the first token.
        finish: the finish reason of each continuation that has ended.
    """

    request_id: str
    endpoint: str
    body_bytes: int
    begin: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None
    last_token: float | None = None
    finish: list[str] = field(default_factory=list)
    stream: bool = False

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
