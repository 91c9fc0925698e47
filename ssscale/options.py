"""Command-line options. One table declares them and gives parsing, range checks, `--help` and spelling suggestions."""

import difflib
import math
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssscale.errors import UserError

WIDTH = 100  # columns of the text that --help prints
EVERY_KEY = ("",)  # value of Command.keys for a command that takes every key of the configuration

_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_METAVARS = {int: "N", float: "X", bool: "true|false", str: "TEXT"}


@dataclass(frozen=True)
class Option:
    """An option `name=VALUE`, or a flag such as `--print`, whose name begins with dashes.

    default: the value if the option is not given. With None, `Command.parse` leaves the option out of its result.
    metavar: the placeholder for the value in --help.
    at_least, above, at_most: bounds of a number. choices: the allowed values; empty allows all.
    """

    name: str
    type: type
    help: str
    default: Any = None
    metavar: str = ""
    required: bool = False
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def is_flag(self) -> bool:
        return self.name.startswith("-")

    @property
    def form(self) -> str:
        """The option as a user writes it, such as `gpus=N`."""
        value = self.metavar or "|".join(self.choices) or _METAVARS[self.type]
        return self.name if self.is_flag else f"{self.name}={value}"

    def read(self, text: str) -> Any:
        """Returns the value that `text` stands for. Raises UserError if it has the wrong type or is out of range."""
        if self.type is bool:
            if text not in ("true", "false"):
                raise UserError(f"{self.name} must be true or false, not {text!r}")
            return text == "true"
        try:
            value = self.type(text)
        except ValueError:
            raise UserError(f"{self.name} must be {_EXPECTED[self.type]}, not {text!r}") from None
        if self.choices and value not in self.choices:
            raise UserError(f"{self.name} must be {one_of(self.choices)}, not {text!r}{_near(text, self.choices)}")
        bounds = self._bounds()
        below = self.at_least is not None and not value >= self.at_least
        if (
            below
            or (self.above is not None and not value > self.above)
            or (self.at_most is not None and not value <= self.at_most)
        ):
            raise UserError(f"{self.name} must be {bounds}, not {value:g}")
        if self.type is float and not math.isfinite(value):
            raise UserError(f"{self.name} must be a finite number, not {text!r}")
        return value

    def _bounds(self) -> str:
        words = (("at least", self.at_least), ("above", self.above), ("at most", self.at_most))
        return " and ".join(f"{word} {bound:g}" for word, bound in words if bound is not None)

    def describe(self) -> str:
        """Returns the help text of the option with its default and bounds, without `form`."""
        default = str(self.default).lower() if self.type is bool else self.default
        default = f"{default:g}" if self.type is float and default is not None else default
        notes = ["required"] if self.required else []
        notes += [f"default {default}"] if self.default is not None and not self.is_flag else []
        notes += [self._bounds()] if self._bounds() else []
        return self.help + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class Command:
    """A command line: what the command takes, and the texts that describe it.

    about: what the command does, usually the docstring of its module. usage, example: command lines.
    keys: prefixes of the configuration keys that the command passes on; EVERY_KEY allows all keys.
    words: what bare words stand for; empty if the command takes none.
    """

    about: str | None
    usage: str
    example: str
    options: tuple[Option, ...] = ()
    keys: tuple[str, ...] = ()
    words: str = ""

    @property
    def names(self) -> list[str]:
        return [option.name for option in self.options if not option.is_flag]

    def parse(self, argv: list[str]) -> tuple[dict[str, Any], list[str]]:
        """Returns the values of the options by name, and the other arguments: configuration keys and bare words.

        An option that is not given and has no default is absent. Raises UserError for an unknown argument, for a missing
        required option, for a key that is given twice, and for a value that has the wrong type or is out of range.
        """
        check_once(argument for argument in argv if not self._is_word(argument))
        known = {option.name: option for option in self.options}
        values = {option.name: option.default for option in self.options if option.default is not None}
        rest: list[str] = []
        for argument in argv:
            name, equals, text = argument.partition("=")
            option = known.get(name)
            if option is not None and option.is_flag:
                if equals:
                    raise UserError(f"{name} takes no value: write {name}")
                values[name] = True
            elif option is not None and equals:
                values[name] = option.read(text)
            elif self._hands_on(argument):
                rest.append(argument)
            else:
                raise UserError(self._unknown(argument))
        for option in self.options:
            if option.required and values.get(option.name) in (None, ""):
                raise UserError(f"{option.form} is missing: {option.help}")
        return values, rest

    def _hands_on(self, argument: str) -> bool:
        name, equals, _ = argument.partition("=")
        bare = name.lstrip("-")
        if bare in self.names and (bare != name or not equals):
            return False  # --gpus=8, or gpus 8
        flags = [option.name for option in self.options if option.is_flag]
        if difflib.get_close_matches(name, flags, n=1, cutoff=0.7):
            return False  # --prnt, or print=true
        if self._is_word(argument):
            return not argument.startswith("-")
        return name.startswith(self.keys) if self.keys else False

    def _is_word(self, argument: str) -> bool:
        return bool(self.words) and ("=" not in argument or Path(argument).exists())

    def _unknown(self, argument: str) -> str:
        name, equals, text = argument.partition("=")
        bare = name.lstrip("-")
        if bare in self.names:
            return f"{argument!r} is not of the form key=value: write {bare}={text if equals else 'VALUE'}"
        known = [*(option.name for option in self.options), *self.keys]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        near = near or difflib.get_close_matches(bare, [key.lstrip("-") for key in known], n=1, cutoff=0.6)
        forms = {option.name: option.form for option in self.options} | {key: f"{key}*=" for key in self.keys}
        forms |= {name.lstrip("-"): form for name, form in forms.items()}
        if near:
            return f"unknown argument {argument!r}: did you mean {forms[near[0]]}? --help lists all"
        taken = [*([self.words] if self.words else []), *(forms[name] for name in known)]
        return f"unknown argument {argument!r}: this command takes {', '.join(taken) or 'no arguments'}"

    def help_if_asked(self, argv: list[str]) -> None:
        """Prints the help text and exits with code 0 if -h or --help is among the arguments."""
        if {"-h", "--help"} & set(argv):
            print(self.help(), flush=True)
            sys.exit(0)

    def help(self) -> str:
        """Returns the text that --help prints."""
        lines = [*(self.about or "").strip().splitlines(), "", f"usage: {self.usage}"]
        rows = [(option.form, option.describe()) for option in self.options]
        if self.keys == EVERY_KEY:
            rows.append(("key=value", "every other key of the configuration (ssscale/config/schema.py lists them)"))
        elif self.keys:
            keys = ", ".join(f"{key}*" for key in self.keys)
            rows.append(("key=value", f"keys of the configuration to change: {keys}"))
        if rows:
            lines += ["", "options:"]
        left = min(26, max((len(form) for form, _ in rows), default=0)) + 4
        for form, text in rows:
            wrapped = textwrap.wrap(text, WIDTH - left)
            head = f"  {form:<{left - 2}}"
            if len(form) + 4 > left:
                lines.append(f"  {form}")
                head = " " * left
            lines += [head + wrapped[0], *(" " * left + line for line in wrapped[1:])]
        return "\n".join([*lines, "", f"example: {self.example}"])


def check_once(arguments: Iterable[str]) -> None:
    """Raises UserError if two arguments `key=value` have the same key."""
    given: dict[str, str] = {}
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if equals and key in given:
            raise UserError(f"{key} is given twice, as {given[key]} and as {argument}: leave one of them out")
        given[key] = argument


def last_of_each(arguments: Iterable[str]) -> list[str]:
    """Returns the arguments `key=value` without those whose key a later one has.

    For a command that starts another one with keys of its own, which the keys of its user replace.
    """
    last: dict[str, str] = {}
    for argument in arguments:
        key = argument.partition("=")[0]
        last.pop(key, None)  # so that the argument keeps its place: a section may stand between the two
        last[key] = argument
    return list(last.values())


def one_of(names: Iterable[str]) -> str:
    """Joins the names as in `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def _near(text: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(text, list(names), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
