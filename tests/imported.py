"""Imports what commands import, and compiles something afterwards, in a process of its own: see `test_imports.py`.

`python -m tests.imported` prints what the process found, as JSON.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# Together they import what pretraining, fine-tuning, evaluation, export and data_prep do.
MODULES = (
    "launch.pretrain",
    "ssscale.train.loop",
    "ssscale.train.pretrain",
    "ssscale.train.finetune",
    "ssscale.parallel.softmax_ring",
    "ssscale.parallel.stickbreaking_ring",
    "ssscale_kernels.flex",
    "ssscale.hf.convert",
    "eval.checkpoint.suite",
    "eval.papers.context_losses",
    "data_prep.prepare",
)
COMPILERS = ("torch._dynamo", "torch._inductor")


def main() -> None:
    for module in MODULES:
        importlib.import_module(module)
    from ssscale_kernels.graph_breaks import breaks_graph

    from ssscale.data.streaming_patches import import_streaming
    from ssscale.parallel.operators import uncompiled

    import_streaming()  # when data is read first
    uncompiled(len, "")
    found: dict[str, Any] = {"imported": [module for module in COMPILERS if module in sys.modules]}

    text = importlib.util.find_spec("streaming.text")
    found["streaming.text"] = text is not None and text.origin is not None
    import torch

    found["ours"] = compiled_with(breaks_graph)
    found["torch"] = compiled_with(torch.compiler.disable)
    print(json.dumps(found))


def compiled_with(decorate: Callable[[Any], Any]) -> dict[str, Any]:
    """What Dynamo makes of a block that calls a decorated function, with arguments of several kinds and shapes."""
    import torch
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    compiling = []

    def below(x: torch.Tensor) -> torch.Tensor:
        compiling.append(torch.compiler.is_compiling())
        return x.square()

    @decorate
    def outside(function: Callable[..., torch.Tensor], x: torch.Tensor, *, fail: bool) -> torch.Tensor:
        if fail:
            raise ValueError("planted")
        return function(x) + len(x)

    def block(x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        return outside(below if len(x) % 2 else torch.sin, x.cos(), fail=fail).tanh()

    torch._dynamo.reset()
    counters.clear()
    counter = CompileCounter()
    compiled = torch.compile(block, backend=counter, dynamic=False)
    right = []
    for size in (3, 4):
        x = torch.arange(float(size), requires_grad=True)
        with suppress(ValueError):
            compiled(x, fail=True)
        right.append(torch.equal(compiled(x), block(x)))
        gradients = [torch.autograd.grad(function(x).sum(), x)[0] for function in (compiled, block)]
        right.append(torch.equal(*gradients))
    frames, graphs, breaks = dict(counters["frames"]), counter.frame_count, sum(counters["graph_break"].values())
    refused = False
    try:
        torch.compile(block, backend=counter, fullgraph=True)(x)
    except torch._dynamo.exc.Unsupported:
        refused = True
    return {
        "right": all(right),
        "graphs": graphs,
        "breaks": breaks,
        "frames": frames,
        "compiling": any(compiling),
        "refused as one graph": refused,
    }


if __name__ == "__main__":
    main()
