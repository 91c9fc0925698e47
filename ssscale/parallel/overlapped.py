"""Tensor-parallel matrix products whose exchanges run beside them, by copy engines (`parallel.copy_engines`).

They compute what `column_product` and `row_product` of `ssscale.parallel.operators` compute under sequence parallelism, with
the same shapes. A rank multiplies what needs no exchange, or what the others wait for, first:

    gather     its own rows, while those of the others arrive; then those
    scatter    the rows of the other ranks, which are sent while it multiplies its own, or, in the backward pass of a column
               product, while it computes the gradient of the weight

Each operator is one node of a compiled graph. Sums over the ranks are in float32, always in the same order.
"""

from collections.abc import Callable
from typing import Any

import torch
from ssscale_kernels.versions import mark
from torch import Tensor

from ssscale.parallel import copies
from ssscale.parallel.copies import add_up, part, peers
from ssscale.parallel.registry import new_library, register

mark(__file__)

# Features of a rank. With fewer, bf16 rows take longer to arrive (300 GB/s) than as many to be multiplied (700 TFLOP/s).
HIDES = 2304
PRODUCTS = "ssscale_overlapped"  # substring of the names of these operators

_library = new_library(PRODUCTS, __file__, copies.__file__)


def _operator(schema: str, shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as an operator. `torch.library.custom_op` takes longer for each call.

    shapes: returns empty tensors of the shapes and dtypes of the results.
    """

    def made(body: Callable[..., Any]) -> Any:
        _library.define(schema)
        name = schema.partition("(")[0]
        for device in ("CPU", "CUDA"):
            _library.impl(name, body, device)
        torch.library.register_fake(f"{_library.ns}::{name}", shapes, lib=_library)
        return getattr(getattr(torch.ops, _library.ns), name).default

    return made


def _send_products(x: Tensor, right: Tensor, exchange: Any, total: Tensor | None = None) -> tuple[Tensor, Any]:
    """Multiplies the rows of the other ranks of x [T, D] by `right` [D, F], and starts to send them.

    Returns the product [T, F], this rank's rows undefined, and what `Peers.scatter` returns.
    """
    product = x.new_empty(len(x), right.shape[1])
    sizes = [len(x) // exchange.ranks] * exchange.ranks
    rows, parts = torch.split_with_sizes(x, sizes), torch.split_with_sizes(product, sizes)
    for rank in exchange.others:
        torch.mm(rows[rank], right, out=parts[rank])
    return product, exchange.scatter(product, total)


@_operator(
    "gather_and_multiply(Tensor x, Tensor right, int ranks, str group, int own) -> (Tensor, Tensor)",
    lambda x, right, ranks, group, own: (
        x.new_empty(len(x) * ranks, right.shape[1]),
        x.new_empty(len(x) * ranks, x.shape[1]),
    ),
)
def gather_and_multiply(x: Tensor, right: Tensor, ranks: int, group: str, own: int) -> tuple[Tensor, Tensor]:
    """Returns the product [T, F] of all ranks' rows with `right` [D, F], and all ranks' rows [T, D].

    x: [T / R, D], this rank's rows. own: the index of this rank.
    """
    rows = len(x)
    gathering = peers(group, x.device).gather(x.contiguous())
    product = x.new_empty(rows * ranks, right.shape[1])
    sizes = [own * rows, rows, (ranks - 1 - own) * rows]
    parts = torch.split_with_sizes(product, sizes)
    torch.mm(x, right, out=parts[1])
    arrived = torch.split_with_sizes(gathering.arrived(), sizes)
    for place in (0, 2):
        if sizes[place]:
            torch.mm(arrived[place], right, out=parts[place])
    return product, gathering.whole()


@_operator(
    "multiply_and_scatter(Tensor x, Tensor right, int ranks, str group, int own) -> Tensor",
    lambda x, right, ranks, group, own: x.new_empty(len(x) // ranks, right.shape[1]),
)
def multiply_and_scatter(x: Tensor, right: Tensor, ranks: int, group: str, own: int) -> Tensor:
    """Returns this rank's rows [T / R, F] of the product of x [T, D] with `right` [D, F], summed over the ranks."""
    product, arriving = _send_products(x, right, peers(group, x.device))
    mine = part(product, own, ranks)
    torch.mm(part(x, own, ranks), right, out=mine)
    received = arriving()
    received.insert(own, mine)
    if ranks == 2:  # as below, in fewer calls
        return torch.add(*received)
    total = torch.empty_like(mine)
    add_up(received, total)
    return total


@_operator(
    "column_gradients(Tensor gradient, Tensor weight, Tensor x, int ranks, str group, int own, bool again) -> (Tensor, Tensor)",
    lambda gradient, weight, x, ranks, group, own, again: (
        x.new_empty(len(gradient) // ranks, weight.shape[1]),
        weight.new_empty(weight.shape),
    ),
)
def column_gradients(
    gradient: Tensor, weight: Tensor, x: Tensor, ranks: int, group: str, own: int, again: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a column product: of this rank's rows [T / R, D], summed over the ranks, and of the weight.

    gradient: [T, F]. weight: [F, D]. x: all rows [T, D], or with `again` this rank's, and all are gathered.
    The product of the own rows comes last, and is added to what has arrived before it is rounded.
    """
    exchange = peers(group, x.device)
    gathering = exchange.gather(x.contiguous()) if again else None
    of_rows = gradient.new_empty(len(gradient) // ranks, weight.shape[1])
    # The name keeps the memory of what is sent until it has arrived.
    _sent, arriving = _send_products(gradient, weight, exchange, of_rows)
    of_weight = torch.mm(gradient.t(), x if gathering is None else gathering.whole())
    received = arriving()
    of_rows.addmm_(part(gradient, own, ranks), weight)
    if ranks > 2:
        add_up(received, of_rows)
    return of_rows, of_weight


@_operator(
    "row_gradients(Tensor gradient, Tensor weight, Tensor x, int ranks, str group, int own) -> (Tensor, Tensor)",
    lambda gradient, weight, x, ranks, group, own: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
def row_gradients(
    gradient: Tensor, weight: Tensor, x: Tensor, ranks: int, group: str, own: int
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a row product: of x [T, F], and of the weight [D, F].

    gradient: this rank's rows [T / R, D]. Where F is less than `HIDES`, the rows of the others arrive later than the product
    of the own rows ends. Their part of the weight's gradient comes next then, and is rounded before the others' is added.
    """
    if weight.shape[1] >= HIDES:
        of_rows, whole = gather_and_multiply(gradient, weight, ranks, group, own)
        return of_rows, torch.mm(whole.t(), x)
    rows = len(gradient)
    gathering = peers(group, x.device).gather(gradient.contiguous(), fill=False)
    sizes = [own * rows, rows, (ranks - 1 - own) * rows]
    of_rows = x.new_empty(x.shape)
    parts, inputs = torch.split_with_sizes(of_rows, sizes), torch.split_with_sizes(x, sizes)
    torch.mm(gradient, weight, out=parts[1])
    of_weight = torch.mm(gradient.t(), inputs[1])
    arrived = torch.split_with_sizes(gathering.arrived(), sizes)
    for place in (0, 2):
        if sizes[place]:
            torch.mm(arrived[place], weight, out=parts[place])
            of_weight.addmm_(arrived[place].t(), inputs[place])
    gathering.whole()
    return of_rows, of_weight


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ranks: int, group: str, own: int, keep_gathered: bool) -> Tensor:
        product, whole = gather_and_multiply(x, weight.t(), ranks, group, own)
        ctx.save_for_backward(whole if keep_gathered else x, weight)
        ctx.options = ranks, group, own, not keep_gathered
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_rows, of_weight = column_gradients(gradient.contiguous(), weight, x, *ctx.options)
        return of_rows, of_weight, None, None, None, None


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ranks: int, group: str, own: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options = ranks, group, own
        return multiply_and_scatter(x, weight.t(), ranks, group, own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *row_gradients(gradient, weight, x, *ctx.options), None, None, None


column_product = register(
    _library,
    "column_product(Tensor x, Tensor weight, int ranks, str group, int own, bool keep_gathered) -> Tensor",
    _ColumnProduct.apply,
)
row_product = register(
    _library, "row_product(Tensor x, Tensor weight, int ranks, str group, int own) -> Tensor", _RowProduct.apply
)
