"""Selective recomputation, which keeps the results of matrix products and attention for backward."""

import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ssscale.parallel.megatron import RowParallelLinear
from ssscale.parallel.operators import WAIT
from ssscale.parallel.overlapped import PRODUCTS as OVERLAPPED

T = TypeVar("T")

PRODUCTS = ("aten.mm", "aten._scaled_mm")
# torch warns at every start that a compiled layer under selective recomputation must not change anything in place.
# Blocks do not.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(lambda record: "context_fn" not in record.getMessage())


def leave_products_whole(model: nn.Module) -> None:
    """Prepares a model for `keep_products`, which requires that kept results are never changed in place."""
    for module in model.modules():
        if isinstance(module, RowParallelLinear):
            module.product_is_kept = True


def keep_products(mixing: tuple[str, ...], layer: Callable[..., T], *inputs: Any) -> T:
    """Returns layer(*inputs). Backward reuses matrix products and mixing, and computes norms and gates again.

    mixing: substrings of the names of the operators that mix (`Mixer.kept_operators`). If compiled, this call must be
    inside the compiled region: code compiled below it writes its products into memory that it reuses later.
    """
    contexts = _compiled_contexts if torch.compiler.is_compiling() else _contexts
    parts = (*PRODUCTS, *mixing)
    found: T = checkpoint(layer, *inputs, use_reentrant=False, context_fn=functools.partial(contexts, parts))
    return found


def is_kept(parts: tuple[str, ...], operator: Any) -> bool:
    """Tells whether the result of an operator is kept. Norms, rotations and gates are computed again.

    Raises RuntimeError for a matching operator that writes into existing memory.
    """
    kept = any(part in str(operator) for part in parts)
    if kept and isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable:
        raise RuntimeError(f"selective recomputation around compiled code: {operator} writes into memory used again")
    return kept


def _compiled_contexts(parts: tuple[str, ...]) -> Any:
    # Backward repeats no exchange. Of a sum over ranks, the graph keeps the sum and not the product.
    parts = (*parts, WAIT, OVERLAPPED)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if is_kept(parts, operator) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _contexts(parts: tuple[str, ...]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    kept: dict[Any, list[Any]] = defaultdict(list)
    return _Keep(parts, kept), _Take(parts, kept)


class _Mode(TorchDispatchMode):
    """Base of the modes below.

    torch's own modes require that forward and recomputation call exactly the same operators. ZeRO-3 violates this: it
    gathers weights when a layer runs, and during recomputation some of them are still present.
    """

    def __init__(self, parts: tuple[str, ...], kept: dict[Any, list[Any]]) -> None:
        super().__init__()
        self.parts, self.kept = parts, kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Keep(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_kept(self.parts, func):
            self.kept[func].append(tree_map_only(Tensor, Tensor.detach, out))
        return out


class _Take(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.kept[func].pop(0) if is_kept(self.parts, func) else func(*args, **(kwargs or {}))
