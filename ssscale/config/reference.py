"""Generates docs/reference/config.md from the schema: every key of the configuration with its comment.

python -m ssscale.config.reference        writes the page
"""

import ast
import dataclasses
import enum
import inspect
import io
import textwrap
import tokenize
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssscale.config.kinds import hints, join, spelled, strip_none
from ssscale.config.schema import Config, ModelChanges

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/config.md"
HEAD = """# Configuration keys

`python -m ssscale.config.reference` writes this page from `ssscale/config/schema.py`, the mixers, the position methods and the
optimizers. A run file in `configs/` includes others (`include: [model/1b, ...]`) and sets what differs from the defaults below;
`key=value` arguments come last. Durations of training are tokens; `[]` stands for an index, such as `train.stages.0.tokens`.
"""


def page() -> str:
    """Returns the whole page."""
    sections: dict[str, list[str]] = {}
    for key, kind, default, comment in _keys(Config, Config(), ""):
        section = key.split(".")[0] if "." in key else "run"
        sections.setdefault(section, []).append(f"| `{key}` | {kind} | {default} | {comment} |")
    rows = "| key | type | default | meaning |\n|---|---|---|---|\n"
    return HEAD + "".join(f"\n## {name}\n{rows}" + "\n".join(found) + "\n" for name, found in sections.items())


def _keys(kind: Any, default: Any, key: str) -> Iterator[tuple[str, str, str, str]]:
    """Yields (key, type, default, comment) for every key of a section and its subsections."""
    comments = _comments(kind)
    for name, hint in hints(kind).items():
        inner, value = strip_none(hint), getattr(default, name, None)
        if dataclasses.is_dataclass(inner):
            yield from _keys(inner, value, join(key, name))
        elif typing.get_origin(inner) is list and dataclasses.is_dataclass(typing.get_args(inner)[0]):
            item: Any = typing.get_args(inner)[0]
            yield from _keys(item, item(), f"{join(key, name)}.[]")
        else:
            yield join(key, name), _type(hint), f"`{spelled(value)}`", comments.get(name, "").replace("|", "\\|")


def _comments(kind: type) -> dict[str, str]:
    """Returns the comments next to the fields of a class and of its base classes, by field."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):  # no source: a built-in class, or a section that the registry has made
            continue
        said: dict[int, str] = {}
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT and not token.string.startswith("# noqa"):
                said[token.start[0]] = token.string.removeprefix("#").strip()
        (tree,) = ast.parse(source).body
        for node in tree.body if isinstance(tree, ast.ClassDef) else ():
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                found[node.target.id] = " ".join(said[line] for line in lines if line in said)
    return found


def _type(hint: Any) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(_type(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "null"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{entry.value}`" for entry in hint)
    if typing.get_origin(hint) is None:
        return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(
            hint.__name__, "part of `model`" if hint is ModelChanges else hint.__name__
        )
    return f"list of {_type(typing.get_args(hint)[-1])}" if typing.get_origin(hint) is not dict else _of_dict(hint)


def _of_dict(hint: Any) -> str:
    return f"mapping of names to {_type(typing.get_args(hint)[1])}s"


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
