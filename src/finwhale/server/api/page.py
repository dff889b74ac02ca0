"""The page at / and its files, which load nothing from other hosts."""

from importlib import resources
from pathlib import Path

from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

PAGE_PATH = "/page"  # index.html names it too
_WEB = Path(str(resources.files("finwhale.server"))) / "web"
# Scripts and styles are files of this server, and the page connects to this server alone. Only
# DOMPurify turns text into elements (Trusted Types).
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
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
