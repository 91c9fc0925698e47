"""Exchanges between ranks as registered operators, which keeps a compiled block in one graph.

Dynamo puts a registered operator into its graph and does not trace its body. AOTAutograd then replaces the operator by its
body: matrix products and torch's functional collectives, in the forward pass and in the backward pass. Only
`multiply_and_gather` stays an operator. So the gradient is that of the `torch.autograd.Function` below in every version of
torch, and Inductor sees every other collective and where it is waited for. Names of process groups stand for the groups,
because a graph can hold them.

Shapes: T tokens, of which each of R ranks has T / R under sequence parallelism. A rank's weight is [F, D]. For a column
product, the whole weight is [R · F, D], divided by output features. For a row product, it is [F, R · D], divided by input
features.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers the shapes of the operators in _c10d_functional
from ssscale_kernels.graph_breaks import breaks_graph
from ssscale_kernels.versions import mark
from torch import Tensor

from ssscale.parallel.registry import new_library, register

mark(__file__)

WAIT = "_c10d_functional.wait_tensor"  # the operator that returns the result of any collective

_collectives = torch.ops._c10d_functional
_library = new_library("ssscale_parallel", __file__)


@breaks_graph
def uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that communicates between ranks without these operators, outside of any compiled graph.

    Dynamo of torch 2.11 traces Megatron-core's collectives but silently drops their gradients. torch 2.13 breaks the
    graph there.
    """
    return function(*arguments)


# A collective starts when it is called, and its result may be read after `_wait`.


def _start_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    return _collectives.all_gather_into_tensor(x.contiguous(), ranks, group)


def _start_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    return _collectives.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group)


def _start_sum(x: Tensor, group: str) -> Tensor:
    return _collectives.all_reduce(x.contiguous(), "sum", group)


def _wait(x: Tensor) -> Tensor:
    return _collectives.wait_tensor(x)


@torch.library.custom_op("ssscale_parallel::multiply_and_gather", mutates_args=())
def multiply_and_gather(gradient: Tensor, weight: Tensor, x: Tensor, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    """Returns gradient @ weight, and x of all ranks, which is gathered meanwhile.

    The body is not part of the graph. If it were, the partitioner would merge this gather with that of the forward pass,
    and keep the gathered x in memory until backward.
    """
    whole = _start_gather(x, ranks, group)
    product = gradient @ weight
    return product, _wait(whole)


@multiply_and_gather.register_fake
def _(gradient, weight, x, ranks, group):  # type: ignore[no-untyped-def]
    return gradient.new_empty(len(gradient), weight.shape[1]), x.new_empty(len(x) * ranks, x.shape[1])


def _gather_and_multiply(x: Tensor, weight: Tensor, ranks: int, group: str, own: int) -> tuple[Tensor, Tensor]:
    """Returns the product of all ranks' x with `weight`, and all ranks' x.

    own: the index of this rank, whose own rows are multiplied while those of the others arrive; −1: all are multiplied
        after they have arrived, with one product.
    """
    started = _start_gather(x, ranks, group)
    if own < 0:
        whole = _wait(started)
        return whole @ weight, whole
    product = x @ weight
    whole = _wait(started)
    others = whole[: own * len(x)], whole[(own + 1) * len(x) :]
    before, after = ([part @ weight] if len(part) else [] for part in others)
    return torch.cat([*before, product, *after]), whole


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, ranks: int, group: str, sequence: bool, own: int, keep_gathered: bool
    ) -> Tensor:
        ctx.again = sequence and not keep_gathered
        ctx.options = ranks, group, sequence
        if not sequence:
            ctx.save_for_backward(x, weight)
            return x @ weight.t()
        product, whole = _gather_and_multiply(x, weight.t(), ranks, group, own)
        ctx.save_for_backward(x if ctx.again else whole, weight)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ranks, group, sequence = ctx.options
        gradient = gradient.contiguous()
        if ctx.again:
            partial, x = multiply_and_gather(gradient, weight, x, ranks, group)
        else:
            partial = gradient @ weight
        started = _start_scatter(partial, ranks, group) if sequence else _start_sum(partial, group)
        weight_gradient = gradient.t() @ x if ctx.needs_input_grad[1] else None
        return _wait(started), weight_gradient, None, None, None, None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ranks: int, group: str, sequence: bool, own: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = ranks, group, sequence, own
        partial = x @ weight.t()
        return _wait(_start_scatter(partial, ranks, group) if sequence else _start_sum(partial, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ranks, group, sequence, own = ctx.options
        if sequence:
            input_gradient, gradient = _gather_and_multiply(gradient, weight, ranks, group, own)
        else:
            input_gradient = gradient @ weight
        weight_gradient = gradient.t() @ x if ctx.needs_input_grad[1] else None
        return input_gradient, weight_gradient, None, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        return _wait(_start_sum(part, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: str) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _wait(_start_sum(gradient, ctx.group)), None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, group: str) -> Tensor:
        largest = _wait(_collectives.all_reduce(logits.amax(-1), "max", group))
        shifted = logits - largest[:, None]
        column = labels - first
        here = (column >= 0) & (column < logits.shape[1])
        own = shifted.gather(1, torch.where(here, column, 0)[:, None]).squeeze(1)
        own, total = _wait(
            _start_sum(torch.stack([torch.where(here, own, 0.0), shifted.exp().sum(-1)]), group)
        ).unbind()
        ctx.save_for_backward(logits, labels, largest, total)
        ctx.first = first
        return total.log() - own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, largest, total = ctx.saved_tensors
        column = torch.arange(ctx.first, ctx.first + logits.shape[1], device=logits.device)
        probability = (logits - largest[:, None]).exp() / total[:, None]
        of_label = (column == labels[:, None]).to(logits.dtype)
        return (probability - of_label) * gradient[:, None], None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.options = ranks, group
        each = [1] * ranks
        return _wait(_collectives.all_to_all_single(x.contiguous(), each, each, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _AllToAll.apply(gradient, *ctx.options), None, None


column_product = register(
    _library,
    "column_product(Tensor x, Tensor weight, int ranks, str group, bool sequence, int own, bool keep_gathered) -> Tensor",
    _ColumnProduct.apply,
)
row_product = register(
    _library,
    "row_product(Tensor x, Tensor weight, int ranks, str group, bool sequence, int own) -> Tensor",
    _RowProduct.apply,
)
sum_over_ranks = register(_library, "sum_over_ranks(Tensor part, str group) -> Tensor", _Sum.apply)
sum_gradient = register(_library, "sum_gradient(Tensor(a) weight, str group) -> Tensor(a)", _SumGradient.apply)
# −ln softmax(logits)[label] in nats, [T], for logits [T, V] of the columns from `first` on.
cross_entropy = register(
    _library, "cross_entropy(Tensor logits, Tensor labels, int first, str group) -> Tensor", _CrossEntropy.apply
)
all_to_all = register(_library, "all_to_all(Tensor x, int ranks, str group) -> Tensor", _AllToAll.apply)
