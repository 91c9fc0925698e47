"""python -m tests.kernels.ptx FOLDER: writes the PTX of the training kernels for Hopper, without line numbers.

To compare two commits, run it in a checkout of each, with TRITON_DISABLE_LINE_INFO=1, and `diff -r` the folders.
"""

import hashlib
import itertools
import sys
from pathlib import Path

from ssscale_kernels.stickbreaking.backward import backward_config
from ssscale_kernels.stickbreaking.forward import forward_config

from tests.kernels.stickbreaking_hopper import compiled

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for operands, head_dim in [*itertools.product(("scaled", "float16"), (32, 64, 128)), ("log_rest", 64)]:
        config = backward_config(head_dim, parts=2 if operands == "float16" else 1)
        kernels = {"forward": forward_config(head_dim), "dq": config.dq, "dkv": config.dkv}
        for which, settings in kernels.items():
            ptx = compiled(which, settings, head_dim, operands).asm["ptx"]
            name = f"{which}-{operands}-{head_dim}"
            (folder / f"{name}.ptx").write_text(ptx, encoding="utf-8")
            print(name, hashlib.sha256(ptx.encode()).hexdigest()[:16], flush=True)
