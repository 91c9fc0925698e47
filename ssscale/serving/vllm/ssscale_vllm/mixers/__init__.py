"""The mixers that can be served. A file NAME.py defines the class MIXER of the mixer NAME."""

import importlib
import pkgutil

from ..mixer import Mixer

MIXERS: dict[str, type[Mixer]] = {
    module.name: importlib.import_module(f"{__name__}.{module.name}").MIXER for module in pkgutil.iter_modules(__path__)
}
