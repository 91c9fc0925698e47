"""The only change to mosaicml-streaming (0.13.0): it is imported without the data sets that it brings.

They need transformers' generation, which imports Dynamo and Inductor (2 seconds), and torchvision, which a CPU build of
torch may lack. data_prep imports this file too.
"""

import sys
import types

KINDS = ("multimodal", "text", "vision")  # of data sets


def import_streaming() -> None:
    """Imports streaming without its data sets. Whoever imports these later gets them."""
    if "streaming" in sys.modules:
        return
    stand_ins = {f"streaming.{kind}": types.ModuleType(f"streaming.{kind}") for kind in KINDS}
    sys.modules.update(stand_ins)
    try:
        import streaming
    finally:
        for name in stand_ins:
            del sys.modules[name]
    for kind in KINDS:
        delattr(streaming, kind)
