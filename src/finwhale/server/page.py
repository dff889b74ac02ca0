"""The page at /: one file, which loads nothing from other hosts."""

from functools import cache
from importlib import resources

from starlette.responses import HTMLResponse, Response

# Only scripts in the file itself run, and they connect to this server alone.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


def page_response() -> Response:
    return HTMLResponse(_page(), headers={"content-security-policy": _POLICY})


@cache
def _page() -> str:
    return resources.files("finwhale.server").joinpath("page.html").read_text(encoding="utf-8")
