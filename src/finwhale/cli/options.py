"""Options that several commands share, and the objects that they describe."""

import argparse
import os
import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import finwhale
from finwhale.artefacts import default_directory
from finwhale.checkpoint.config_files import FILE, described
from finwhale.checkpoint.config_files import SAMPLING as GENERATION_CONFIG
from finwhale.config import EngineConfig
from finwhale.options import add_options, marked, options_of, read_options
from finwhale.progress_bars import loading_bar
from finwhale.request import RequestOutput, SamplingParams

DIM, PLAIN = "\033[2m", "\033[0m"  # faint text in a terminal, and normal text
SAMPLING_DEFAULTS = {"temperature": 0.7, "top_p": 0.95}
SAMPLING = marked(SamplingParams, "command")

PATH_HELP = (
    "directory of a checkpoint, or the id of a repository on the Hugging Face Hub, such as "
    "deepseek-ai/DeepSeek-V4-Flash, which is downloaded first; demo-dspark: the "
    "embedded model with its DSpark head; demo-v41: a DeepSeek-V4.1 of 2 MB with random weights "
    "(default: the embedded model with its MTP layer)"
)


def add_path(parser: argparse.ArgumentParser) -> None:
    """Adds the argument PATH and --revision."""
    parser.add_argument("path", nargs="?", metavar="PATH", help=PATH_HELP)
    add_revision(parser)


def add_revision(parser: argparse.ArgumentParser) -> None:
    about = "branch, tag or commit of the repository (default: its main branch)"
    parser.add_argument("--revision", metavar="NAME", help=about)


def add_engine_options(
    parser: argparse.ArgumentParser, without: Collection[str] = (), **defaults: Any
) -> None:
    """Adds --config and the options of the engine; `defaults`: defaults of this command only."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of options, such as max-model-len: 8192. Every option can also be given in "
        "the environment, as FINWHALE_MAX_MODEL_LEN. The command line comes first, then the "
        "environment, then the file",
    )
    names = [one.name for one in options_of(EngineConfig) if one.name not in without]
    add_options(parser.add_argument_group("engine"), EngineConfig, names, **defaults)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that the arguments describe. Raises FinwhaleError: a value is out of range."""
    cache_dir = args.cache_dir or default_directory(os.environ.get("XDG_CACHE_HOME"))
    return read_options(args, EngineConfig, cache_dir=str(cache_dir))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Adds --model and the engine's options, for a command that runs one request at a time."""
    parser.add_argument("--model", metavar="PATH", help=PATH_HELP)
    add_revision(parser)
    add_engine_options(parser, max_num_seqs=1)


def add_sampling_options(parser: argparse.ArgumentParser, *more: str, max_tokens: int) -> None:
    """Adds the sampling options that every command has, and `more` of SamplingParams."""
    defaults: dict[str, Any] = {"max_tokens": max_tokens, **SAMPLING_DEFAULTS}
    group = parser.add_argument_group("sampling")
    add_options(group, SamplingParams, (*SAMPLING, *more), **defaults)
    for action in group._group_actions:
        if action.dest in GENERATION_CONFIG:  # so that the checkpoint's value is taken instead
            shown = f"(default: {action.default}, unless {FILE} has another)"
            action.help = (action.help or "").replace("(default: %(default)s)", shown)
            action.default = None


def sampling_params(args: argparse.Namespace, llm: "finwhale.LLM") -> SamplingParams:
    """The arguments of `add_sampling_options` come first, then the checkpoint, then the command.

    A terminal shows what the checkpoint says.
    """
    given = read_options(args, SamplingParams)
    found = llm.get_default_sampling_params()
    checkpoint = {name: getattr(found, name) for name in GENERATION_CONFIG if name in found.given}
    if checkpoint and sys.stderr.isatty():
        print(described(checkpoint), file=sys.stderr)
    return given.with_defaults({**SAMPLING_DEFAULTS, **checkpoint})


def speed(result: RequestOutput) -> str:
    """How fast a request was, in words."""
    tokens, times = len(result.outputs[0].token_ids), result.times
    prompt = f"{len(result.prompt_token_ids)} prompt tokens"
    if times is None:
        return prompt
    if result.num_cached_tokens:
        prompt += f" ({result.num_cached_tokens} of them cached)"
    rate = (tokens - 1) / max(times.last_token - times.first_token, 1e-9)
    return (
        f"{prompt}, first token after {times.first_token - times.arrival:.2f} s, then {rate:.1f} "
        f"tokens/s over {tokens} tokens"
    )


def load_model(path: Path, config: EngineConfig) -> "finwhale.LLM":
    """Load the checkpoint in a directory, with a progress bar on stderr."""
    with loading_bar() as progress:
        return finwhale.LLM(path, progress=progress, **asdict(config))
