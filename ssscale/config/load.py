"""Loading of configurations: `config=NAME key=value ...` becomes a frozen `Config`.

Values are merged in this order: dataclass defaults, included YAML files, the run file, arguments. OmegaConf reads the
YAML and interpolates. The types are built here for two reasons: OmegaConf's structured nodes cannot merge into lists of
frozen dataclasses, and every mistake must give one sentence that names its key and, for YAML, its file.
"""

import copy
import dataclasses
import difflib
import functools
import os
import re
import types
import typing
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ssscale.config.kinds import expected, hints, is_leaf, join, keys, one_of, registered, strip_none, words
from ssscale.config.registry import IN_PLUGIN
from ssscale.config.schema import Config, ModelChanges, ModelConfig
from ssscale.config.yaml_nodes import check_nodes
from ssscale.errors import UserError

_INSTALLED = Path(__file__).resolve().parents[1] / "configs"  # in an installed wheel
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).resolve().parents[2] / "configs"
CHOOSING = ("kind", "method", "name", "type")  # names of keys that choose what a section configures

Tree = dict[str, Any]


def load_config(arguments: list[str], options: Iterable[str] = ()) -> Config:
    """Returns the run that `["config=3b_sb", "train.microbatch=2", ...]` describes.

    The value of `config` is the name of a file in configs/ or a path that ends in .yaml. Keys are sections and list
    indices joined by dots (`train.stages.0.tokens=1e9`); values are YAML. `options` are the command's own options; they
    are only used to suggest a correction of a misspelt key. By default the run has the name of its file. Raises
    UserError.
    """
    pairs = [_split(argument) for argument in arguments]
    names = [value for key, value in pairs if key == "config" and value]
    if len(names) != 1:
        problem = "is missing" if not names else "is given more than once"
        raise UserError(f"config=NAME {problem}: name one of {', '.join(run_names())} or a path ending in .yaml")
    path = _find(names[0], CONFIGS, "config=" + names[0])
    tree = {"name": path.stem} | _read(path, ())
    changes = [argument for argument, (key, _) in zip(arguments, pairs, strict=True) if key != "config"]
    return _build_config(_change(_merge(_plain(Config()), tree), changes, options), "")


def change(config: Config, arguments: list[str]) -> Config:
    """Returns `config` with changes such as `["model.position.rope.base=500000", ...]`. Raises UserError."""
    return _build_config(_change(_plain(config), arguments, ()), "")


def _change(tree: Tree, arguments: list[str], options: Iterable[str]) -> Tree:
    for argument in arguments:
        key, text = _split(argument)
        _set(tree, key, _parse(key, text), options)
    return tree


def to_yaml(config: Config) -> str:
    """Returns every key of the run as YAML, so that `from_yaml` gives the same `Config` even if defaults change.

    Options of mixers, positions and optimizers that the run does not use are left out unless they are set: the reader
    of the file may not have them registered.
    """
    tree = _plain(config)
    model, optimizer = config.model, config.optimizer
    sections = (
        (model.mixer, tree["model"]["mixer"], model.mixers),
        (model.position, tree["model"]["position"], [model.position.method]),
        (optimizer, tree["optimizer"], [optimizer.name]),
    )
    for given, plain, names in sections:
        for name in type(given).registry:
            options = getattr(given, name)
            if name not in names and options == type(options)():
                del plain[name]
    return OmegaConf.to_yaml(OmegaConf.create(tree))


def from_yaml(text: str, source: str = "config.yaml") -> Config:
    """Returns the `Config` that `to_yaml` wrote. `source` names the file in errors. Raises UserError."""
    tree = _yaml(text, source)
    _check(Config, tree, "", source)
    return _build_config(_merge(_plain(Config()), tree), source)


def read_yaml(path: Path) -> Config:
    """Returns the `Config` in a file that `to_yaml` wrote. Raises UserError, or FileNotFoundError if it is missing."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is broken: {error}") from error
    return from_yaml(text, str(path))


def save(config: Config, path: str | Path) -> None:
    Path(path).write_text(to_yaml(config), encoding="utf-8")


def changed_model(model: ModelConfig, changes: ModelChanges, key: str) -> ModelConfig:
    """Returns the model with the changes of a stage. key: the key of the changes, for error messages."""
    return typing.cast(ModelConfig, _build(ModelConfig, _merge(_plain(model), changes), key, ""))


def run_names() -> list[str]:
    """Returns the names that `config=` accepts."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _find(name: str, folder: Path, asked_by: str) -> Path:
    """Finds a configuration file. Names refer to configs/; a path that ends in .yaml is relative to the including file.

    Paths in arguments are relative to the working directory.
    """
    if name.endswith(".yaml"):
        path = Path(name) if folder is CONFIGS else folder / name
        if os.path.isfile(path):  # also False for names that no file can have
            return path
        raise UserError(f"{asked_by}: there is no file {path}")
    path = CONFIGS / f"{name}.yaml"
    if name and os.path.isfile(path):
        return path
    if os.path.isfile(name if folder is CONFIGS else folder / name):
        raise UserError(f"{asked_by}: the name of a configuration file ends in .yaml")
    known = sorted(str(p.relative_to(CONFIGS).with_suffix("")) for p in CONFIGS.rglob("*.yaml"))
    if folder is CONFIGS and "/" not in name:
        known = run_names()
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {one_of(near)}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"{asked_by}: there is no configs/{name}.yaml; {hint}")


def _read(path: Path, above: tuple[Path, ...]) -> Tree:
    """Reads a YAML file and merges it over its includes. `above`: the files that include it."""
    source = _shown(path)
    if path.resolve() in above:
        chain = " → ".join(_shown(p) for p in (*above, path))
        raise UserError(f"{source} includes itself: {chain}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} cannot be read: {error}") from None
    own = _yaml(text, source)
    if not own:
        raise UserError(f"{source} is empty: it would train the defaults, which are no recipe")
    includes = own.pop("include", None) or []
    if not isinstance(includes, list) or not all(isinstance(name, str) for name in includes):
        raise UserError(
            f"include in {source} must be a list of names such as [model/3b, data/pretrain], not {includes!r}"
        )
    _check(Config, own, "", source)
    tree: Tree = {}
    for name in includes:
        found = _find(name, path.parent, f"include of {name!r} in {source}")
        tree = _merge(tree, _read(found, (*above, path.resolve())))
    return _merge(tree, own)


def _yaml(text: str, source: str) -> Tree:
    try:
        tree = copy.deepcopy(_parsed(text))
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{source} is not valid YAML{line}: {error.problem or error.context}") from None
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        raise UserError(f"{source} is not valid YAML: {_first_line(error)}") from None
    except RecursionError:
        raise UserError(f"{source} is nested too deeply, or contains itself") from None
    except (AssertionError, TypeError):  # OmegaConf raises these if the document is a number
        raise UserError(f"{source} must hold `key: value` lines, not one value") from None
    if not isinstance(tree, dict):
        raise UserError(f"{source} must hold `key: value` lines, not a list")
    return typing.cast(Tree, tree)


@functools.lru_cache(maxsize=64)  # a study reads the same files for each of its runs
def _parsed(text: str) -> Any:
    check_nodes(text)
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def _shown(path: Path) -> str:
    """Returns configs/... for our own files, whatever the working directory is."""
    root = CONFIGS.parent
    return str(path.resolve().relative_to(root)) if path.resolve().is_relative_to(root) else str(path)


def _split(argument: str) -> tuple[str, str]:
    key, equals, value = argument.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", key):
        bare = argument.lstrip("-").partition("=")[0] or "key"
        if argument.removesuffix(".yaml") in run_names() or os.path.isfile(argument):
            raise UserError(f"{argument!r} is not of the form key=value: write config={argument}")
        raise UserError(f"{argument!r} is not of the form key=value: write {bare}=VALUE, without spaces or dashes")
    return key, value


def _parse(key: str, text: str) -> Any:
    if not text.strip():
        raise UserError(f"{key}= has no value: write {key}=VALUE, or {key}=null for none")
    try:
        check_nodes(text)
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        shown = text if len(text) <= 100 else f"{text[:100]}…"
        raise UserError(f"{key}={shown}: the value is not valid YAML; quote it if it is meant as text") from None


def _set(tree: Tree, key: str, value: Any, options: Iterable[str]) -> None:
    """Sets one argument in the tree, which holds every section. Sections are merged; a `mix` or a list is replaced."""
    *above, name = key.split(".")
    kind: Any = Config
    node: Any = tree
    for depth, part in enumerate(above):
        index, kind = _step(kind, node, part, key, ".".join(above[:depth]), options)
        if isinstance(node, dict) and node.get(index) is None:
            node[index] = {}
        node = node[index]
    index, kind = _step(kind, node, name, key, ".".join(above), options)
    _check(kind, value, key, "")
    if dataclasses.is_dataclass(kind) and isinstance(node, dict):
        value = _merge(node.get(index) or {}, value)
    node[index] = value


def _step(kind: Any, node: Any, part: str, key: str, here: str, options: Iterable[str]) -> tuple[str | int, Any]:
    """Resolves one component of a dotted key. Returns the index into `node` and the annotation of the value there."""
    kind = strip_none(kind)
    kind = ModelConfig if kind is ModelChanges else kind
    if dataclasses.is_dataclass(kind) and isinstance(node, dict):
        known = hints(kind)
        if part in known:
            return part, known[part]
    elif typing.get_origin(kind) is list and isinstance(node, list):
        if part.isdecimal() and int(part) < len(node):
            return int(part), typing.get_args(kind)[0]
        raise UserError(f"{key}: {here} has {len(node)} entries, numbered from 0; {part!r} is not one of them")
    elif typing.get_origin(kind) is dict and isinstance(node, dict):
        return part, typing.get_args(kind)[1]
    last = f"{here}.{part}" == key
    raise UserError(_unknown(key, "", options, registered(kind, part, None if last else {})))


def _build_config(tree: Tree, source: str) -> Config:
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {_first_line(error)}{_in(source)}") from None
    return typing.cast(Config, _build(Config, resolved, "", source))


def _build(kind: Any, value: Any, key: str, source: str) -> Any:
    """Converts `value` to the type `kind`. Raises UserError with what is expected at `key`."""
    if isinstance(kind, types.UnionType):
        return _build_union(kind, value, key, source)
    if kind is ModelChanges:
        if not isinstance(value, dict):
            raise UserError(f"{key} is a section, not {_show(value)}: set keys of `model` in it{_in(source)}")
        _check(ModelConfig, value, key, source)
        return ModelChanges(value)
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise UserError(
                f"{key} is a section, not {_show(value)}: set its keys, such as {keys(kind, key)[0]}{_in(source)}"
            )
        known = hints(kind)
        for name in value:
            if name not in known:
                raise UserError(_unknown(join(key, name), source, registered=registered(kind, name, value[name])))
        return kind(**{name: _build(known[name], entry, join(key, name), source) for name, entry in value.items()})  # type: ignore[operator]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple) and isinstance(value, list | tuple):
        if origin is tuple and len(value) != len(arguments):
            raise _wrong(kind, value, key, source)
        return origin(_build(arguments[0], entry, join(key, i), source) for i, entry in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {str(name): _build(arguments[1], entry, join(key, name), source) for name, entry in value.items()}
    if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if kind is bool and isinstance(value, bool):
        return value
    # 1e12 is a float to YAML and the natural way to write a token count.
    if kind is int and isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        return int(value)
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf"):
        return float(value)
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise _wrong(kind, value, key, source)


def _build_union(kind: types.UnionType, value: Any, key: str, source: str) -> Any:
    """Converts a value for `int | None` or `int | Auto`, which is a number or a word."""
    if value is None and type(None) in kind.__args__:
        return None
    for word in kind.__args__:
        if isinstance(word, type) and issubclass(word, Enum) and isinstance(value, str) and value in word.__members__:
            return word[value]
    try:
        return _build(strip_none(kind), value, key, source)
    except UserError:
        if words(kind):
            raise _wrong(kind, value, key, source) from None
        raise


def _check(kind: Any, value: Any, key: str, source: str) -> None:
    """Checks the values of one file, so that errors can name it. Interpolations are checked after merging."""
    kind = ModelConfig if strip_none(kind) is ModelChanges and value is not None else kind
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        known = hints(kind)
        for name, entry in value.items():
            if name not in known:
                raise UserError(_unknown(join(key, name), source, registered=registered(kind, name, entry)))
            _check(known[name], entry, join(key, name), source)
    elif "${" not in str(value) or (isinstance(value, str) and not is_leaf(kind)):
        _build(kind, value, key, source)


def _wrong(kind: Any, value: Any, key: str, source: str) -> UserError:
    return UserError(f"{key} must be {expected(kind)}, not {_show(value)}{_in(source)}")


def _unknown(key: str, source: str, options: Iterable[str] = (), registered: Sequence[str] = ()) -> str:
    """registered: what has options beside those at `key`, if they may be the options of something that a plugin registers."""
    if registered:
        return f"there is no key {key!r}{_in(source)}; use the options of {one_of(registered)}, {IN_PLUGIN}"
    index = re.search(r"\.(\d+)(\.|$)", key)
    valid = [name.replace("[]", index.group(1) if index else "0") for name in keys(Config, "")] + list(options)
    if not key.startswith("train.stages"):  # every key of the model is also valid in stages
        valid = [name for name in valid if not re.match(r"train\.stages\.\d+\.model\.", name)]
    section, _, last = key.rpartition(".")
    near = [name for name in valid if last in CHOOSING and name in [f"{section}.{word}" for word in CHOOSING]]
    near = near or [name for name in valid if name.rpartition(".")[2] == last and last not in CHOOSING][:3]
    near = near or difflib.get_close_matches(key, valid, n=1, cutoff=0.6)
    near = near or [n for n in valid if difflib.get_close_matches(last, [n.rpartition(".")[2]], cutoff=0.7)][:1]
    hint = f"did you mean {one_of(near)}?" if near else "ssscale/config/schema.py lists them all"
    return f"there is no key {key!r}{_in(source)}; {hint}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return {name: _plain(entry) for name, entry in value.items()} if isinstance(value, dict) else value


def _merge(under: Tree, over: Tree) -> Tree:
    """Merges two trees: sections key by key; lists (the stages) are replaced."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _in(source: str) -> str:
    return f" (in {source})" if source else ""


def _show(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
