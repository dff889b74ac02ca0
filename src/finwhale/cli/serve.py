"""`finwhale serve`: serve a model over the OpenAI and Anthropic protocols. Imports no torch."""

import argparse
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from finwhale.chat.dialect import Dialect
from finwhale.chat.tokenizer import Tokenizer
from finwhale.checkpoint.config_files import read_config, sampling_defaults
from finwhale.checkpoint.location import checkpoint_directory, is_demo
from finwhale.cli.options import add_engine_options, add_path, engine_config
from finwhale.cli.settings import parse_settings
from finwhale.distributed.rank import Placement
from finwhale.errors import FinwhaleError
from finwhale.models.registry import DIALECTS, parse_config
from finwhale.options import Parser, add_options, read_options
from finwhale.server.config import ServerConfig
from finwhale.server.edge.listening import LOCAL_HOSTS, is_loopback
from finwhale.server.loading import load_engine
from finwhale.server.observe import logs
from finwhale.server.run import serve

KEYS_VARIABLE = "FINWHALE_API_KEYS"
DEMO_NAME = "finwhale-demo"


def run(argv: Sequence[str]) -> int:
    args = _parse(argv)
    config = _server_config(args, os.environ)
    placement = Placement.find(os.environ)
    if placement is not None and placement.rank.index:
        logs.configure(config.log_level, config.log_format)
        import_module("finwhale.distributed.hosts").work_at(placement)
    opened = open_checkpoint(args.path, args, config, placement)
    read_keys = partial(_api_keys, args, os.environ)
    restore = logs.configure(config.log_level, config.log_format, waits=False)
    try:
        return serve(config, *opened, read_keys)
    finally:
        restore()


def open_checkpoint(
    path: str | None, args: argparse.Namespace, config: ServerConfig, placement: Placement | None
) -> tuple[Tokenizer | None, Dialect, Callable[..., object], Mapping[str, Any]]:
    """The tokenizer and the chat dialect of a checkpoint, a function that opens its engine, and
    the sampling defaults of its requests. Raises FinwhaleError if there is no such checkpoint, or
    if an option is wrong.
    """
    directory = checkpoint_directory(path, args.revision)
    if not directory.is_dir():
        raise FinwhaleError(f"no checkpoint: {directory} is not a directory")
    tokenizer = Tokenizer.find(directory)
    engine = engine_config(args)
    if engine.prefix_salt is None and engine.prefix_store is None:
        # Create the salt here, so that all engine processes of this server share it.
        engine = replace(engine, prefix_salt=secrets.token_hex(16))
    one_host = placement is None and engine.distributed_executor == "spawn"
    if one_host and not config.enable_rollout_endpoints:  # a trainer may be on another host
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")
    logs.configure(config.log_level, config.log_format)
    load = partial(load_engine, directory, config.log_level, config.log_format, engine, placement)
    dialect = DIALECTS[parse_config(read_config(directory)).model_type](directory)
    # A trainer must know all parameters of its rollouts.
    reads = engine.generation_config == "auto" and not config.enable_rollout_endpoints
    defaults = sampling_defaults(directory) if reads else {}
    return tokenizer, dialect, load, defaults


def _server_config(args: argparse.Namespace, environment: Mapping[str, str]) -> ServerConfig:
    """The server's options from the arguments and the environment. Raises FinwhaleError."""
    return read_options(
        args,
        ServerConfig,
        **options_of_model(args, args.path),
        allowed_hosts=_allowed_hosts(args, environment),
        otlp_traces_endpoint=_traces_endpoint(args, environment),
        api_keys=_api_keys(args, environment),
    )


def _allowed_hosts(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The hosts that requests may name; empty: any.

    A server that listens on a loopback address and needs no key trusts every local program.
    Web pages in a browser here are not to be trusted.
    """
    if args.allowed_hosts:
        return tuple(args.allowed_hosts)
    local = args.uds is None and (args.host == "localhost" or is_loopback(args.host))
    has_keys = args.api_keys or args.api_key or environment.get(KEYS_VARIABLE)
    return LOCAL_HOSTS if local and not has_keys else ()


def _traces_endpoint(args: argparse.Namespace, environment: Mapping[str, str]) -> str | None:
    """The URL for traces, by the option or by OpenTelemetry's variables. Raises FinwhaleError."""
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    url: str | None = (
        args.otlp_traces_endpoint
        or environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        or (f"{base.rstrip('/')}/v1/traces" if base else None)
    )
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return None
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    for name, value, wanted in (
        ("OTEL_TRACES_EXPORTER", exporter, "otlp"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", protocol, "http/protobuf"),
    ):
        if url is not None and value != wanted:
            raise FinwhaleError(f"{name} is {value}; Finwhale sends traces with {wanted} only")
    return url


def options_of_model(args: argparse.Namespace, path: str | None) -> dict[str, Any]:
    """The options of ServerConfig whose defaults depend on the checkpoint that `path` names."""
    demo = is_demo(path)
    name = DEMO_NAME
    if path is not None and not demo:  # a repository is called by its whole id
        name = Path(path).resolve().name if Path(path).exists() else path
    thinking = args.default_thinking
    return {
        "model_names": tuple(args.model_names or [name]),
        "default_thinking": not demo if thinking is None else thinking,
    }


def _api_keys(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of the files, and those of the command line and the environment, each once. Raises
    FinwhaleError if a file cannot be read, or has no key.
    """
    given = [*(args.api_key or ()), *environment.get(KEYS_VARIABLE, "").split(",")]
    keys = [key.strip() for key in given]
    for path in args.api_keys or ():
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FinwhaleError(f"cannot read the API keys: {error}") from error
        lines = [line.strip() for line in text.splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise FinwhaleError(f"{path} has no API key: write one on each line")
        keys += found
    return tuple(dict.fromkeys(key for key in keys if key))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    args = parse_settings(parser, argv)
    if args.model is not None:
        if args.path is not None:
            parser.error("give the checkpoint's directory once: as PATH or as --model PATH")
        args.path = args.model
    return args


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="finwhale serve",
        description="Serve a model over HTTP: /v1/chat/completions, /v1/completions, "
        "/v1/responses, /v1/messages and more. The page at / has a chat with the model.",
        epilog=f"The environment variable {KEYS_VARIABLE} may hold API keys too, separated by "
        "commas. On SIGTERM the server finishes the running requests and ends; a second SIGTERM "
        "ends it at once. Under torchrun, each of its processes holds one rank of the model, and "
        "rank 0 serves.",
    )
    add_path(parser)
    parser.add_argument("--model", metavar="PATH", help="the same as PATH, as in vLLM's command")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="API key that a request may carry; repeatable. Other users of this machine can see "
        "it in the list of processes: prefer --api-key-file",
    )
    add_options(parser.add_argument_group("server"), ServerConfig, default_thinking=None)
    add_engine_options(parser, watchdog_seconds=60.0)
    return parser
