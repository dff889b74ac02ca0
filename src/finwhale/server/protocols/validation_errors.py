"""The error for a request body that does not match its schema."""

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError

from finwhale.server.errors import LENIENT_HINT, ApiError

# Fields of OpenAI's protocols whose other values this server does not have.
_UNSUPPORTED: dict[str | int, str] = {
    "previous_response_id": "this server stores no responses; send the earlier items in `input`",
    "background": "this server answers each request at once; leave the field out",
    "truncation": 'this server never shortens a conversation; only "disabled" is supported',
    "modalities": 'the model writes only text; only ["text"] is supported',
}
_Path = tuple[str | int, ...]


def validation_error(error: RequestValidationError) -> ApiError:
    """The error of the first wrong field, in one line.

    A field that may have several types has an error for each of them. The client probably meant the
    type whose error is deepest, or whose error is not that the value has another type.
    """
    errors = error.errors()
    loc, kind = errors[0]["loc"], errors[0]["type"]
    if kind == "json_invalid":
        return ApiError(400, "the body is not valid JSON", code="invalid_json")
    ranked: list[tuple[tuple[int, bool, int], _Path, str]] = []
    for one in errors:
        if one["loc"][:2] == loc[:2]:
            path = _path(one["loc"], one["type"], error.body)
            index = path[-1] if path and isinstance(path[-1], int) else 0
            rank = (len(path), not one["type"].endswith("_type"), index)
            ranked.append((rank, path, str(one["msg"])))
    best = max(rank for rank, _, _ in ranked)
    path = next(path for rank, path, _ in ranked if rank == best)
    where = ".".join(map(str, path))
    if kind == "extra_forbidden":
        message = f"unknown parameter: {where} ({LENIENT_HINT})"
        return ApiError(400, message, code="unknown_parameter", param=where)
    if path and path[0] in _UNSUPPORTED:
        message = f"{path[0]}: {_UNSUPPORTED[path[0]]}"
        return ApiError(400, message, code="unsupported_value", param=str(path[0]))
    reasons = dict.fromkeys(message for rank, _, message in ranked if rank == best)
    message = " or ".join(reasons).replace(" or Input should be ", " or ")
    message = f"{where}: {message}" if where else message
    return ApiError(400, message, code="invalid_value", param=where or None)


def _path(loc: _Path, kind: str, body: Any) -> _Path:
    """Where a body is wrong: pydantic's path, without the types that it has tried."""
    origin, *parts = loc
    if origin != "body":
        return tuple(parts)
    found: list[str | int] = []
    for part in parts:
        in_object = isinstance(body, Mapping) and part in body
        if in_object or (isinstance(body, list) and isinstance(part, int)):
            body = body[part]
        elif kind != "missing" or part is not parts[-1]:
            continue
        found.append(part)
    return tuple(found)
