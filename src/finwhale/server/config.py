"""How a server behaves. Frozen, self-checking."""

from dataclasses import dataclass

from finwhale.errors import FinwhaleError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Limits and manners of one server.

    Attributes:
        model_names: what clients may call the model; the first is what answers say.
        host, port: where it listens; port 0: any free one.
        api_keys: keys of which a request must carry one; none: no key is asked for.
        cors_origins: web origins whose pages may call the server; none: CORS is off.
        default_thinking: whether a chat request that does not say thinks.
        max_body_bytes: of one request.
        max_prompt_tokens: of one prompt; None: what the model's context holds.
        max_choices: continuations that one request may ask for, prompts times n.
        max_queue: sequences that may wait beyond those the engine runs at once; past it: 429.
        max_concurrency: HTTP requests at once; past it: 429.
        retry_after_s: what clients are told to wait by a 429, and while the model loads.
        request_timeout_s: for a whole request, the check of its grammar and its stream included.
        drain_timeout_s: for requests in flight when the server is told to stop.
        log_prompts: write the bodies of requests to the log.
    """

    model_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    default_thinking: bool = True
    max_body_bytes: int = 32 << 20
    max_prompt_tokens: int | None = None
    max_choices: int = 128
    max_queue: int = 512
    max_concurrency: int = 2048
    retry_after_s: int = 1
    request_timeout_s: float = 3600.0
    drain_timeout_s: float = 60.0
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise FinwhaleError("a server needs at least one name of the model, not empty")
        if not 0 <= self.port <= 65535:
            raise FinwhaleError(f"port must be 0 to 65535, got {self.port}")
        if any(len(key) < 8 or not key.isascii() for key in self.api_keys):
            raise FinwhaleError("an API key must be at least 8 ASCII characters")
        if self.max_queue < 0:
            raise FinwhaleError(f"max_queue must be at least 0, got {self.max_queue}")
        for name in _ABOVE_ZERO:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise FinwhaleError(f"{name} must be above 0, got {value}")


_ABOVE_ZERO = (
    "max_body_bytes",
    "max_prompt_tokens",
    "max_choices",
    "max_concurrency",
    "retry_after_s",
    "request_timeout_s",
    "drain_timeout_s",
)
