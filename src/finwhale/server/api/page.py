"""The page at /: its files, which load nothing from other hosts, and what it shows."""

from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from finwhale.errors import RequestError
from finwhale.server.api import health
from finwhale.server.errors import ApiError
from finwhale.server.protocols import chat_requests
from finwhale.server.state import ServerState

PAGE_PATH = "/page"  # index.html names it too
_WEB = Path(str(resources.files("finwhale.server"))) / "web"
# Scripts and styles are files of this server, and the page connects to this server alone. Only
# DOMPurify turns text into elements (Trusted Types).
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
# The parameters whose defaults the page's settings show.
_SHOWN = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty",
)  # fmt: skip
_TYPES = {".js": "text/javascript", ".css": "text/css", ".json": "application/json"}


class PageFiles(StaticFiles):
    """The scripts and styles. Browsers ask again each time, so that an update is complete."""

    def __init__(self) -> None:
        super().__init__(directory=_WEB)

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        # The system's table of types may differ, and browsers refuse modules of other types.
        if isinstance(response, FileResponse) and (found := _TYPES.get(Path(path).suffix)):
            response.headers["content-type"] = f"{found}; charset=utf-8"
        return response


def page_response() -> Response:
    headers = {"content-security-policy": _POLICY, "cache-control": "no-cache"}
    return FileResponse(_WEB / "index.html", headers=headers)


class PageState:
    """What the page asks for once a second: the server's state, the model and the numbers."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._defaults: dict[str, dict[str, Any]] = {}

    def now(self) -> dict[str, Any]:
        """The answer of /live.

        `reason` says why the server accepts no requests; None: it does. `defaults` has the sampling
        parameters of requests that give none, without and with thinking.
        """
        state, heartbeat = self._state, self._state.client.heartbeat
        if state.client.alive and not self._defaults:
            with suppress(RequestError, ApiError):  # without a tokenizer, there is no chat
                for name, thinking in (("disabled", False), ("enabled", True)):
                    params = chat_requests.defaults(state, thinking=thinking)
                    self._defaults[name] = {field: getattr(params, field) for field in _SHOWN}
        return {
            "model": state.model_name,
            "max_model_len": state.max_model_len,
            "loading": state.loading,
            "loaded_bytes": (0, 0) if heartbeat is None else heartbeat.loaded_bytes,
            "reason": health.ready(state).reason,
            "defaults": self._defaults,
            **state.metrics.live(),
        }
