"""Registries for names in a configuration (mixers, positions, schedules, optimizers), and for the hooks of plugins.

Each file of a registry's package registers what it defines. Adding a file changes no other file:

    @MIXERS.register("ssmax")
    @dataclass(frozen=True)
    class SSMax(Mixer): ...

The environment variable SSSCALE_PLUGINS lists further Python files or folders of them, separated by colons. It is not a
configuration key because a checkpoint must not be able to name code that its reader runs. Registering files are
imported by commands that answer before torch is imported, so they import torch only inside functions.
"""

import dataclasses
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ssscale.errors import UserError

T = TypeVar("T")

IN_PLUGIN = "or name the file of the plugin that defines it in the environment variable SSSCALE_PLUGINS"


class Registry(Mapping[str, T], Generic[T]):
    """Maps names to what is registered under them, for one configuration key such as `model.mixers`.

    The first access imports the files of `package` and the plugins.
    """

    def __init__(self, key: str, package: str) -> None:
        self.key, self.package = key, package
        self._found: dict[str, T] = {}
        self._default: str | None = None
        self._complete = False
        self._sections: dict[tuple[type, int], type] = {}

    @property
    def default(self) -> str:
        """The name that is used if the key is not given."""
        self._discover()
        assert self._default is not None, f"nothing is the default of {self.key}"
        return self._default

    def register(self, name: str, default: bool = False) -> Callable[[T], T]:
        """Returns a decorator that registers under `name`.

        Raises UserError if the name is taken, or for a class that inherits a dataclass and is none itself.
        """

        def add(thing: T) -> T:
            if name in self._found:
                raise UserError(f"{self.key}: {name!r} is registered twice")
            if dataclasses.is_dataclass(thing) and "__dataclass_params__" not in vars(thing):
                raise UserError(f"{self.key}: {name!r} needs @dataclass(frozen=True), or its options have no effect")
            thing.name = name  # type: ignore[attr-defined]
            self._found[name] = thing
            self._default = name if default else self._default
            return thing

        return add

    def __getitem__(self, name: str) -> T:
        self._discover()
        if name not in self._found:
            raise UserError(f"{self.key}={name} is not known: use one of {', '.join(self)}, {IN_PLUGIN}")
        return self._found[name]

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._found))

    def __len__(self) -> int:
        self._discover()
        return len(self._found)

    def section(self, base: type) -> type:
        """Returns a subclass of `base` with one field per registered name: its options, with their defaults."""
        if (base, len(self)) not in self._sections:
            options: list[Any] = [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in self.items()]  # type: ignore[call-overload]
            made = dataclasses.make_dataclass(base.__name__, options, bases=(base,), frozen=True)
            self._sections[base, len(self)] = made
        return self._sections[base, len(self)]

    def _discover(self) -> None:
        if self._complete:
            return
        self._complete = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        import_plugins()


def import_plugins() -> None:
    """Imports the files of SSSCALE_PLUGINS, each once. Raises UserError if one does not exist."""
    for text in filter(None, os.environ.get("SSSCALE_PLUGINS", "").split(":")):
        path = Path(text).resolve()
        if not path.exists():
            raise UserError(f"SSSCALE_PLUGINS names {text}, which does not exist")
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            name = f"ssscale_plugin_{file.stem}_{zlib.crc32(os.fsencode(file)):08x}"
            spec = importlib.util.spec_from_file_location(name, file)
            if name in sys.modules:
                continue
            if spec is None or spec.loader is None:
                raise UserError(f"SSSCALE_PLUGINS: {file} is not a Python file")
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except UserError:
                raise
            except Exception as error:  # a plugin's code is the user's, and may raise anything
                raise UserError(f"SSSCALE_PLUGINS: {_line(error, file)}: {type(error).__name__}: {error}") from error


def _line(error: Exception, file: Path) -> str:
    """Returns the file and the last of its lines that the traceback of an error passes."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"{file} line {lines[-1]}" if lines else str(file)


class Sectioned:
    """A configuration section with one subsection per name of `registry`.

    Its class is made at run time, so other processes receive it as its values.
    """

    registry: ClassVar[Registry[Any]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (type(self).__bases__[0], dict(vars(self)))


def _restore(base: type[Sectioned], values: dict[str, Any]) -> Any:
    return base.registry.section(base)(**values)


MIXERS: Registry[Any] = Registry("model.mixers", "ssscale.model.mixers")
POSITIONS: Registry[Any] = Registry("model.position.method", "ssscale.model.positions")
SCHEDULES: Registry[Any] = Registry("schedule.kind", "ssscale.train.schedules")
OPTIMIZERS: Registry[Any] = Registry("optimizer.name", "ssscale.optim")
HOOKS: Registry[Any] = Registry("hooks", "ssscale.train.hooks")  # of plugins; no key selects them
