"""The command-line options of a load, which `bench serving` and `bench compare` share."""

import argparse
import os
from typing import Any

from finwhale.bench.load_client import Endpoint
from finwhale.bench.preflight import record_path
from finwhale.bench.record import RESULTS
from finwhale.bench.workload import AGENTS, UNIFORM, Load
from finwhale.options import add_options, read_options


def load_parser(name: str, doc: str | None, num_requests: str) -> argparse.ArgumentParser:
    """A parser with the options of a load, and --record.

    Args:
        name: name of the benchmark.
        num_requests: the default number of requests, in words.
    """
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog=f"finwhale bench {name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="The API key is read from OPENAI_API_KEY.",
    )
    add_options(parser, Load)
    add = parser.add_argument
    about = f"number of requests (default: {num_requests})"
    add("--num-requests", type=int, metavar="N", help=about)
    add(
        "--input-tokens",
        type=_span,
        metavar="N[:M]",
        help="length of a prompt, or a range of lengths; of agents: what each turn adds "
        f"(default: {_default(UNIFORM.input_tokens)}; agents: {_default(AGENTS.input_tokens)})",
    )
    add(
        "--output-tokens",
        type=_span,
        metavar="N[:M]",
        help="length of an output, or a range of lengths "
        f"(default: {_default(UNIFORM.output_tokens)}; agents: {_default(AGENTS.output_tokens)})",
    )
    add(
        "--shared-prefix",
        type=int,
        metavar="N",
        help="number of tokens with which all prompts begin; of agents: the system prompt "
        f"(default: {UNIFORM.shared_prefix}; agents: {AGENTS.shared_prefix})",
    )
    add(
        "--record",
        type=record_path,
        nargs="?",
        const=str(RESULTS / f"{name}.jsonl"),
        metavar="FILE",
        help="append the results to this JSONL file (without FILE: %(const)s)",
    )
    return parser


def read_load(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Load:
    """The load that the arguments describe.

    Raises:
        FinwhaleError: a value is out of range.
    """
    sized = ("input_tokens", "output_tokens", "shared_prefix")
    given = {name: getattr(args, name) for name in sized if getattr(args, name) is not None}
    if args.dataset == "chat" and given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        parser.error(f"--dataset chat has its own lengths: leave out {flags}")
    sizes = AGENTS if args.dataset == "agents" else UNIFORM
    values: dict[str, Any] = {name: getattr(sizes, name) for name in sized} | given
    if args.num_requests is not None:
        values["num_requests"] = args.num_requests
    load = read_options(args, Load, **values)
    load.check()
    return load


def read_endpoint(url: str, model: str) -> Endpoint:
    """An endpoint; its URL may end in /v1."""
    root = url.rstrip("/").removesuffix("/v1")
    return Endpoint(url=root, model=model, api_key=os.environ.get("OPENAI_API_KEY"))


def _default(span: tuple[int, int]) -> str:
    return str(span[0]) if span[0] == span[1] else f"{span[0]}:{span[1]}"


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    span = int(low), int(high or low)
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"must be N or LOW:HIGH, from 1 on, got {text!r}")
    return span
