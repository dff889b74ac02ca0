"""Options of the engine that the commands which start one for long share."""

import argparse
from collections.abc import Mapping
from typing import Any

from finwhale.artefacts import default_directory
from finwhale.config import DraftTokens, EngineConfig, add_wo_a_input

NAMES = (
    "device",
    "dtype",
    "activations",
    "wo_a_input",
    "load_format",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "cache_memory_bytes",
    "enable_prefix_caching",
    "watchdog_seconds",
    "enforce_eager",
    "compile",
    "draft_tokens",
)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add_run_options(group)
    group.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        help="dummy: random weights from config.json alone",
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
    group.add_argument(
        "--enforce-eager", action="store_true", default=None, help="no captured graphs"
    )


def add_run_options(parser: argparse._ActionsContainer) -> None:
    """Of every command that runs a model."""
    parser.add_argument(
        "--device", help='"cpu", "cuda" or "cuda:N" (default: a GPU if there is one)'
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of activations and cache (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    parser.add_argument(
        "--activations",
        choices=("as-trained", "exact"),
        help="round activations to FP8 and FP4 as the model was trained, or not at all "
        "(default: as-trained)",
    )
    add_wo_a_input(parser)
    parser.add_argument(
        "--max-model-len", type=int, metavar="N", help="tokens of prompt and output at most"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="run decoder layers compiled ahead of time: the first start takes minutes for it, "
        "later ones load what it kept",
    )
    parser.add_argument(
        "--draft-tokens",
        type=_draft_tokens,
        metavar="N|auto|0",
        help="tokens that the MTP layer drafts for each step, at most 3, or as many as pay; the "
        "text stays the same (default: 0)",
    )
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="where compiled kernels are kept for the next start (default: finwhale in "
        "$XDG_CACHE_HOME or ~/.cache)",
    )


def _draft_tokens(text: str) -> DraftTokens:
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f'a number or "auto" is wanted, got {text!r}')
    return int(text)


def cache_directory(args: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """What was asked for, or the default."""
    chosen = args.cache_dir or default_directory(environment.get("XDG_CACHE_HOME"))
    return str(chosen)


def engine_options(args: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Keyword arguments of `LLM` for what was given.

    Raises:
        FinwhaleError: a value that no engine takes: told before anything is started for one.
    """
    found = {name: getattr(args, name) for name in NAMES if getattr(args, name) is not None}
    found["cache_dir"] = cache_directory(args, environment)
    EngineConfig(**{name: value for name, value in found.items() if name != "load_format"})
    return found
