"""Options: each is declared once, as a dataclass field with help text.

`add_options` turns the fields into command-line arguments, and `read_options` turns the parsed
arguments into the dataclass. `tools/pages.py` writes docs/options.md from the same fields.
"""

import argparse
import difflib
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

from finwhale.errors import FinwhaleError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a dataclass.

    Attributes:
        kind: the type of its value; None: the value is one of `words`.
        words: words that the value may be.
        optional: whether the value may be None.
        help: what the option does, in one line.
        flag: the command-line flag. One that begins with "--no-" sets a bool to False.
        unset: what a default of None, or an empty one, means.
        metavar: the name of the value in `--help`; None: argparse chooses it.
        least, above, most: bounds of a number, which `check_options` checks; None: no bound.
        items: most items of a list that a client of the server may send.
        marks: names of lists of options to which this one belongs (`marked`).
    """

    name: str
    default: Any
    kind: Any
    words: tuple[str, ...]
    optional: bool
    help: str
    flag: str
    unset: str | None = None
    metavar: str | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    items: int | None = None
    marks: tuple[str, ...] = ()

    def argument(self, default: Any) -> dict[str, Any]:
        """Keyword arguments of `ArgumentParser.add_argument`, with this command's default value."""
        is_unset = default is None or default == ()
        shown = f" (default: {self.unset})" if is_unset and self.unset else ""
        text = (self.help + shown).replace("%", "%%")  # argparse formats it
        if not is_unset and self.kind is not bool:
            text += " (default: %(default)s)"
        found = {"dest": self.name, "default": default, "help": text}
        if self.kind is bool:
            switch = "store_true" if default is False else argparse.BooleanOptionalAction
            return {**found, "action": "store_false" if self.flag.startswith("--no-") else switch}
        if self.kind is None:
            return {**found, "choices": self.words}
        found["metavar"] = self.metavar
        if self.kind in (tuple[str, ...], Sequence[str]):
            return {**found, "default": None, "action": "append", "help": f"{text}; repeatable"}
        if self.kind == tuple[int, ...]:
            return {**found, "type": _integers}
        return {**found, "type": partial(word_or_number, self.words) if self.words else self.kind}


def option(default: T, help: str, **given: Any) -> T:
    """A dataclass field that is an option. `given` are attributes of Option, from `flag` on.

    The default flag is "--" and the field's name. An "_s" at its end is left out, and the default
    metavar is then SECONDS. That of other integers is N.
    """
    return field(default=default, metadata={"help": help, **given})


def _options_of(config: type) -> tuple[Option, ...]:
    """The options that a dataclass declares, in order."""
    hints = typing.get_type_hints(config)
    found = []
    for declared in fields(config):
        if "help" not in declared.metadata:
            continue
        hint, name = hints[declared.name], declared.name
        given = {"flag": "--" + name.removesuffix("_s").replace("_", "-"), **declared.metadata}
        if name.endswith("_s"):
            given = {"metavar": "SECONDS", **given}
        union = get_origin(hint) in (typing.Union, types.UnionType)
        kinds = get_args(hint) if union else (hint,)
        given["optional"] = types.NoneType in kinds
        literals = [kind for kind in kinds if get_origin(kind) is Literal]
        given["words"] = tuple(word for literal in literals for word in get_args(literal))
        kinds = tuple(kind for kind in kinds if kind not in (*literals, types.NoneType))
        given["kind"] = kinds[-1] if kinds else None  # of `str | Sequence[str]` the sequence
        given = {"metavar": "N", **given} if given["kind"] is int else given
        found.append(Option(name=declared.name, default=declared.default, **given))
    return tuple(found)


# mypy would refuse `type[T]` as an argument of a cached function.
options_of: Callable[[type], tuple[Option, ...]] = cache(_options_of)


def marked(config: type, mark: str) -> tuple[str, ...]:
    """The names of a dataclass's options that have a mark, in order."""
    return tuple(one.name for one in options_of(config) if mark in one.marks)


def add_options(
    parser: argparse._ActionsContainer,
    config: type,
    names: Collection[str] | None = None,
    **defaults: Any,
) -> None:
    """Add command-line arguments for the options of a dataclass.

    Args:
        names: the options to add; None: all of them.
        defaults: default values of this command that differ from the dataclass's.
    """
    for one in options_of(config):
        if names is None or one.name in names:
            parser.add_argument(one.flag, **one.argument(defaults.get(one.name, one.default)))


def read_options(args: argparse.Namespace, config: type[T], **more: object) -> T:
    """Make the dataclass `config` from the arguments that `add_options` has declared; `more` are
    further fields, which replace values from `args`. Raises FinwhaleError if a value is out of
    range.
    """
    given = {one.name: getattr(args, one.name, None) for one in options_of(config)}
    values = {name: value for name, value in given.items() if value is not None}
    return config(**{**values, **more})


def check_options(config: Any, error: type[FinwhaleError] = FinwhaleError) -> None:
    """Check the types and the bounds of the options of a dataclass instance. Raises `error` if a
    value has a wrong type, or is out of bounds.
    """
    for one in options_of(type(config)):
        value = getattr(config, one.name)
        if (wanted := _wanted(one, value)) is not None:
            raise error(f"{one.name} must be {wanted}, got {value!r}")


def _wanted(one: Option, value: Any) -> str | None:
    """What an option's value must be; None: it is that."""
    if value in one.words or (value is None and one.optional):
        return None
    words = "".join(f' or "{word}"' for word in one.words)
    none = " or None" if one.optional else ""
    if one.kind is None:
        return (words + none).removeprefix(" or ")
    if one.kind is bool:
        return None if isinstance(value, bool) else f"True or False{none}"
    if one.kind not in (int, float):
        return None
    if isinstance(value, bool) or not isinstance(value, int | one.kind):
        return f"{'an integer' if one.kind is int else 'a number'}{words}{none}"
    low = -math.inf if one.least is None else one.least
    high = math.inf if one.most is None else one.most
    # A comparison with NaN is false.
    if low <= value <= high and (one.above is None or value > one.above):
        return None
    if one.above is not None:
        return f"above {one.above}" + (f" and at most {high}" if one.most is not None else "")
    return (f"at least {low}" if one.most is None else f"{low} to {high}") + words


class Parser(argparse.ArgumentParser):
    """Takes no abbreviations. A mistake is one line, with the option that was probably meant."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else list(args)
        known = self._option_string_actions
        for one in given[: given.index("--") if "--" in given else None]:
            flag = one.partition("=")[0]
            if flag.startswith("--") and " " not in flag and flag not in known:
                meant = similar(flag, known, "--")
                self.error(f"unrecognized arguments: {one}{meant}")
        return super().parse_known_args(given, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} ({self.prog} --help lists the options)\n")


def similar(name: str, names: Iterable[str], prefix: str = "") -> str:
    """Asks whether a similar one of `names`, which all begin with `prefix`, was meant."""
    parts = [one.removeprefix(prefix) for one in names]
    close = difflib.get_close_matches(name.removeprefix(prefix), parts, 1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def word_or_number(words: Sequence[str], text: str) -> str | int:
    """The value of an argument that is a number or one of `words`. Raises ArgumentTypeError."""
    if text in words or text.isdecimal():
        return text if text in words else int(text)
    listed = " or ".join(f'"{word}"' for word in words)
    raise argparse.ArgumentTypeError(f"expected a number or {listed}, got {text!r}")


_ADDRESS = re.compile(r"(?:(?P<host>\*|\[[0-9a-fA-F:]+\]|[\w.-]+):)?(?P<port>[0-9]{1,5})")


def host_and_port(name: str, text: str, least: int = 1) -> tuple[str, int]:
    """The parts of [HOST:]PORT; the default host is 127.0.0.1, and the lowest port is `least`.
    Raises FinwhaleError, which names the option.
    """
    found = _ADDRESS.fullmatch(text.strip())
    if found is None or not least <= int(found["port"]) < 65536:
        raise FinwhaleError(f"{name} must be [HOST:]PORT (5557, 10.0.0.1:5557), got {text!r}")
    return (found["host"] or "127.0.0.1").strip("[]"), int(found["port"])


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        message = f"expected integers separated by commas, got {text!r}"
        raise argparse.ArgumentTypeError(message) from None
