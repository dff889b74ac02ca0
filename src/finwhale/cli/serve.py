"""`finwhale serve`: the model behind OpenAI's and Anthropic's protocols."""

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.reader import read_config
from finwhale.cli.engine_options import add_engine_options, engine_options
from finwhale.demo import DEMO_PATH
from finwhale.errors import FinwhaleError
from finwhale.models.registry import architecture_of, parse_config

try:
    from finwhale.server import logs
    from finwhale.server.config import ServerConfig
    from finwhale.server.loading import load_engine
    from finwhale.server.run import serve
except ModuleNotFoundError as error:
    if (error.name or "").startswith("finwhale"):
        raise
    raise FinwhaleError(
        f"serving needs {error.name}: install finwhale with the server extra, "
        "pip install 'finwhale[server]'"
    ) from error

KEYS_VARIABLE = "FINWHALE_API_KEYS"
DEMO_NAME = "finwhale-demo"
_DEFAULTS = ServerConfig(model_names=("model",))


def run(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    config = _server_config(args, os.environ)
    directory = DEMO_PATH if args.path is None else Path(args.path)
    if not directory.is_dir():
        raise FinwhaleError(f"no checkpoint: {directory} is not a directory")
    has_tokenizer = (directory / "tokenizer.json").exists()
    tokenizer = Tokenizer.open(directory) if has_tokenizer else None
    options = engine_options(args, os.environ)
    logs.configure(args.log_level)
    load = partial(load_engine, args.path, args.log_level, options)
    architecture = architecture_of(parse_config(read_config(directory)))
    return serve(config, tokenizer, architecture.chat_dialect(directory), load)


def _server_config(args: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    """Raises FinwhaleError."""
    default_name = DEMO_NAME if args.path is None else Path(args.path).resolve().name
    thinking = args.path is not None if args.thinking is None else args.thinking
    return ServerConfig(
        model_names=tuple(args.model_name or [default_name]),
        host=args.host,
        port=args.port,
        api_keys=_api_keys(args.api_key_file, environment.get(KEYS_VARIABLE, "")),
        cors_origins=tuple(args.cors_origin),
        default_thinking=thinking,
        max_body_bytes=args.max_body_bytes,
        max_prompt_tokens=args.max_prompt_tokens,
        max_queue=args.max_queue,
        max_concurrency=args.max_concurrency,
        request_timeout_s=args.request_timeout,
        drain_timeout_s=args.drain_timeout,
        log_prompts=args.log_prompts,
    )


def _api_keys(path: str | None, variable: str) -> tuple[str, ...]:
    """The keys of a file (one a line) and of the environment (separated by commas).

    Raises:
        FinwhaleError: the file cannot be read, or holds none.
    """
    keys = [key.strip() for key in variable.split(",")]
    if path is not None:
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FinwhaleError(f"cannot read the API keys: {error}") from error
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise FinwhaleError(f"{path} holds no API key: one a line is wanted")
        keys += found
    return tuple(dict.fromkeys(key for key in keys if key))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finwhale serve",
        description="Serve a model over HTTP: /v1/chat/completions, /v1/completions, "
        "/v1/responses, /v1/messages and more; a page to talk to it at /.",
        epilog=f"Keys: clients need one where {KEYS_VARIABLE} (separated by commas) or "
        "--api-key-file names any. SIGTERM drains; a second one ends at once.",
    )
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help="a checkpoint's directory (default: the demo model)"
    )
    _add_server_options(parser)
    _add_limits(parser)
    add_engine_options(parser)
    return parser


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default=_DEFAULTS.host, help="the address to listen on (default: %(default)s)"
    )
    group.add_argument(
        "--port", type=int, default=_DEFAULTS.port, help="0: any free one (default: %(default)s)"
    )
    group.add_argument(
        "--model-name",
        action="append",
        metavar="NAME",
        help="what clients call the model; repeatable (default: the directory's name, or "
        f"{DEMO_NAME})",
    )
    group.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="whether chats think where the request does not say (default: yes; the demo: no)",
    )
    group.add_argument("--api-key-file", metavar="FILE", help="API keys, one a line")
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web origin whose pages may call the server; repeatable (default: none)",
    )
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(default: %(default)s)",
    )
    group.add_argument(
        "--log-prompts",
        action="store_true",
        help="write requests' bodies to the log (default: never)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-body-bytes", type=int, default=_DEFAULTS.max_body_bytes, metavar="N",
        help="of one request (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-prompt-tokens", type=int, metavar="N",
        help="of one prompt (default: what the context holds)",
    )  # fmt: skip
    group.add_argument(
        "--max-queue", type=int, default=_DEFAULTS.max_queue, metavar="N",
        help="sequences that may wait for the engine (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency", type=int, default=_DEFAULTS.max_concurrency, metavar="N",
        help="HTTP requests at once (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--request-timeout", type=float, default=_DEFAULTS.request_timeout_s, metavar="SECONDS",
        help="for a whole request (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--drain-timeout", type=float, default=_DEFAULTS.drain_timeout_s, metavar="SECONDS",
        help="for requests in flight when the server is told to stop (default: %(default)s)",
    )  # fmt: skip
