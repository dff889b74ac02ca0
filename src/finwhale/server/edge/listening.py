"""The server's sockets (TCP or Unix, with or without TLS), and checks of hosts and origins."""

import os
import re
import socket
import ssl
import stat
from collections.abc import Sequence
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from starlette.requests import Request

from finwhale.errors import FinwhaleError
from finwhale.server.config import UNIX, ServerConfig
from finwhale.server.errors import ApiError

BACKLOG = 2048  # connections that wait until the server accepts them
# Values of --allowed-hosts beside names: every IP address, and every host.
ADDRESSES, ANY = "addresses", "*"
# A name that may end with a dot, or an address of IPv6 in brackets; then perhaps a port.
_HOST = re.compile(r"(?:(?P<name>[\w-]+(?:\.[\w-]+)*)\.?|\[(?P<address>[0-9a-f:.]+)\])(?::[0-9]*)?")
LOCAL_HOSTS = ("localhost", ADDRESSES)


def listen(config: ServerConfig) -> socket.socket:
    """Raises FinwhaleError."""
    path, family = config.uds, socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family if path is None else socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path is None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((config.host, config.port))
        else:
            _remove_stale(Path(path))
            # bind creates the file with all permissions that the umask allows.
            umask = os.umask(0o777 & ~int(config.uds_mode, 8))
            try:
                listener.bind(path)
            finally:
                os.umask(umask)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{config.host} port {config.port}" if path is None else path
        raise FinwhaleError(f"cannot listen on {where}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """The URL of the server, for the log."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    return f"{'http' if config.ssl_certfile is None else 'https'}://{host}:{port}"


def close(listener: socket.socket, config: ServerConfig) -> None:
    """Stops listening, and removes the Unix socket's file."""
    listener.close()
    if config.uds is not None:
        Path(config.uds).unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Removes the socket that an ended server has left. Raises OSError if the path is in use."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise FileExistsError(0, "the file exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise FileExistsError(0, "a server listens there")


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """The server's TLS settings; None: it has no certificate. Raises FinwhaleError."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    load_certificate(context, config)
    return context


def load_certificate(context: ssl.SSLContext, config: ServerConfig) -> None:
    """Reads the certificate, for new connections. Raises FinwhaleError; nothing changes then."""
    assert config.ssl_certfile is not None
    try:
        # A context that fails to load a key has lost its certificate, so try another one first.
        for one in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
            # Without a password, OpenSSL would ask for one on the terminal.
            one.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:
        files = " and ".join(filter(None, (config.ssl_certfile, config.ssl_keyfile)))
        raise FinwhaleError(
            f"cannot use the certificate and key of {files} (PEM, key not encrypted): {error}"
        ) from error


def is_loopback(host: str) -> bool:
    """Whether an address is one of this machine only."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def plain_address(host: str) -> str:
    """An IP address in its usual form; that of IPv4, if the system writes one as IPv6."""
    address = ip_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


def user_of(host: str) -> str:
    """The user at an address: an IPv4 address, or the first 64 bits of one of IPv6, because each
    of its networks gives a client 2^64 addresses. What is no address is one user."""
    try:
        plain = plain_address(host)
    except ValueError:
        return UNIX
    if ":" not in plain:
        return plain
    return f"{IPv6Address(ip_address(plain).packed[:8] + bytes(8))}/64"


class HostCheck:
    """Decides whether a request's Host names this server.

    A browser that has a malicious page open sends requests to any address that the page's own name
    resolves to (DNS rebinding). Their Host is the page's.
    """

    def __init__(self, allowed: Sequence[str]) -> None:
        """`allowed`: names, ".NAME" with its subdomains, ADDRESSES or ANY; empty: any host."""
        self._any = not allowed or ANY in allowed
        self._addresses = ADDRESSES in allowed
        self._names = {name.lower().rstrip(".") for name in allowed}

    def allows(self, header: str) -> bool:
        """`header`: the Host header; "" if there is none."""
        if self._any:
            return True
        host = _HOST.fullmatch(header.strip().lower())
        if host is None:
            return False
        name = host["name"] or host["address"]
        try:
            address = ip_address(name)
        except ValueError:
            if host["address"]:
                return False
        else:
            # Only an address of IPv6 has brackets.
            return address.version == (6 if host["address"] else 4) and (
                self._addresses or name in self._names
            )
        parents = name.split(".")
        below = {"." + ".".join(parents[i:]) for i in range(min(len(parents), 64))}
        return name in self._names or not below.isdisjoint(self._names)


def check_origin(request: Request, allowed: Sequence[str]) -> None:
    """Refuses a web page of another server: a browser sends its forms without asking first. Raises
    ApiError (403): the page's origin is not allowed."""
    origin = request.headers.get("origin")
    own = f"//{request.headers.get('host', '')}"
    if origin is not None and origin not in allowed and not origin.endswith(own):
        raise ApiError(403, "pages of this origin may not do this: see --cors-origin",
                       code="origin_not_allowed")  # fmt: skip
