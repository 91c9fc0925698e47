"""The one change that mosaicml-streaming (0.13.0) needs: a torchvision for machines without one.

streaming imports torchvision at its top, for image data sets only; torch's builds for CPUs come without a torchvision
that fits them. data_prep imports this file too, the single thing of ssscale that it does.
"""

import importlib.machinery
import importlib.util
import sys
import types


def install_stand_in() -> None:
    """Put an empty torchvision into sys.modules; does nothing where a real one is installed."""
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
