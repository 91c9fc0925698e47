"""Names in a configuration whose meaning stands in a file of its own: mixers, positions, schedules, optimizers.

A file registers what it defines and is found by where it lies, so that adding one touches no other file:

    @MIXERS.register("ssmax")
    @dataclass(frozen=True)
    class SSMax(Mixer): ...

The environment variable SSSCALE_PLUGINS names further Python files or folders of them, separated by colons. It is the
environment's rather than the configuration's: a checkpoint must not be able to name code that its reader runs. A file that
registers something is imported by commands that answer before torch is imported, so it imports torch where it uses it.
"""

import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from ssscale.errors import UserError

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """What goes by a name under one key, such as `model.mixers`. Reading it first imports the package's files and plugins."""

    def __init__(self, key: str, package: str) -> None:
        self.key, self.package = key, package
        self._found: dict[str, T] = {}
        self._complete = False

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that gives what it decorates a name. Raises ValueError for a name that is taken."""

        def add(thing: T) -> T:
            if name in self._found:
                raise ValueError(f"{self.key}: {name!r} is registered twice")
            self._found[name] = thing
            return thing

        return add

    def __getitem__(self, name: str) -> T:
        self._discover()
        if name not in self._found:
            raise UserError(f"{self.key}={name} is not known: use one of {', '.join(self)}")
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

    def _discover(self) -> None:
        if self._complete:
            return
        self._complete = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        import_plugins()


def import_plugins() -> None:
    """Import the files of SSSCALE_PLUGINS, each once. Raises UserError for one that is not there."""
    for text in filter(None, os.environ.get("SSSCALE_PLUGINS", "").split(":")):
        path = Path(text).resolve()
        if not path.exists():
            raise UserError(f"SSSCALE_PLUGINS names {text}, which does not exist")
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            name = f"ssscale_plugin_{file.stem}"
            spec = importlib.util.spec_from_file_location(name, file)
            if name in sys.modules:
                continue
            if spec is None or spec.loader is None:
                raise UserError(f"SSSCALE_PLUGINS: {file} is not a Python file")
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)


MIXERS: Registry[type] = Registry("model.mixers", "ssscale.model.mixers")
POSITIONS: Registry[type] = Registry("model.position.method", "ssscale.model.positions")
SCHEDULES: Registry[type] = Registry("train.stages.N.schedule.kind", "ssscale.train.schedules")
OPTIMIZERS: Registry[type] = Registry("optimizer.name", "ssscale.optim")
