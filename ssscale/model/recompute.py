"""Activations that are computed again in backward instead of being kept."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ssscale.parallel.megatron import RowParallelLinear
from ssscale.schema import Recompute

KEPT = ("aten.mm", "attention", "attn", "stickbreaking")


def prepare(model: nn.Module, recompute: Recompute) -> None:
    """Make a model fit for `run`: what selective recomputation keeps must not be changed in place afterwards."""
    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            module.product_is_kept = recompute == Recompute.selective


def run(block: nn.Module, recompute: Recompute, *inputs: Any) -> Tensor:
    """A block under recomputation: `full` keeps its input, `selective` also the results of matrix products and attention."""
    if recompute == Recompute.none or not torch.is_grad_enabled():
        found: Tensor = block(*inputs)
    elif recompute == Recompute.full:
        found = checkpoint(block, *inputs, use_reentrant=False)
    else:
        contexts = _compiled_contexts if torch.compiler.is_compiling() else _contexts
        found = checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts)
    return found


def is_kept(operator: Any) -> bool:
    """Norms, rotations and gates are computed again."""
    return any(part in str(operator) for part in KEPT)


def _compiled_contexts() -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    kept: dict[Any, list[Any]] = defaultdict(list)
    return _Keep(kept), _Take(kept)


class _Mode(TorchDispatchMode):
    """torch's own modes insist that forward and recomputation call all the same operators; ZeRO-3, which gathers weights when
    a layer is run, does not: it finds some of them still there.
    """

    def __init__(self, kept: dict[Any, list[Any]]) -> None:
        super().__init__()
        self.kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keep(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_kept(func):
            self.kept[func].append(tree_map_only(Tensor, Tensor.detach, out))
        return out


class _Take(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.kept[func].pop(0) if is_kept(func) else func(*args, **(kwargs or {}))
