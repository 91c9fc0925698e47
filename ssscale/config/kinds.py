"""The keys of configuration sections and their annotations, including the options of registered classes."""

import dataclasses
import difflib
import enum
import functools
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from ssscale.config.schema import MixerConfig, ModelChanges, ModelConfig, OptimizerConfig, PositionConfig


def hints(kind: Any) -> dict[str, Any]:
    """Returns the keys of a section with their annotations. A registry's section has one key per registered name."""
    return {name: _registered(hint) for name, hint in _annotations(kind).items()}


@functools.cache  # a load asks several times for each section
def _annotations(kind: Any) -> dict[str, Any]:
    found = typing.get_type_hints(kind)
    return {name: hint for name, hint in found.items() if typing.get_origin(hint) is not typing.ClassVar}


def _registered(hint: Any) -> Any:
    return hint.registry.section(hint) if hint in (MixerConfig, PositionConfig, OptimizerConfig) else hint


def keys(kind: Any, key: str) -> list[str]:
    """Returns all dotted keys below `key`. [] stands for the index of a list."""
    return list(_walk(kind, key))


def _walk(kind: Any, key: str) -> Iterator[str]:
    kind = strip_none(kind)
    kind = ModelConfig if kind is ModelChanges else kind
    if dataclasses.is_dataclass(kind):
        for name, hint in hints(kind).items():
            yield from _walk(hint, join(key, name))
    elif typing.get_origin(kind) is list and dataclasses.is_dataclass(typing.get_args(kind)[0]):
        yield from _walk(typing.get_args(kind)[0], join(key, "[]"))
    else:
        yield key


def strip_none(kind: Any) -> Any:
    return next(a for a in kind.__args__ if a is not type(None)) if isinstance(kind, types.UnionType) else kind


def is_leaf(kind: Any) -> bool:
    kind = strip_none(kind)
    return not dataclasses.is_dataclass(kind) and typing.get_origin(kind) is None


def join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def registered(kind: Any, name: str, value: object) -> list[str]:
    """Returns what has options in the section `kind`, names like `name` if there are any. `name` is not one of them.

    The result is empty if `value` cannot be the options of something that a plugin registers.
    """
    if not isinstance(value, dict) or not hasattr(kind, "registry"):
        return []
    return difflib.get_close_matches(name, kind.registry) or list(kind.registry)


def words(kind: Any) -> list[str]:
    """Returns the words that a union accepts besides its first type."""
    members = kind.__args__[1:] if isinstance(kind, types.UnionType) else ()
    return [
        name for word in members if isinstance(word, type) and issubclass(word, enum.Enum) for name in word.__members__
    ]


def expected(kind: Any) -> str:
    """Describes the values of a type, as in "a whole number" or "one of none, full"."""
    if isinstance(kind, types.UnionType):
        return one_of([expected(strip_none(kind)), *words(kind)])
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    if origin is list:
        return "a list"
    if kind is ModelChanges:
        return "a section"
    if origin is dict:
        return "a section of `name: number`"
    if issubclass(kind, enum.Enum):
        return "one of " + ", ".join(kind.__members__)
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


def one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def spelled(value: object) -> str:
    """Returns a value as it is written in a run file, such as `false`, `null` or `[softmax, ssmax]`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(spelled, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {spelled(entry)}' for name, entry in value.items())}}}"
    return str(value)
