"""Errors on the wire: each protocol's error object and status code."""

import json
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Literal

from starlette.responses import Response

from finwhale.chat.known_fields import FieldError
from finwhale.errors import EngineDeadError, FinwhaleError, QueueFullError, RequestError
from finwhale.server.sse import event

ErrorCode = Literal[
    "batch_ended",
    "batch_not_found",
    "body_too_large",
    "context_length_exceeded",
    "engine_dead",
    "file_not_found",
    "file_too_large",
    "generation_failed",
    "grammar_check_failed",
    "host_not_allowed",
    "in_use",
    "internal_error",
    "invalid_api_key",
    "invalid_json",
    "invalid_request",
    "invalid_unicode",
    "invalid_value",
    "key_concurrency",
    "key_tokens",
    "loading",
    "model_not_found",
    "no_batch_dir",
    "no_rollout_endpoints",
    "no_space",
    "origin_not_allowed",
    "overloaded",
    "priority_not_allowed",
    "queue_full",
    "rollout_refused",
    "server_stopping",
    "timeout",
    "too_complex",
    "too_deep",
    "too_many_batches",
    "too_many_choices",
    "too_many_files",
    "too_many_lines",
    "too_many_requests",
    "unknown_parameter",
    "unsupported_media_type",
    "unsupported_type",
    "unsupported_value",
]

# With these codes, the client may try again later.
TRY_AGAIN: tuple[ErrorCode, ...] = (
    "key_concurrency", "loading", "overloaded", "queue_full", "server_stopping",
    "too_many_requests",
)  # fmt: skip
LENIENT_HINT = "a server that is started with --lenient ignores such fields"
# The types of errors by status. Any other below 500 is an invalid_request_error.
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = _OPENAI_TYPES | {
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
# The field that holds the prompt, which OpenAI's clients expect as `param` of a full context.
_PROMPT_FIELDS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
}


class StoppingError(FinwhaleError):
    """The server stops before a request has ended."""


@dataclass(eq=False)
class ApiError(Exception):
    """An answer other than success.

    Attributes:
        status: the HTTP status.
        message: one line for the client.
        code: OpenAI's machine-readable code, or None.
        param: the field of the request that is wrong, or None.
        messages_text: the message in Anthropic's protocol, if its clients look for other words.
        details: what the error object of Messages says besides, for clients that act on it.
        retry_after_s: seconds after which the client may try again; None: it should not, or if the
            code is one of TRY_AGAIN, the seconds of --retry-after.
        headers: further headers of the answer.
    """

    status: int
    message: str
    _: KW_ONLY
    code: ErrorCode | None = None
    param: str | None = None
    messages_text: str | None = None
    details: Mapping[str, object] | None = None
    retry_after_s: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.message)


# More than a user's share of requests, uploads or downloads.
too_many_requests = partial(ApiError, 429, code="too_many_requests")


def context_length_error(
    num_tokens: int, context: int, max_prompt: int | None = None, *, exact: bool = True
) -> ApiError:
    """The error for a prompt that is too long, in the words by which clients recognise it.

    Args:
        num_tokens: number of the prompt's tokens.
        context: maximum number of tokens of prompt and output together.
        max_prompt: the server's limit for prompts, if the prompt exceeds it.
        exact: False: the prompt has `num_tokens` tokens or more.
    """
    more = "" if exact else " or more"
    if max_prompt is None:
        text = (
            f"This model's maximum context length is {context} tokens. However, you requested "
            f"{num_tokens + 1} tokens{more} ({num_tokens} in the messages, 1 in the completion). "
            "Please reduce the length of the messages."
        )
    else:
        text = (
            f"Input tokens exceed the configured limit of {max_prompt} tokens. Your messages "
            f"resulted in {num_tokens} tokens. Please reduce the length of the messages."
        )
    maximum = context - 1 if max_prompt is None else max_prompt
    other_text = f"prompt is too long: {num_tokens} tokens > {maximum} maximum"
    return ApiError(400, text, code="context_length_exceeded", messages_text=other_text)


def as_api_error(error: Exception) -> ApiError | None:
    """The error for the client; None: `error` is internal."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FieldError):
        hint = f" ({LENIENT_HINT})" if error.code == "unknown_parameter" else ""
        return ApiError(400, f"{error}{hint}", code=error.code, param=error.path)
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code="invalid_request")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, StoppingError):
        return ApiError(503, str(error), code="server_stopping")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than the server allows", code="timeout")
    return None


def is_anthropic(path: str) -> bool:
    return path.startswith("/v1/messages")


def error_body(error: ApiError, path: str) -> dict[str, object]:
    """The error object of the protocol of an endpoint."""
    types, other = _OPENAI_TYPES, "server_error"
    if is_anthropic(path):
        types, other = _ANTHROPIC_TYPES, "api_error"
    kind = types.get(error.status, "invalid_request_error" if error.status < 500 else other)
    if is_anthropic(path):
        details = {} if error.details is None else {"details": error.details}
        text = error.messages_text or error.message
        return {"type": "error", "error": {"type": kind, "message": text, **details}}
    is_full = error.code == "context_length_exceeded"
    param = _PROMPT_FIELDS.get(path) if is_full else error.param
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def error_event(error: ApiError, path: str, last: bytes) -> bytes:
    """The event that ends a stream which has failed.

    Args:
        last: the stream's last piece. Events of Responses have numbers, and this one gets the next.
    """
    body = error_body(error, path)
    if path == "/v1/responses":
        # Clients that read typed events look at the first four. The openai package raises `error`.
        numbers = re.findall(rb'"sequence_number": ?(\d+)', last)
        body = {
            "type": "error",
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
            **body,
        }
    named = is_anthropic(path) or path == "/v1/responses"
    return event(json.dumps(body), "error" if named else None)


def error_response(error: ApiError, path: str) -> Response:
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    text = json.dumps(error_body(error, path))
    return Response(text, error.status, headers, "application/json")
