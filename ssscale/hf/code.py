"""The code that is saved with exported weights: the model in plain torch, with the functions of its mixers."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ssscale.config.registry import MIXERS
from ssscale.config.schema import ModelConfig
from ssscale.errors import UserError
from ssscale.model.mixers.base import Export

FOLDER = Path(__file__).parent
CONFIGURATION, MODELING = "configuration_ssscale.py", "modeling_ssscale.py"
BEGIN, END = "# the model's mixers\n", "# the end of the model's mixers\n"


def exported_files(model: ModelConfig) -> dict[str, str]:
    """Returns the code files by name. Raises UserError if a mixer or the position method declares no export."""
    if not model.place.exported:
        raise UserError(f"model.position.method={model.place.name} has no code in exported models")
    for mixer in model.used.values():
        if mixer.export is None:
            raise mixer.lacks("export", "the model cannot be exported")
    configuration = (FOLDER / CONFIGURATION).read_text(encoding="utf-8")
    return {CONFIGURATION: configuration, MODELING: _modeling({name: m.export for name, m in model.used.items()})}


@functools.cache
def exported_module() -> ModuleType:
    """Returns the modeling file with every mixer that can be exported, as a module of this process."""
    exports = {name: mixer.export for name, mixer in MIXERS.items() if mixer.export is not None}
    module = ModuleType("ssscale.hf.exported")
    module.__package__ = "ssscale.hf"
    sys.modules[module.__name__] = module  # dataclasses look up their module there
    exec(compile(_modeling(exports), module.__name__, "exec"), module.__dict__)
    return module


def _modeling(exports: Mapping[str, Export]) -> str:
    """Returns the text of modeling_ssscale.py with the functions of these mixers, each once."""
    before, rest = (FOLDER / MODELING).read_text(encoding="utf-8").split(BEGIN)
    functions: dict[Callable[..., Any], None] = {}
    entries = []
    for name, export in exports.items():
        named = {"mix": export.mix, "factor": export.factor, "prepare": export.prepare}
        functions |= dict.fromkeys([*export.helpers, *(f for f in named.values() if f)])
        given = ", ".join(f"{key}={function.__name__}" for key, function in named.items() if function)
        entries.append(f'    "{name}": Part({given}),\n')
    sources = [inspect.getsource(function).replace("ExportedAttention", "Attention").rstrip() for function in functions]
    parts = "".join(f"{source}\n\n\n" for source in sources)
    return before + parts + "MIXERS = {\n" + "".join(entries) + "}\n\n\n" + rest.split(END)[1].lstrip("\n")
