"""The only change to mosaicml-streaming (0.13.0): an empty torchvision for machines that have none.

streaming imports torchvision at import time, although only its image data sets use it, and there may be no torchvision for
a CPU build of torch. data_prep imports this file too; it is the only file of ssscale that data_prep imports.
"""

import importlib.machinery
import importlib.util
import sys
import types


def install_stand_in() -> None:
    """Puts an empty torchvision into sys.modules, unless a real one is installed."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    modules = {}
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        modules[name] = types.ModuleType(name)
        modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        modules[name].__path__ = []
    vars(modules["torchvision"]).update(
        __version__="0.0",
        datasets=modules["torchvision.datasets"],
        transforms=modules["torchvision.transforms"],
    )
    vars(modules["torchvision.datasets"])["VisionDataset"] = type("VisionDataset", (), {})
    vars(modules["torchvision.transforms"])["functional"] = modules["torchvision.transforms.functional"]
    vars(modules["torchvision.transforms.functional"])["to_tensor"] = None
    sys.modules.update(modules)
