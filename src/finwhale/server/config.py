"""The options of a server, from which `finwhale serve` and docs/options.md derive theirs."""

import re
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_network
from typing import Any, Literal

from finwhale.errors import FinwhaleError
from finwhale.options import check_options, option
from finwhale.server.keys import parse_keys

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "text", "json"]
UNIX = "unix"  # the address of all clients of a Unix socket


# A number above 0.
_positive: Any = partial(option, above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How one server behaves, and its limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(
        8000, "port to listen on; 0 takes any free port", metavar="PORT", least=0, most=65535
    )
    uds: str | None = option(
        None,
        "Unix socket to listen on, instead of an address and a port",
        unset="none",
        metavar="PATH",
    )
    uds_mode: str = option(
        "600", "permissions of the Unix socket, as an octal number", metavar="MODE"
    )
    ssl_certfile: str | None = option(
        None,
        "certificate chain in PEM: serve HTTPS. SIGHUP makes the server read it again",
        unset="none: HTTP",
        metavar="FILE",
    )
    ssl_keyfile: str | None = option(
        None,
        "private key of the certificate, in PEM and not encrypted",
        unset="the key in the certificate's file",
        metavar="FILE",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        'host name that clients may use for this server; ".NAME" also allows its subdomains, '
        '"addresses" any IP address, "*" any host. Other requests get 400',
        unset="any host; on a loopback address without API keys, only localhost and IP addresses",
        metavar="HOST",
    )
    trusted_proxies: tuple[str, ...] = option(
        (),
        f'address or network of a proxy, or "{UNIX}" for those on the Unix socket: the server '
        "takes a client's address from their X-Forwarded-For, if clients have no API keys",
        unset="none: a client is the address that connects",
        metavar="ADDRESS",
        flag="--trusted-proxy",
    )
    # The first name stands in the answers.
    model_names: tuple[str, ...] = option(
        (),
        "name by which clients call the model",
        unset="the name of the checkpoint's directory, or the id of its repository; finwhale-demo "
        "for the embedded model",
        metavar="NAME",
        flag="--served-model-name",
    )
    default_thinking: bool = option(
        True,
        "whether the model thinks when a chat request does not specify it",
        unset="yes; no with the embedded model",
        flag="--thinking",
    )
    # `finwhale serve` reads the keys from the files and from its environment.
    api_keys: tuple[str, ...] = option(
        (),
        "file of API keys, one on each line: KEY or NAME:KEY, and limits; a request must carry one "
        "of the keys. SIGHUP makes the server read the files again",
        unset="no key is needed",
        metavar="FILE",
        flag="--api-key-file",
    )
    share_prefixes: bool = option(
        False, "let all API keys share cached prefixes; without it, each key's name has its own"
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "web origin whose pages may call the server",
        unset="none",
        metavar="ORIGIN",
        flag="--cors-origin",
    )
    max_body_bytes: int | None = _positive(
        None,
        "maximum size of a request's body",
        unset="4 MiB plus 16 bytes for each token of the context",
    )
    max_buffered_bytes: int = _positive(
        1 << 30, "maximum size of all requests' bodies together; a large body beyond it gets 503"
    )
    max_prompt_tokens: int | None = _positive(
        None, "maximum number of tokens of a prompt", unset="the model's context"
    )
    max_choices: int = _positive(
        128, "maximum number of continuations in one request: its prompts times n"
    )
    max_queue: int = option(
        512, "maximum number of waiting sequences; a request beyond it gets 429", least=0
    )
    max_concurrency: int = _positive(
        2048, "maximum number of HTTP requests at once; a request beyond it gets 429"
    )
    retry_after_s: int = _positive(
        1, "header Retry-After of answers with status 429, and with 503 while the model loads"
    )
    request_timeout_s: float = _positive(
        3600.0, "time limit for a request, including the check of its grammar and its stream"
    )
    ping_interval_s: float = option(
        10.0,
        "time after which a silent stream sends a comment (Messages: a ping), so that proxies keep "
        "the connection; 0: never",
        least=0,
    )
    drain_timeout_s: float = _positive(
        60.0, "time limit for running requests when the server is told to stop"
    )
    lenient: bool = option(
        False,
        "ignore unknown fields of requests: the answer's header Finwhale-Ignored and a warning in "
        "the log name them. Without it, such requests are refused",
    )
    drain_delay_s: float = option(
        0.0,
        "time for which a stopping server accepts requests while /health/ready answers 503, so "
        "that a load balancer can notice",
        least=0,
    )
    batch_dir: str | None = option(
        None,
        "directory for /v1/files and /v1/batches, private to this user; without it, these paths "
        "answer 404",
        unset="none",
        metavar="DIRECTORY",
    )
    max_file_bytes: int = _positive(256 << 20, "maximum size of an uploaded file")
    max_file_lines: int = _positive(50_000, "maximum number of lines of an uploaded file")
    max_files: int = _positive(
        200, "each API key may have at most so many uploaded files, and so many batches"
    )
    enable_rollout_endpoints: bool = option(
        False,
        "serve the endpoints with which a trainer pauses the engine, lets it sleep and replaces "
        "its weights; every client of the server may call them. Without it, they answer 404",
    )
    health_port: int | None = option(
        None,
        "second port for /health and /metrics, which needs no API key and answers even if the "
        "server is too busy for the first one; 0 takes any free port",
        unset="none",
        metavar="PORT",
        least=0,
        most=65535,
    )
    engine_timeout_s: float = _positive(
        60.0, "time after which /health/live fails if the engine's process gives no sign of life"
    )
    step_timeout_s: float = _positive(
        600.0, "maximum duration of a step of the engine; beyond it, /health/live fails"
    )
    max_connections: int = _positive(
        4096,
        "maximum number of connections, within the system's limit of open files; a connection "
        "beyond it replaces the one that has been silent for longest",
    )
    header_timeout_s: float = _positive(10.0, "time limit for the arrival of a request's head")
    body_timeout_s: float = _positive(
        30.0, "time limit for the arrival of a request's body, to which each 64 KiB add a second"
    )
    idle_timeout_s: float = _positive(
        75.0,
        "time after which the server closes a connection that has no request or does not read its "
        "answer",
    )
    log_level: LogLevel = option("info", "least severe level of messages to log")
    log_format: LogFormat = option(
        "auto", "form of the log: text to read, or JSON lines; auto: text if stderr is a terminal"
    )
    log_prompts: bool = option(False, "write the bodies of requests to the log")
    otlp_traces_endpoint: str | None = option(
        None,
        "URL to which to send OpenTelemetry traces of requests, over OTLP's HTTP with protobuf, "
        "such as http://127.0.0.1:4318/v1/traces; needs the extra trace. OpenTelemetry's "
        "environment variables apply, too",
        unset="that of OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT; none",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.model_names or not all(self.model_names):
            raise FinwhaleError("a server needs at least one name of the model, not empty")
        url = self.otlp_traces_endpoint
        if url is not None and not re.match("https?://[^/]", url):
            raise FinwhaleError(f"otlp_traces_endpoint must be an http or https URL, got {url!r}")
        parse_keys(self.api_keys)
        for proxy in self.trusted_proxies:
            try:
                _ = proxy == UNIX or ip_network(proxy)
            except ValueError as error:
                raise FinwhaleError(
                    f"a trusted proxy is an address or a network: {error}"
                ) from error
        if not re.fullmatch("[0-7]{3,4}", self.uds_mode):
            raise FinwhaleError(f"uds_mode must be an octal number, got {self.uds_mode!r}")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise FinwhaleError("ssl_keyfile needs ssl_certfile")
