"""`finwhale serve`: the model behind OpenAI's and Anthropic's protocols."""

import argparse
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from finwhale.chat.tokenizer import Tokenizer
from finwhale.cli.options import add_draft_option
from finwhale.demo import DEMO_PATH
from finwhale.errors import FinwhaleError

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
    options = {
        name: getattr(args, name) for name in _ENGINE_OPTIONS if getattr(args, name) is not None
    }
    logs.configure(args.log_level)
    return serve(config, tokenizer, partial(load_engine, args.path, args.log_level, options))


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


_ENGINE_OPTIONS = (
    "device",
    "dtype",
    "activations",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "cache_memory_bytes",
    "enable_prefix_caching",
    "watchdog_seconds",
    "enforce_eager",
    "draft_tokens",
)


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
    _add_engine_options(parser)
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


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--device", help='"cpu", "cuda" or "cuda:N" (default: a GPU if there is one)'
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="of activations and cache")
    group.add_argument(
        "--activations",
        choices=("as-trained", "exact"),
        help="round activations to FP8 as the model was trained, or not at all",
    )
    group.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        help="dummy: random weights from config.json alone",
    )
    group.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of prompt and output at most"
    )
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="sequences that run at once")
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="tokens of one forward"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="of a GPU's memory, what weights, workspaces and cache may take",
    )
    group.add_argument(
        "--no-prefix-caching",
        dest="enable_prefix_caching",
        action="store_false",
        default=None,
        help="forget what was read when a request ends",
    )
    group.add_argument(
        "--watchdog-seconds",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="a step that takes longer has all stacks written to the log (default: %(default)s)",
    )
    group.add_argument(
        "--cache-memory-bytes", type=int, metavar="N", help="memory for the paged state"
    )
    add_draft_option(group)
    group.add_argument(
        "--enforce-eager", action="store_true", default=None, help="no captured graphs"
    )
