"""The command-line options of a load, which `bench serving` and `bench compare` share."""

import argparse
import math
import os
from typing import Any

from finwhale.bench.load_client import Endpoint
from finwhale.bench.preflight import record_path
from finwhale.bench.record import RESULTS
from finwhale.bench.workload import AGENTS, DATASETS, UNIFORM, Load

EPILOG = "The API key is read from OPENAI_API_KEY."


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
        epilog=EPILOG,
    )
    add = parser.add_argument
    add(
        "--dataset",
        choices=DATASETS,
        default="uniform",
        help="lengths of the requests: uniform in a range; log-normal as those of chats; or "
        "agents, which are sessions of growing prompts with a shared system prompt (default: "
        "uniform)",
    )
    add(
        "--chat",
        action="store_true",
        help="use /v1/chat/completions, with words instead of token ids",
    )
    add(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"number of requests (default: {num_requests})",
    )
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests (of agents: sessions) per second, at random times (default: all at once)",
    )
    add(
        "--concurrency",
        type=int,
        metavar="N",
        help="maximum number of requests at once (default: no limit)",
    )
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
        "--turns",
        type=int,
        default=8,
        metavar="N",
        help="number of requests of an agent's session (default: %(default)s)",
    )
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="cut prompts and outputs so that both together have at most this many tokens; of "
        "agents: end a session before a prompt exceeds it (default: no limit)",
    )
    add(
        "--max-token-id",
        type=int,
        default=4000,
        metavar="N",
        help="largest token id in a prompt (default: %(default)s)",
    )
    add(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="let the model end its output",
    )
    add("--temperature", type=float, default=0.0, help="sampling temperature (default: 0)")
    add("--seed", type=int, default=0, help="seed of prompts and arrival times (default: 0)")
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
    for name in ("dataset", "chat", "request_rate", "concurrency", "turns", "max_length",
                 "max_token_id", "ignore_eos", "temperature", "seed"):  # fmt: skip
        values[name] = getattr(args, name)
    if args.num_requests is not None:
        values["num_requests"] = args.num_requests
    load = Load(**values)
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
