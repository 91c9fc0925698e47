"""Linear layers in fp8, computed in another way: numbers are looked up in the table of all 256 codes of the dtype."""

import torch
from torch import Tensor

from ssscale.config.choices import Fp8
from ssscale.parallel import fp8

RECIPES = [recipe.value for recipe in Fp8 if recipe is not Fp8.none]
BF16 = 2.0**-8  # relative error of a result: torch on CPUs rounds to bf16 twice

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
HALF_STEP = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}  # largest relative rounding error
SMALLEST_HALF = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}  # largest error of a subnormal number
FIRST, SECOND = torch.float8_e4m3fn, {"tensorwise": torch.float8_e5m2}  # of X and W, of dY


def scale(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Tensor:
    """Of x [M, N] in float64, as [M, 1]."""
    largest = x.abs().amax(1, keepdim=True) if rowwise else x.abs().max().expand(len(x), 1)
    found = LARGEST[dtype] / largest
    return 2.0 ** torch.floor(torch.log2(found)) if rowwise else found.float().double()


def rounded(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Tensor:
    """x [M, N] after a cast to fp8 and back, in float64: the nearest number, and between two of them that of the even code."""
    codes = torch.arange(256, dtype=torch.int32)
    values = codes.to(torch.uint8).view(dtype).double()
    order = values.argsort()
    order = order[values[order].isfinite()]
    values, even = values[order], codes[order] % 2 == 0
    s = scale(x, dtype, rowwise)
    scaled = x * s
    above = torch.searchsorted(values, scaled.contiguous()).clamp(1, len(values) - 1)
    up, down = values[above] - scaled, scaled - values[above - 1]
    return torch.where((up < down) | ((up == down) & even[above]), values[above], values[above - 1]) / s


def error(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Tensor:
    """The largest error of `rounded`, by element."""
    return torch.maximum(HALF_STEP[dtype] * x.abs(), SMALLEST_HALF[dtype] / scale(x, dtype, rowwise))


def products(x: Tensor, weight: Tensor, gradient: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """The operands A, B of the products A Bᵀ, by what they give: values, the gradient of x and that of the weight."""
    return {"values": (x, weight), "x": (gradient, weight.t()), "weight": (gradient.t(), x.t())}


def expected(recipe: str, x: Tensor, weight: Tensor, gradient: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """By product: the result with rounded operands in float64, and the largest difference from exact arithmetic.

    A Bᵀ with errors a of A and b of B is off by at most a |B|ᵀ + |A| bᵀ + a bᵀ.
    """
    found = {}
    for name, (a, b) in products(x.double(), weight.double(), gradient.double()).items():
        if recipe == "rowwise_bf16_dw" and name == "weight":
            found[name] = a @ b.t(), torch.zeros(len(a), len(b), dtype=torch.float64)
            continue
        row = recipe != "tensorwise"
        first = FIRST if name == "values" else SECOND.get(recipe, FIRST)
        off_a, off_b = error(a, first, row), error(b, FIRST, row)
        most = off_a @ b.abs().t() + a.abs() @ off_b.t() + off_a @ off_b.t()
        found[name] = rounded(a, first, row) @ rounded(b, FIRST, row).t(), most
    return found


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Rows and columns of very different sizes, as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [torch.exp(2 * torch.randn(n, generator=generator)) for n in shape]
    return (torch.randn(shape, generator=generator) * sizes[0][:, None] * sizes[1]).bfloat16()


def run(recipe: str, x: Tensor, weight: Tensor, gradient: Tensor, wrong: bool = False) -> dict[str, Tensor]:
    """wrong: with the casts of another weight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out, back = fp8.cast_weight(weight.detach() * (1.5 if wrong else 1), recipe)
    values = fp8.product(x, weight, *out, *back, recipe, True, 1, "", False, False)
    values.backward(gradient)
    assert values.dtype == x.grad.dtype == weight.grad.dtype == torch.bfloat16
    return {"values": values.detach(), "x": x.grad, "weight": weight.grad}
