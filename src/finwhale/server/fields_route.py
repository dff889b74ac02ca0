"""A route that checks the fields of a body before FastAPI does."""

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.responses import Response

from finwhale.server.bodies import BodyRoute
from finwhale.server.known_fields import check_fields, shape_of

logger = logging.getLogger(__name__)


class FieldsRoute(BodyRoute):
    """Refuses unknown fields at every depth; if `app.state.lenient` is true, removes them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if self.body_field is not None:
            self._shape = shape_of(self.body_field.field_info.annotation)  # type: ignore[arg-type]
        return super().get_route_handler()

    def check(self, request: Request, value: Any) -> None:
        found = check_fields(self._shape, value, lenient=request.app.state.lenient)
        if found:
            state = request.scope["state"]
            state["ignored"] = found
            extra = {"request_id": state["request_id"], "fields": found}
            logger.warning("ignored fields of a request", extra=extra)
