"""Options from a YAML file and from the environment, for the commands that run an engine.

The option --max-model-len has the key `max-model-len` or `max_model_len` in the file, and the
variable FINWHALE_MAX_MODEL_LEN. An option on the command line replaces the one in the environment,
which replaces the one in the file.
"""

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from finwhale.cli.completion import parser_of
from finwhale.errors import FinwhaleError
from finwhale.options import similar

PREFIX = "FINWHALE_"
# The commands whose options can be variables.
COMMANDS = ("serve", "run_batch", "warmup", "generate", "chat", "validate")
# Variables that are no options: API keys, and what tests and CI read (docs/testing.md).
OTHER_VARIABLES = (
    "API_KEYS", "FUZZ_EXAMPLES", "HOSTILE_SECONDS", "LONG", "MIXED_DEVICE", "MIXED_SECONDS",
    "NO_SKIPS", "SCREENSHOTS", "SOAK_SECONDS", "TORCH", "TORCH_INDEX",
)  # fmt: skip
# Kubernetes sets variables for each Service of a namespace, which may be called "finwhale".
_SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://.*")
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def parse_settings(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    environment: Mapping[str, str] = os.environ,
) -> argparse.Namespace:
    """The arguments of a command, with those of --config and of the environment. Raises
    FinwhaleError if the file cannot be read, or if the file or the environment has an unknown
    option or a wrong value.
    """
    environment = {
        name: value for name, value in environment.items() if not _SERVICE_URL.fullmatch(value)
    }
    actions = _actions(parser)
    given = parser.parse_args(argv)
    taken = {action.dest for action in parser._actions if _is_given(action, argv, given)}
    if "model" in taken:
        taken.add("path")  # where a command has both, --model means PATH
    found: dict[str, tuple[str, Any]] = {}  # by option: where the value stands, and the value
    file = given.config or environment.get(PREFIX + "CONFIG")
    if file is not None:
        for key, value in _read(Path(file)).items():
            name = str(key).replace("_", "-")
            if name not in actions or name == "config":
                raise FinwhaleError(f"{file}: unknown option {key!r}{similar(name, actions)}")
            found[name] = (f"{file}: {key}", value)
    _check_variables(environment, actions)
    for name in actions:
        variable = _variable(name)
        if environment.get(variable):
            found[name] = (variable, environment[variable])
    paths: list[str] = []
    options: list[str] = []
    for name, (source, value) in found.items():
        action = actions[name]
        if action.dest in taken or name == "config" or value is None:
            continue
        tokens = _tokens(name, action, source, value)
        (options if action.option_strings else paths).extend(tokens)
    return parser.parse_args([*paths, *options, *argv])


def _variable(name: str) -> str:
    return PREFIX + name.replace("-", "_").upper()


def _check_variables(environment: Mapping[str, str], names: Iterable[str]) -> None:
    """Refuse variables that are an option of no command. Raises FinwhaleError."""
    known = {*map(_variable, names), *(PREFIX + name for name in OTHER_VARIABLES)}
    given = {name for name, value in environment.items() if name.startswith(PREFIX) and value}
    unknown = {
        name for name in given - known if not _SERVICE_LINK.fullmatch(name.removeprefix(PREFIX))
    }
    if not unknown:
        return
    for command in COMMANDS:  # the import of all commands takes a while
        parser = parser_of(f"finwhale.cli.{command}")
        if parser is None:  # its options are unknown without its extra
            return
        known.update(map(_variable, _actions(parser)))
    for name in sorted(unknown - known):
        raise FinwhaleError(f"unknown variable {name}{similar(name, known, PREFIX)}")


def _actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The parser's options by their long names without dashes; PATH is called "model"."""
    found: dict[str, argparse.Action] = {}
    for action in parser._actions:
        if action.dest == "path" or isinstance(action, argparse._HelpAction):
            continue
        for flag in action.option_strings:
            found[flag.removeprefix("--")] = action
    for action in parser._actions:
        if action.dest == "path":
            found["model"] = action
    return found


def _is_given(action: argparse.Action, argv: Sequence[str], parsed: argparse.Namespace) -> bool:
    if not action.option_strings:
        return getattr(parsed, action.dest) is not None
    names = {arg.split("=", 1)[0] for arg in argv}
    return not names.isdisjoint(action.option_strings)


def _read(path: Path) -> dict[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise FinwhaleError(f"cannot read the options: {error}") from error
    except yaml.YAMLError as error:
        raise FinwhaleError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise FinwhaleError(f"{path} must hold one option a line, such as max-model-len: 8192")
    return values


def _tokens(name: str, action: argparse.Action, source: str, value: Any) -> list[str]:
    """The command line that has the same meaning as a value of the file or the environment."""
    if action.nargs == 0:
        return _switch(name, action, source, value)
    values = value if isinstance(value, list) else [value]
    if isinstance(action, argparse._AppendAction):
        if isinstance(value, str):
            values = [part.strip() for part in value.split(",")]
    elif isinstance(value, list):
        values = [",".join(map(str, value))]
    if any(isinstance(one, dict | list | bool) or one is None for one in values):
        raise FinwhaleError(f"{source}: {value!r} is not a value of this option")
    if not action.option_strings:
        return [str(values[0])]
    return [f"--{name}={one}" for one in values]


def _switch(name: str, action: argparse.Action, source: str, value: Any) -> list[str]:
    text = str(value).lower()
    if text not in (*TRUE, *FALSE):
        raise FinwhaleError(f"{source} must be true or false, got {value!r}")
    if text in TRUE:
        return [f"--{name}"]
    opposite = f"--no-{name}"
    return [opposite] if opposite in action.option_strings else []
