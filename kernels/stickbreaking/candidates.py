"""Launch settings that `measure` times for each head dim, and the kernels' calls.

All candidates were compiled for Hopper; those that spill in the loop of the fast algebra are left out
(docs/log/2026-11-24-sixteen-keys.md and 2026-11-25-backward-latency.md have instructions and predictions).
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import backward as backward_module
from . import forward as forward_module
from .backward import BackwardConfig
from .kept import aux_shapes
from .settings import Config

Shape = tuple[int, int, int, int]  # batch, heads, length, head dim
Call = Callable[[], Any]
SHAPES: list[Shape] = [(4, 24, 4096, 64), (1, 24, 16384, 64), (4, 16, 4096, 128), (8, 32, 2048, 32)]
SKIP = 2**-12


class Candidates(NamedTuple):
    """Settings of each kernel."""

    forward: list[Config]
    dq: list[Config]
    dkv: list[Config]


class Settings(NamedTuple):
    """Settings that fit together."""

    forward: Config
    backward: BackwardConfig


CANDIDATES = {
    64: Candidates(
        [Config(64, 64, 4, 3, 168), Config(64, 64, 4, 3, 160)],
        [Config(64, 64, 4, 3, 168), Config(64, 64, 4, 3)],
        [Config(64, 64, 4, 3), Config(64, 64, 4, 4)],
    ),
    128: Candidates(
        [Config(128, 64, 8, s) for s in (3, 4)],
        [Config(128, 64, 8, 3)],
        [Config(128, 64, 8, 2)],
    ),
    32: Candidates(
        [Config(64, 64, 4, 3, 128), Config(64, 64, 4, 4, 128)],
        [Config(64, 64, 4, 3, 168), Config(64, 64, 4, 4, 168)],
        [Config(64, 64, 4, 3, 168), Config(64, 64, 4, 3), Config(64, 64, 4, 4, 168)],
    ),
}
# The fastest settings of the form at 9010315, which `measure --before` loads.
BEFORE = {
    64: Settings(Config(128, 64, 8, 3, 128), BackwardConfig(Config(64, 64, 4, 2, 168), Config(64, 64, 4, 3))),
    128: Settings(Config(128, 64, 8, 3), BackwardConfig(Config(128, 64, 8, 2), Config(128, 64, 8, 2))),
    32: Settings(Config(64, 64, 4, 3, 128), BackwardConfig(Config(64, 64, 4, 2, 168), Config(64, 64, 4, 3))),
}


def tuned_shape(head_dim: int) -> Shape:
    return next(shape for shape in SHAPES if shape[3] == head_dim)


def current(head_dim: int) -> Settings:
    return Settings(forward_module.forward_config(head_dim), backward_module.backward_config(head_dim))


def fit(forward: Config, dq: Config, dkv: Config) -> bool:
    """Whether row blocks do not grow from forward to dq to dkv."""
    return forward.row_block % dq.row_block == 0 and dq.row_block % dkv.row_block == 0


def fastest(times: dict[str, dict[Config, float]]) -> Settings:
    """Returns the settings that fit together and take the least time. times: ms by kernel and settings."""
    choices = [choice for choice in itertools.product(times["forward"], times["dq"], times["dkv"]) if fit(*choice)]
    forward, dq, dkv = min(choices, key=lambda c: times["forward"][c[0]] + times["dq"][c[1]] + times["dkv"][c[2]])
    return Settings(forward, BackwardConfig(dq, dkv))


def pairs(head_dim: int) -> list[tuple[str, BackwardConfig]]:
    """Returns settings of backward with the name of the kernel for which each is a candidate."""
    now, found = current(head_dim).backward, CANDIDATES[head_dim]
    both = [("dq", BackwardConfig(c, now.dkv)) for c in found.dq] + [
        ("dkv", BackwardConfig(now.dq, c)) for c in found.dkv
    ]
    return [(kernel, pair) for kernel, pair in both if pair.dq.row_block % pair.dkv.row_block == 0]


def earlier_form(kernels: str) -> tuple[Any, Any]:
    """Returns the modules forward and backward of the folder kernels/ of an earlier commit."""
    name = "earlier_stickbreaking"
    if name not in sys.modules:
        # Without the package's __init__, which would register its operators a second time.
        package = ModuleType(name)
        package.__path__ = [str(Path(kernels).resolve() / "stickbreaking")]
        sys.modules[name] = package
    # Where there were two algebras, this one was in a folder of its own.
    place = f"{name}.sixteen" if (Path(kernels) / "stickbreaking/sixteen").is_dir() else name
    return import_module(f"{place}.forward"), import_module(f"{place}.backward")


def starts(batch: int, length: int) -> Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device="cuda")


def forward_call(shape: Shape, inputs: list[Tensor], module: Any = forward_module, **options: Any) -> Call:
    """Returns a forward call of this folder's kernels, or of another module with the same interface."""
    batch, _, length, head_dim = shape
    cu, (q, k, v, _) = starts(batch, length), inputs
    layout = (cu, cu, None, None, length, head_dim**-0.5, SKIP)
    return partial(module.forward, q, k, v, *layout, max_queries=length, **options)


def backward_call(
    shape: Shape, inputs: list[Tensor], saved: list[Tensor], module: Any = backward_module, **options: Any
) -> Call:
    """Returns a backward call. saved: what forward returned after log_rest."""
    batch, _, length, head_dim = shape
    cu, (q, k, v, grad) = starts(batch, length), inputs
    sizes = (length, length, head_dim**-0.5, SKIP)
    return partial(module.backward, grad, None, q, k, v, cu, cu, None, *saved, *sizes, **options)


def both_call(
    shape: Shape, inputs: list[Tensor], forward: Any, backward: Any, settings: Settings, **options: Any
) -> Call:
    def both() -> object:
        saved = forward_call(shape, inputs, forward, config=settings.forward, **options)()[2:]
        return backward_call(shape, inputs, saved, backward, config=settings.backward, **options)()

    return both


def empty_saved(shape: Shape) -> list[Tensor]:
    """Returns results of a forward pass that saw no key, so that backward's kernels compile without running forward."""
    batch, heads, length, _ = shape
    rows, _, stops = aux_shapes(batch * length, heads, batch)
    carry = torch.zeros(rows, device="cuda")
    tiles, stop = (torch.full(s, 1 << 30, dtype=torch.int32, device="cuda") for s in (rows, stops))
    return [carry, tiles, stop, torch.zeros((batch, 4), dtype=torch.int32, device="cuda")]
