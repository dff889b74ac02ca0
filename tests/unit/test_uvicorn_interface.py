"""uvicorn still has what the server uses of it without documentation.

If a new version of uvicorn fails here, adapt `server/edge/connections.py` and `server/run.py`
before raising the upper bound in pyproject.toml.
"""

import ast
import asyncio
import inspect
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from finwhale.server.edge import connections

ARGUMENTS = ["config", "server_state", "app_state", "_loop"]
PROTOCOL = {"client", "transport", "loop", "cycle", "conn"}
PROTOCOL_METHODS = {
    "connection_made", "connection_lost", "data_received", "on_response_complete", "pause_writing",
    "resume_writing",
}  # fmt: skip
CYCLE = {"response_started", "response_complete"}
CONNECTION = {"their_state", "our_state", "trailing_data"}
SERVER_METHODS = {"startup", "capture_signals"}


async def _nothing(scope: object, receive: object, send: object) -> None:
    pass


def _protocol() -> H11Protocol:
    config = uvicorn.Config(_nothing, lifespan="off", log_config=None)
    return H11Protocol(config, ServerState(), {}, asyncio.new_event_loop())


def test_uvicorn_has_the_attributes_that_the_server_uses() -> None:
    version = f"uvicorn {uvicorn.__version__}"
    assert list(inspect.signature(H11Protocol).parameters) == ARGUMENTS, version
    protocol = _protocol()
    protocol.loop.close()
    lacking = PROTOCOL - vars(protocol).keys()
    assert not lacking, f"{version}: H11Protocol has no {lacking}"
    assert protocol.cycle is None, f"{version}: a connection begins with a request"
    lacking = PROTOCOL_METHODS - vars(H11Protocol).keys()
    assert not lacking, f"{version}: H11Protocol has no method {lacking}"
    lacking = {
        each for each in CYCLE if f"self.{each} = " not in inspect.getsource(RequestResponseCycle)
    }
    assert not lacking, f"{version}: RequestResponseCycle has no {lacking}"
    assert isinstance(protocol.conn, h11.Connection), version
    lacking = {each for each in CONNECTION if not hasattr(protocol.conn, each)}
    assert not lacking, f"h11 {h11.__version__}: Connection has no {lacking}"
    lacking = SERVER_METHODS - vars(uvicorn.Server).keys()
    assert not lacking, f"{version}: Server has no method {lacking}"


def test_the_names_above_are_all() -> None:
    """Every attribute of `self` in Connection is its own or is listed here."""
    tree = ast.parse(Path(connections.__file__).read_text())
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Connection")
    used: dict[str, set[str]] = {"self": set(), "cycle": set(), "conn": set()}
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute):
            holder = node.value
            if isinstance(holder, ast.Name) and holder.id == "self":
                used["self"].add(node.attr)
            elif isinstance(holder, ast.Attribute) and holder.attr in ("cycle", "conn"):
                used[holder.attr].add(node.attr)
    own = {n.name for n in cls.body if isinstance(n, ast.FunctionDef)} - {"__init__"}
    assert own > PROTOCOL_METHODS
    ours = own | {"user"} | {name for name in used["self"] if name.startswith("_")}
    assert used == {"self": used["self"] & ours | PROTOCOL, "cycle": CYCLE, "conn": CONNECTION}
