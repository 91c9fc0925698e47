"""The keys of configuration sections and their annotations, including the options of registered classes."""

import dataclasses
import enum
import types
import typing
from collections.abc import Iterator
from typing import Any

from ssscale.config.schema import MixerConfig, ModelChanges, ModelConfig, OptimizerConfig, PositionConfig


def hints(kind: Any) -> dict[str, Any]:
    """Returns the keys of a section with their annotations. A registry's section has one key per registered name."""
    found = typing.get_type_hints(kind)
    found = {name: hint for name, hint in found.items() if typing.get_origin(hint) is not typing.ClassVar}
    return {name: _registered(hint) for name, hint in found.items()}


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
