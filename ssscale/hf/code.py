"""The code that is saved with exported weights: the model in plain torch, with the functions of its mixers."""

import functools
import hashlib
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
# In the order of their imports. The mixers' functions are inserted into MODELING: the others must not depend on the
# model, because transformers imports them once for all folders of one name.
CONFIGURATION, MODELING = "configuration_ssscale", "modeling_ssscale"
FILES = (CONFIGURATION, "positions_ssscale", "attention_ssscale", "layers_ssscale", MODELING)
BEGIN, END = "# the model's mixers\n", "# the end of the model's mixers\n"
PACKAGE = "ssscale.hf.exported"


def exported_files(model: ModelConfig) -> dict[str, str]:
    """Returns the code files by name. Raises UserError if a mixer or the position method declares no export."""
    if not model.place.exported:
        raise UserError(f"model.position.method={model.place.name} has no code in exported models")
    for mixer in model.used.values():
        if mixer.export is None:
            raise mixer.lacks("export", "the model cannot be exported")
    exports = {name: mixer.export for name, mixer in model.used.items() if mixer.export is not None}
    files = {f"{name}.py": _text(name, exports) for name in FILES}
    # transformers 5 tells the models of two folders of one name apart by the file of the configuration alone.
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:16]
    files[f"{CONFIGURATION}.py"] += f"\n# The digest of all code files: {digest}\n"
    return files


@functools.cache
def exported_module() -> ModuleType:
    """Returns the modeling file with every mixer that can be exported, as a module of this process."""
    from ssscale.hf import configuration_ssscale

    exports = {name: mixer.export for name, mixer in MIXERS.items() if mixer.export is not None}
    package = ModuleType(PACKAGE)
    package.__path__ = []
    sys.modules[PACKAGE] = package
    # The class of the configuration is the one that `register` registers.
    sys.modules[f"{PACKAGE}.{CONFIGURATION}"] = configuration_ssscale
    for name in FILES[1:]:
        module = ModuleType(f"{PACKAGE}.{name}")
        module.__package__ = PACKAGE
        sys.modules[module.__name__] = module  # dataclasses look up their module there
        exec(compile(_text(name, exports), module.__name__, "exec"), module.__dict__)
    return sys.modules[f"{PACKAGE}.{MODELING}"]


def _text(name: str, exports: Mapping[str, Export]) -> str:
    """Returns the text of a file with the functions of these mixers, each once."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    if name != MODELING:
        return text
    before, rest = text.split(BEGIN)
    functions: dict[Callable[..., Any], None] = {}
    entries = []
    for mixer, export in exports.items():
        named = {"mix": export.mix, "factor": export.factor, "prepare": export.prepare}
        functions |= dict.fromkeys([*export.helpers, *(f for f in named.values() if f)])
        given = ", ".join(f"{key}={function.__name__}" for key, function in named.items() if function)
        entries.append(f'    "{mixer}": Part({given}),\n')
    sources = [inspect.getsource(function).replace("ExportedAttention", "Attention").rstrip() for function in functions]
    parts = "".join(f"{source}\n\n\n" for source in sources)
    return before + parts + "MIXERS = {\n" + "".join(entries) + "}\n\n\n" + rest.split(END)[1].lstrip("\n")
