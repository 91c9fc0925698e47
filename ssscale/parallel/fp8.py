"""Linear layers in fp8 (`train.fp8`): Y = X Wᵀ and both of its gradients as products of scaled 8-bit numbers.

A tensor x is cast to q = round(x · s), and products use q / s. The scale s maps the largest |x| to the largest number of
the dtype, 448 for e4m3 and 57,344 for e5m2 (arXiv:2209.05433):

    recipe            scales                                X, W    dY     product dW   fast accumulation
    tensorwise        one per tensor                        e4m3    e5m2   fp8          forward only
    rowwise           one per row, rounded down to 2^n      e4m3    e4m3   fp8          all products
    rowwise_bf16_dw   one per row, rounded down to 2^n      e4m3    e4m3   bf16         all products in fp8

These are torchao's recipes `tensorwise`, `rowwise` and `rowwise_with_gw_hp` (torchao/float8/config.py) with two differences:
W is cast once per optimizer step instead of in every pass, and in the last recipe it has scales per row in the gradient of X
too. A row is a vector along the dimension that a product sums over. So X and dY have other scales, and other numbers, in dW
than in the other two products.

The casts are plain torch operators, which Inductor fuses. Nothing is exchanged for the scales: they are those of the tensors
that a rank multiplies. Under sequence parallelism these are the gathered tokens.

Shapes: T tokens, weight [F, D] of this rank. F and D must be multiples of 16. T is padded with zeros where it is summed over.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives  # registers the shapes of the operators in _c10d_functional
import torch.nn.functional as F
from ssscale_kernels.versions import mark
from torch import Tensor

from ssscale.errors import UserError
from ssscale.parallel.registry import new_library, register

mark(__file__)

MULTIPLE = 16  # `torch._scaled_mm` needs rows of 16 bytes
# Smaller maxima count as this one, so that a tensor of zeros has a finite scale. Gradients stay far above it.
SMALLEST = 2.0**-100
EXPONENT = 0x7F80_0000  # the bits of a positive float32 that round it down to a power of two
ABOVE_175 = 0x001F_FFFF  # added to the bits of m · 2^e, 1 ≤ m < 2: carries into the exponent if m > 1.75 = 448 / 256
INVERSE = 0x7F00_0000  # minus the bits of a power of two: the bits of its inverse

_collectives = torch.ops._c10d_functional
_library = new_library("ssscale_fp8", __file__)


@dataclass(frozen=True)
class Recipe:
    """rowwise: scales per row that are powers of two, else one per tensor. gradient: the dtype of dY.

    cast_dw: whether dW is a product in fp8. fast_backward: whether the tensor cores' own accumulator, which has fewer bits
        than fp32, adds up whole rows in the backward products. It always does in the forward product.
    """

    rowwise: bool
    gradient: torch.dtype
    cast_dw: bool
    fast_backward: bool


RECIPES = {
    "tensorwise": Recipe(rowwise=False, gradient=torch.float8_e5m2, cast_dw=True, fast_backward=False),
    "rowwise": Recipe(rowwise=True, gradient=torch.float8_e4m3fn, cast_dw=True, fast_backward=True),
    "rowwise_bf16_dw": Recipe(rowwise=True, gradient=torch.float8_e4m3fn, cast_dw=False, fast_backward=True),
}


class Cast(NamedTuple):
    """x ≈ values · inverse. values: [M, N] in fp8, contiguous. inverse: 1 / scale, [M, 1] or a scalar, float32."""

    values: Tensor
    inverse: Tensor


class CastWeight(NamedTuple):
    """A weight W [F, D] as both products read it: W for the forward product and Wᵀ [D, F] for the gradient of X."""

    forward: Cast
    backward: Cast


def refuse_without_fp8(recipe: str, device: torch.device) -> None:
    """Raises UserError if the device has no tensor cores for fp8."""
    found = "this run is on a CPU"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) >= (9, 0):
            return
        found = f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
    raise UserError(
        f"train.fp8={recipe} needs GPUs of compute capability 9.0 or newer, such as H100 and H200, and {found}: use "
        "train.fp8=none"
    )


class Scale(NamedTuple):
    """scale, inverse: s and 1 / s, [M, 1] or scalars, float32."""

    scale: Tensor
    inverse: Tensor


def scale_of(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Scale:
    """Returns the scale of x [M, N]. That of an infinite maximum is 0. rowwise: dtype must be e4m3.

    Inductor repeats cheap operations wherever a result is used. A kernel that casts then computes s from the stored
    maximum, and another one computes 1 / s from a maximum in its registers, which it has not rounded to x's dtype. Next to
    1.75 · 2^n the two would differ by a factor of 2. Therefore the maximum is float32, and a power of two comes from the bits
    of integers, which every kernel computes alike.
    """
    size = x.float().abs()
    largest = (size.amax(-1, keepdim=True) if rowwise else size.amax()).clamp(min=SMALLEST)
    if not rowwise:
        scale = torch.finfo(dtype).max / largest
        return Scale(scale, scale.reciprocal())
    power = (
        largest.view(torch.int32) + ABOVE_175
    ) & EXPONENT  # the smallest p = 2^n with largest ≤ 1.75 p: s = 256 / p
    return Scale((INVERSE - power).clamp(min=0).view(torch.float32) * 256.0, power.view(torch.float32) / 256.0)


def cast(x: Tensor, dtype: torch.dtype, rowwise: bool, scale: Scale | None = None) -> Cast:
    """Casts x [M, N]. scale: None computes it. A NaN or infinity in a row makes all sums over the row NaN."""
    scale, inverse = scale_of(x, dtype, rowwise) if scale is None else scale
    most = torch.finfo(dtype).max
    return Cast((x.float() * scale).clamp(-most, most).to(dtype).contiguous(), inverse)


def cast_weight(weight: Tensor, recipe: str) -> CastWeight:
    """Casts a weight [F, D] for a step."""
    rowwise = RECIPES[recipe].rowwise
    scale = None if rowwise else scale_of(weight, torch.float8_e4m3fn, rowwise)
    return CastWeight(*(cast(w, torch.float8_e4m3fn, rowwise, scale) for w in (weight, weight.t())))


def multiply(a: Cast, b: Cast, dtype: torch.dtype, fast: bool) -> Tensor:
    """Returns A Bᵀ [M, N] for A [M, K] and B [N, K]."""
    scales = {"scale_a": a.inverse, "scale_b": b.inverse.t()}
    return torch._scaled_mm(a.values, b.values.t(), **scales, out_dtype=dtype, use_fast_accum=fast)


def _start_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    return _collectives.all_gather_into_tensor(x.contiguous(), ranks, group)


def _start_reduction(x: Tensor, ranks: int, group: str, sequence: bool) -> Tensor:
    if sequence:
        return _collectives.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group)
    return _collectives.all_reduce(x.contiguous(), "sum", group)


def _wait(x: Tensor) -> Tensor:
    return _collectives.wait_tensor(x)


@torch.library.custom_op(f"{_library.ns}::multiply_and_gather", mutates_args=())
def multiply_and_gather(
    a: Tensor, a_inverse: Tensor, b: Tensor, b_inverse: Tensor, fast: bool, x: Tensor, ranks: int, group: str
) -> tuple[Tensor, Tensor]:
    """Returns A Bᵀ, and x of all ranks, which is gathered meanwhile.

    Not part of the graph for the reason of `ssscale.parallel.operators.multiply_and_gather`.
    """
    whole = _start_gather(x, ranks, group)
    product = multiply(Cast(a, a_inverse), Cast(b, b_inverse), x.dtype, fast)
    return product, _wait(whole)


@multiply_and_gather.register_fake
def _(a, a_inverse, b, b_inverse, fast, x, ranks, group):  # type: ignore[no-untyped-def]
    return x.new_empty(len(a), len(b)), x.new_empty(len(x) * ranks, x.shape[1])


class _Product(torch.autograd.Function):
    """Y = X Wᵀ. A column product gathers X under sequence parallelism, and a row product sums Y over the ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        out_inverse: Tensor,
        back: Tensor,
        back_inverse: Tensor,
        recipe: str,
        column: bool,
        ranks: int,
        group: str,
        sequence: bool,
        keep_gathered: bool,
    ) -> Tensor:
        """weight: gets the gradient; its values are not read. out, back: those of its `CastWeight`, with their inverses."""
        ctx.options = recipe, column, ranks, group, sequence
        ctx.again = column and sequence and not keep_gathered
        whole = _wait(_start_gather(x, ranks, group)) if column and sequence else x
        ctx.save_for_backward(x if ctx.again else whole, back, back_inverse)
        rows = cast(whole, torch.float8_e4m3fn, RECIPES[recipe].rowwise)
        product = multiply(rows, Cast(out, out_inverse), x.dtype, fast=True)
        return product if column or ranks == 1 else _wait(_start_reduction(product, ranks, group, sequence))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, back, back_inverse = ctx.saved_tensors
        name, column, ranks, group, sequence = ctx.options
        recipe = RECIPES[name]
        gradient = _wait(_start_gather(gradient, ranks, group)) if sequence and not column else gradient.contiguous()
        scale = scale_of(gradient, recipe.gradient, recipe.rowwise)
        rows = cast(gradient, recipe.gradient, recipe.rowwise, scale)
        fast = recipe.fast_backward
        if ctx.again:
            x_gradient, x = multiply_and_gather(*rows, back, back_inverse, fast, x, ranks, group)
        else:
            x_gradient = multiply(rows, Cast(back, back_inverse), x.dtype, fast)
        shared = column and ranks > 1
        started = _start_reduction(x_gradient, ranks, group, sequence) if shared else x_gradient
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = _weight_gradient(gradient, x, recipe, None if recipe.rowwise else scale)
        return _wait(started) if shared else started, weight_gradient, *[None] * 10


def _weight_gradient(gradient: Tensor, x: Tensor, recipe: Recipe, scale: Scale | None) -> Tensor:
    """Returns dYᵀ X [F, D]. scale: of dY, if it is one for the whole tensor."""
    if not recipe.cast_dw:
        return gradient.t() @ x
    missing = -len(x) % MULTIPLE
    if missing:
        gradient, x = F.pad(gradient, (0, 0, 0, missing)), F.pad(x, (0, 0, 0, missing))
    columns = cast(gradient.t(), recipe.gradient, recipe.rowwise, scale)
    return multiply(columns, cast(x.t(), torch.float8_e4m3fn, recipe.rowwise), x.dtype, recipe.fast_backward)


product = register(
    _library,
    "product(Tensor x, Tensor weight, Tensor out, Tensor out_inverse, Tensor back, Tensor back_inverse, str recipe, "
    "bool column, int ranks, str group, bool sequence, bool keep_gathered) -> Tensor",
    _Product.apply,
)
