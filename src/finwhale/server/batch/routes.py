"""/v1/files and /v1/batches."""

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from pydantic import Field
from starlette.responses import FileResponse, Response

from finwhale.server.batch.batches import Batches
from finwhale.server.batch.store import Owner, page_of
from finwhale.server.batch.upload import receive
from finwhale.server.edge.listening import check_origin
from finwhale.server.edge.shares import Shares
from finwhale.server.errors import ApiError, too_many_requests
from finwhale.server.protocols.json_answer import json_answer
from finwhale.server.protocols.schemas import Body
from finwhale.server.state import ServerState

# Maximum number of uploads at once; each has a file on the disk that may remain incomplete.
MAX_UPLOADS = 8
MAX_DOWNLOADS = 32

Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(max_length=100)]
# Of the metadata of a batch.
Key = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=512)]
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}


class BatchBody(Body):
    """The body of POST /v1/batches."""

    input_file_id: Annotated[str, Field(max_length=100)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Key, Text], Field(max_length=16)] | None = None


def add_files(app: FastAPI, state: ServerState, responses: dict[int | str, Any]) -> None:
    """Adds the paths of files. Without `app.state.batches`, each answers that there are none."""
    uploads = Shares("uploads at once", lambda: MAX_UPLOADS, error=too_many_requests)
    downloads = Shares("downloads at once", lambda: MAX_DOWNLOADS, error=too_many_requests)

    @app.post("/v1/files", responses=responses, openapi_extra=_FORM)
    async def upload_file(request: Request) -> dict[str, Any]:
        owner, config = _owner(request), state.config
        check_origin(request, config.cors_origins)
        if len(owner.files) + owner.uploading >= config.max_files:
            message = f"there are {len(owner.files)} files; this server allows {config.max_files}"
            raise ApiError(400, f"{message}: delete some", code="too_many_files")
        _take(request, uploads)
        owner.uploading += 1
        try:
            found = await receive(request, owner, config.max_file_bytes, config.max_file_lines)
        finally:
            owner.uploading -= 1
        return found.answer()

    @app.get("/v1/files", responses=responses, response_model=dict[str, Any])
    async def list_files(
        request: Request,
        purpose: Annotated[str | None, Query(max_length=100)] = None,
        limit: Limit = 10_000,
        order: Literal["asc", "desc"] = "desc",
        after: After = None,
    ) -> Response:
        files = _owner(request).files.values()
        found = [one for one in files if purpose in (None, one.purpose)]
        ordered = found[::-1] if order == "desc" else found
        return json_answer(page_of(ordered, limit, after), state.turn)

    @app.get("/v1/files/{file_id}", responses=responses)
    async def get_file(file_id: str, request: Request) -> dict[str, Any]:
        return _owner(request).find_file(file_id).answer()

    @app.get("/v1/files/{file_id}/content", responses=responses, response_class=Response)
    async def get_content(file_id: str, request: Request) -> Response:
        owner = _owner(request)
        found = owner.find_file(file_id)
        _take(request, downloads)
        return FileResponse(
            owner.content(found.id), media_type="application/jsonl", filename=found.filename
        )

    @app.delete("/v1/files/{file_id}", responses=responses)
    async def delete_file(file_id: str, request: Request) -> dict[str, Any]:
        _owner(request).delete(file_id)
        return {"id": file_id, "object": "file", "deleted": True}


def add_batches(app: FastAPI, state: ServerState, responses: dict[int | str, Any]) -> None:
    """Adds the paths of batches, as `add_files` does."""

    @app.post("/v1/batches", responses=responses)
    async def create_batch(body: BatchBody, request: Request) -> dict[str, Any]:
        batches, key = _batches(request), request.state.key
        return batches.create(key, body.input_file_id, body.endpoint, body.metadata).answer()

    @app.get("/v1/batches", responses=responses, response_model=dict[str, Any])
    async def list_batches(request: Request, limit: Limit = 20, after: After = None) -> Response:
        found = [*_owner(request).batches.values()]
        return json_answer(page_of(found[::-1], limit, after), state.turn)

    @app.get("/v1/batches/{batch_id}", responses=responses)
    async def get_batch(batch_id: str, request: Request) -> dict[str, Any]:
        return _owner(request).find_batch(batch_id).answer()

    @app.post("/v1/batches/{batch_id}/cancel", responses=responses)
    async def cancel_batch(batch_id: str, request: Request) -> dict[str, Any]:
        return _batches(request).cancel(request.state.key, batch_id).answer()


def _batches(request: Request) -> Batches:
    batches: Batches | None = request.app.state.batches
    if batches is None:
        message = "this server has no files and batches: start it with --batch-dir"
        raise ApiError(404, message, code="no_batch_dir")
    return batches


def _take(request: Request, shares: Shares) -> None:
    """Takes one of the user's units until the answer has been sent. Raises ApiError (429)."""
    request.state.taken.enter_context(shares.taken(request.state.user))


def _owner(request: Request) -> Owner:
    return _batches(request).store.owner(request.state.key)
