"""Compares the errors of stick-breaking's kernels with those of an earlier commit, on the same trained activations.

    git worktree add BEFORE COMMIT
    python -m eval.benchmarks.stickbreaking_before RUN DATA BEFORE [--length 4096]

RUN and DATA: as for eval.benchmarks.stickbreaking_trained, whose errors are printed: those of o, dq, dk and dv against float64,
divided by the errors of float32 torch with inputs and outputs in the model's dtype, largest / root mean square, skipping off.
They are printed by layer, first of the kernels of BEFORE, then of those here. BEFORE computes in a process of its own.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eval.checkpoint.command import Parser, sentences
from ssscale.errors import UserError

NAMES = ("o", "dq", "dk", "dv")
# What runs in BEFORE. The kernels were a package `kernels` until they got a name of their own.
EARLIER = """
import sys, torch
from safetensors.torch import load_file, save_file
from {package}.stickbreaking import stickbreaking_attention
given, found = load_file(sys.argv[1], device="{device}"), {{}}
for i in range(len(given) // 4):
    *leaves, grad = (given[f"{{i}}.{{j}}"] for j in range(4))
    leaves = [x.requires_grad_() for x in leaves]
    o = stickbreaking_attention(*leaves, scale={scale}, skip_below=0.0)[0]
    results = (o, *torch.autograd.grad(o, leaves, grad))
    found |= {{f"{{i}}.{{j}}": x.detach().contiguous() for j, x in enumerate(results)}}
save_file(found, sys.argv[2])
"""


def earlier_results(before: Path, heads: list[list[Any]], scale: float) -> list[list[Any]]:
    """Return [o, dq, dk, dv] of every head, from the kernels of the checkout `before`. Raises UserError if they fail."""
    from safetensors.torch import load_file, save_file

    package = "ssscale_kernels" if (before / "ssscale_kernels.py").is_file() else "kernels"
    if not (before / "kernels" / "stickbreaking").is_dir():
        raise UserError(f"{before} has no kernels/stickbreaking: make it with git worktree add")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("given.safetensors", "found.safetensors")]
        given = {f"{i}.{j}": x.detach().contiguous() for i, head in enumerate(heads) for j, x in enumerate(head)}
        save_file(given, files[0])
        device = str(heads[0][0].device)
        program = EARLIER.format(package=package, device=device, scale=scale)
        command = [sys.executable, "-c", program, *map(str, files)]
        path = os.pathsep.join([str(before), *filter(None, [os.environ.get("PYTHONPATH")])])
        ran = subprocess.run(command, cwd=before, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        if ran.returncode:
            raise UserError(
                f"the kernels of {before} failed: {(ran.stderr.strip().splitlines() or ['no message'])[-1]}"
            )
        found = load_file(files[1], device=device)
        return [[found[f"{i}.{j}"] for j in range(len(NAMES))] for i in range(len(heads))]


def replaying(results: list[list[Any]]) -> Callable[..., tuple[Any, None]]:
    """Return a function that gives these results and gradients, head by head, in place of computing them."""
    import torch

    class Replay(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, head: list[Any]) -> Any:
            ctx.gradients = head[1:]
            return head[0].clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return *ctx.gradients, None

    left = iter(results)
    return lambda q, k, v, scale: (Replay.apply(q, k, v, next(left)), None)


def table(title: str, texts: list[str]) -> str:
    """Return the errors of all layers, and the largest of each column. texts: from `trained_layers.worst_error`."""
    rows = [[(float(a), float(b)) for a, b in re.findall(r"(\S+) / ([^,\s]+)", text)] for text in texts]
    worst = [tuple(max(pair[i] for pair in column) for i in (0, 1)) for column in zip(*rows, strict=True)]
    lines = [f"| {title} | " + " | ".join(NAMES) + " |", "|---|" + "---|" * len(NAMES)]
    for name, row in [*enumerate(rows), ("largest", worst)]:
        lines.append(f"| {name} | " + " | ".join(f"{a:.2f} / {b:.2f}" for a, b in row) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(
        "python -m eval.benchmarks.stickbreaking_before",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("data")
    parser.add_argument("before", type=Path)
    parser.add_argument("--length", type=int, default=4096)
    arguments = parser.parse_args()

    from functools import partial

    from ssscale_kernels.stickbreaking import stickbreaking_attention, stickbreaking_reference

    from eval.benchmarks.trained_layers import capture, heads_of, held_out, scale_of, separate, worst_error
    from ssscale.data.stream import PackedData
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_for_inference

    model, _ = load_for_inference(arguments.run, initialize())
    tokens = held_out(PackedData.open(arguments.data, "valid"), arguments.length, 4).to(model.groups.device)
    labels, layout = separate(tokens, arguments.length)
    layers = [[x[: arguments.length] for x in layer] for layer in capture(model, tokens, labels, layout)]
    scale = scale_of(model, layers)
    heads = [head for layer in layers for head in heads_of(layer)]
    earlier = replaying(earlier_results(arguments.before.resolve(), heads, scale))
    for title, kernel in (("before", earlier), ("now", partial(stickbreaking_attention, skip_below=0.0))):
        texts = [worst_error(kernel, stickbreaking_reference, layer, arguments.length, scale) for layer in layers]
        print(table(title, texts), flush=True)


if __name__ == "__main__":
    with sentences():
        main()
