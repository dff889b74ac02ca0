"""The HTTP application: its paths, and its answers to errors."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

import finwhale
from finwhale.server.api import gate, health
from finwhale.server.api.page import PAGE_PATH, PageFiles, PageState, page_response
from finwhale.server.api.rollouts import Endpoints
from finwhale.server.api.tokens import add_tokens
from finwhale.server.batch.batches import Batches
from finwhale.server.batch.routes import add_batches, add_files
from finwhale.server.batch.store import Store
from finwhale.server.edge.bodies import BodyParser, max_items
from finwhale.server.errors import ApiError, error_event, is_anthropic
from finwhale.server.observe.logs import RequestLog, note_refusal
from finwhale.server.observe.metrics import CONTENT_TYPE
from finwhale.server.protocols import chat_answers, chat_requests, completions, schemas
from finwhale.server.protocols.body_route import BodyRoute, note_ignored, validation_error
from finwhale.server.protocols.json_answer import json_answer
from finwhale.server.protocols.prefill_decode import take_transfer, transfer_fields
from finwhale.server.sse import COMMENT, NO_BUFFER, Stream, event, unless_disconnected
from finwhale.server.state import ServerState

logger = logging.getLogger(__name__)
PING = event('{"type": "ping"}', "ping")  # as Anthropic's API sends it

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}
    for status, text in {
        400: "the request is not valid",
        401: "no valid API key",
        404: "no such model, file or batch",
        413: "the body is too large",
        415: "the body has the wrong media type",
        429: "the server is busy: see Retry-After",
        500: "the engine failed on this request",
        503: "the model is loading, or the engine has died",
        504: "the request took too long",
    }.items()
}
_STREAMS: dict[int | str, dict[str, Any]] = _ERRORS | {
    200: {
        "description": "the answer, or its events if the request streams",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        },
    }
}


def create_app(state: ServerState, store: Store | None = None) -> FastAPI:
    """The application of one server. `store`: files and batches; None: the server has none."""
    app = FastAPIOffline(
        title="Finwhale",
        version=finwhale.__version__,
        description="DeepSeek-V4 behind OpenAI's and Anthropic's protocols.",
        docs_url="/docs",
        redoc_url=None,
        static_url=gate.STATIC_PATH,
        # A redirect would go to the host that the client names.
        redirect_slashes=False,
    )
    app.router.route_class = BodyRoute
    app.state.parser = BodyParser(lambda: max_items(state.max_model_len))
    app.state.lenient = state.config.lenient
    if state.config.cors_origins:
        app.add_middleware(CORSMiddleware, **gate.cors_options(state.config))
    for layer in gate.LAYERS:
        app.add_middleware(layer, state=state)
    for kind in (RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _translated)
    _add_generation(app, state)
    add_tokens(app, state, _ERRORS)
    _add_service(app, state)
    app.state.batches = None if store is None else Batches(app, state, store)
    add_files(app, state, _ERRORS)
    add_batches(app, state, _ERRORS)
    Endpoints(app, state, _ERRORS)
    return app


def _add_generation(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions", responses=_STREAMS, response_model=None)
    async def create_completion(body: schemas.CompletionBody, request: Request) -> Response:
        return await _generated(state, body, request, completions, completions)

    @app.post("/v1/chat/completions", responses=_STREAMS, response_model=None)
    async def create_chat_completion(body: schemas.ChatBody, request: Request) -> Response:
        return await _generated(state, body, request, chat_requests, chat_answers)

    @app.post("/v1/responses", responses=_STREAMS, response_model=None)
    async def create_response(body: schemas.ResponsesBody, request: Request) -> Response:
        return await _generated(state, body, request, chat_requests, chat_answers)

    @app.post("/v1/messages", responses=_STREAMS, response_model=None)
    async def create_message(body: schemas.MessagesBody, request: Request) -> Response:
        return await _generated(state, body, request, chat_requests, chat_answers)


async def _generated(
    state: ServerState, body: schemas.SamplingBody, request: Request, requests: Any, answers: Any
) -> Response:
    """The answer that the engine generates.

    Args:
        requests, answers: the modules of the protocol. Preparation ends when the client leaves or
            the request times out.
    """
    log = _begin(state, request, body)
    take_transfer(state, body, log)
    async with asyncio.timeout(state.time_left_s(log)):
        prepared = await unless_disconnected(request, requests.prepare(state, body, log))
    if prepared.ignored:
        note_ignored(request.scope["state"], prepared.ignored)
    if body.stream:
        return await _stream(request, state, answers.stream(state, prepared, log))
    whole = await unless_disconnected(request, answers.complete(state, prepared, log))
    return json_answer({**whole, **transfer_fields(state, log)}, state.turn)


def _add_service(app: FastAPI, state: ServerState) -> None:
    def card(name: str) -> schemas.ModelCard:
        context = state.ready.max_model_len
        return schemas.ModelCard(
            id=name,
            created=state.started,
            created_at=datetime.fromtimestamp(state.started, UTC).isoformat(),
            display_name=name,
            max_model_len=context,
            context_length=context,
            max_input_tokens=state.config.max_prompt_tokens or context - 1,
            max_tokens=context - 1,
        )

    @app.get("/v1/models", responses=_ERRORS)
    async def list_models() -> schemas.ModelList:
        names = state.config.model_names
        return schemas.ModelList(data=[*map(card, names)], first_id=names[0], last_id=names[-1])

    @app.get("/v1/models/{name:path}", responses=_ERRORS)
    async def get_model(name: str) -> schemas.ModelCard:
        state.check_model(name)
        return card(name)

    @app.get("/health/live", responses={503: {"model": schemas.Health}})
    async def live() -> Response:
        """Whether the process is healthy: neither it nor its engine has died or stopped."""
        return health.health_response(health.live(state))

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Finwhale's version, in vLLM's form."""
        return {"version": finwhale.__version__}

    @app.get("/ping", responses={503: {"model": schemas.Health}}, name="ping")
    @app.post("/ping", responses={503: {"model": schemas.Health}}, name="post_ping")
    @app.get("/health", responses={503: {"model": schemas.Health}}, name="healthy")
    @app.get("/health/ready", responses={503: {"model": schemas.Health}})
    async def ready() -> Response:
        """Whether the server accepts requests: the model is loaded and it is not stopping."""
        return health.health_response(health.ready(state))

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(state.metrics.text(), media_type=CONTENT_TYPE)

    page_state = PageState(state)

    @app.get("/live")
    async def live_numbers() -> dict[str, Any]:
        """What the page at / shows: the server's state, the model, and the engine's numbers."""
        return page_state.now()

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return page_response()

    app.mount(PAGE_PATH, PageFiles())


def _begin(state: ServerState, request: Request, body: schemas.SamplingBody) -> RequestLog:
    known = request.state
    if state.config.log_prompts:
        found = {"request_id": known.request_id, "body": body.model_dump(exclude_unset=True)}
        logger.info("body", extra=found)
    if known.key is not None:
        known.key.check(body.priority)
    log = RequestLog(known.request_id, request.url.path, known.body_bytes, known.key, known.user)
    log.cache_salt, log.model = body.cache_salt, body.model
    log.batch, log.stream = known.batch, bool(body.stream)
    known.log = log
    return log


async def _stream(
    request: Request, state: ServerState, source: AsyncGenerator[bytes, None]
) -> Response:
    """The response of a stream, once the engine has accepted the request. An error before that is
    an answer with its own status."""
    try:
        await unless_disconnected(request, anext(source))
    except BaseException:
        await source.aclose()
        raise
    return Stream(
        _with_errors(source, state, request),
        "text/event-stream",
        NO_BUFFER,
        ping=PING if is_anthropic(request.url.path) else COMMENT,
        ping_interval_s=state.config.ping_interval_s,
    )


async def _with_errors(
    source: AsyncGenerator[bytes, None], state: ServerState, request: Request
) -> AsyncGenerator[bytes, None]:
    """The pieces of a stream; if the source fails, an error event is the last one."""
    piece = b""
    try:
        async for piece in source:
            yield piece
    except Exception as error:
        told = state.to_api_error(error)
        note_refusal(request.scope, told, state.config.log_prompts)
        yield error_event(told, request.url.path, piece)
    finally:
        await source.aclose()


async def _translated(request: Request, error: Exception) -> Response:
    """Raises the server's error for one of FastAPI or Starlette; `gate.RefusalAnswers` answers."""
    if isinstance(error, RequestValidationError):
        raise validation_error(error)
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    reasons = {
        404: f"this server has no {path}: see /docs for its paths",
        405: f"{path} does not take {request.method}",
    }
    text = reasons.get(error.status_code, str(error.detail))
    raise ApiError(error.status_code, text, headers=error.headers or {})
