"""fp8 on a Hopper GPU: its products beside rounded operands in float64, and compiled blocks beside those that are not.

`pytest -m gpu tests/gpu/test_fp8.py`: three minutes, most of them compiling. Tests that compile little come first.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ssscale.config.choices import Fp8, Recompute
from ssscale.engine.casts import WeightCasts
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel import fp8
from ssscale.parallel.groups import Groups
from tests.distributed.compiled_models import make_model
from tests.model.fp8_reference import BF16, RECIPES, expected, numbers, products, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="no tensor cores for fp8"
    ),
]
DEVICE = "cuda"
# The tensor cores add products of e4m3 numbers up with at least 14 bits, in runs of up to all of them
# (arXiv:2412.19437, Section 3.3.2), which costs no more than this part of Σ |a b|.
ACCUMULATED = 2.0**-12


@pytest.mark.parametrize("tokens", [512, 37])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients_beside_float64(recipe: str, tokens: int) -> None:
    given = numbers(tokens, 256, seed=1), numbers(384, 256, seed=2), 1e-7 * numbers(tokens, 384, seed=3)
    found, wanted = run(recipe, *(x.to(DEVICE) for x in given)), expected(recipe, *given)
    for name, (a, b) in products(*(x.double() for x in given)).items():
        rounded, most = wanted[name]
        exact, size = a @ b.t(), a.abs() @ b.abs().t()
        value = found[name].cpu().double()
        # A scale that is not a power of two, off in its last bit, rounds a number in the middle between two to the other one.
        most_flips = 0.02 * rounded.norm() if recipe == "tensorwise" else 0.0
        assert (value - rounded).norm() <= most_flips + BF16 * rounded.norm() + ACCUMULATED * size.norm(), name
        assert ((value - exact).abs() <= most + BF16 * (exact.abs() + most) + ACCUMULATED * size).all(), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_not_hidden(recipe: str) -> None:
    for value in (float("nan"), float("inf")):
        x, weight, gradient = (numbers(*shape).to(DEVICE) for shape in ((32, 48), (64, 48), (32, 64)))
        x[3, 5] = value
        found = run(recipe, x, weight, gradient)
        assert not found["values"][3].isfinite().any()
        assert not found["weight"][:, 5].isfinite().any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_casts_of_weights(recipe: str) -> None:
    """They may only differ in the last bits of the scale."""
    weight = numbers(768, 256).to(DEVICE)
    plain, compiled = fp8.cast_weight(weight, recipe), torch.compile(fp8.cast_weight, dynamic=False)(weight, recipe)
    for one, other in zip(plain, compiled, strict=True):
        back = [(cast.values.double() * cast.inverse.double()) for cast in (one, other)]
        assert (back[0] - back[1]).abs().max() <= 0.13 * back[0].abs().max()
        assert (back[0] != back[1]).double().mean() < 1e-2 or recipe == "tensorwise"


def above_the_border(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns a and b in bf16. The maximum of a · b in every row and column is 1.751, which bf16 rounds to 1.75."""
    generator = torch.Generator().manual_seed(0)
    a = torch.ones(tokens, size)
    b = torch.randn(tokens, size, generator=generator).clamp(-1.5, 1.5)
    rows = torch.arange(tokens)
    a[rows, rows % size], b[rows, rows % size] = 1.375, 1.2734375
    return a.bfloat16(), b.bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_maxima_that_bf16_rounds_over_a_border(recipe: str) -> None:
    """In a compiled graph, the casts may read a · b before it is rounded. No row may be too large or small by a factor of 2."""
    weight, gradient = numbers(256, 256, seed=1).to(DEVICE), numbers(2048, 256, seed=2).to(DEVICE)
    casts = fp8.cast_weight(weight, recipe)

    def multiply(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        return fp8.product(a * b, weight, *casts[0], *casts[1], recipe, True, 1, "", False, False)

    found = []
    for function in (multiply, torch.compile(multiply, dynamic=False)):
        a, b, own = (x.to(DEVICE).requires_grad_() for x in (*above_the_border(2048, 256), weight.detach().clone()))
        values = function(a, b, own)
        values.backward(gradient)
        found.append({"values": values.detach(), "weight": own.grad, "b": b.grad})
    # One scale per tensor is another one for a maximum that is 0.06 % larger, so that other numbers are rounded.
    most = 0.03 if recipe == "tensorwise" else 0.005
    for name, plain in found[0].items():
        assert (found[1][name] - plain).double().norm() <= most * plain.double().norm(), name


def gradients(
    groups: Groups, recipe: Fp8, compiled: bool, recompute: Recompute, dtype: torch.dtype
) -> dict[str, Tensor]:
    config = replace(make_model("softmax", 4), hidden_size=256, ffn_hidden_size=768, vocab_size=512)
    torch._dynamo.reset()
    with torch.device(DEVICE):
        decoder = Decoder(
            config,
            replace(groups, device=torch.device(DEVICE)),
            2048,
            dtype=dtype,
            recompute=recompute,
            fp8=recipe,
            fp8_blocks=(1, 2),
        )
        initialize_weights(decoder, config, groups, seed=1)
        tokens = torch.arange(2048) % config.vocab_size
    if compiled:
        decoder.compile_parts()
    WeightCasts(decoder)
    losses = decoder(tokens, PackedLayout.from_lengths([1000, 1048]).to(DEVICE), (7 * tokens + 3) % config.vocab_size)
    losses.mean().backward()
    return {name: p.grad.double() for name, p in decoder.named_parameters()} | {"losses": losses.detach().double()}


@pytest.fixture(scope="module")
def plain(groups: Groups) -> dict[str, Tensor]:
    return gradients(groups, Fp8.none, False, Recompute.none, torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.selective])
def test_compiled_blocks_are_as_near_to_bf16(
    recipe: str, recompute: Recompute, groups: Groups, plain: dict[str, Tensor]
) -> None:
    """Fused casts round other numbers, so that compiled and uncompiled gradients differ as both do from those in bf16."""
    far = {}
    for compiled in (False, True):
        found = gradients(groups, Fp8(recipe), compiled, recompute, torch.bfloat16)
        far[compiled] = {name: float((found[name] - g).norm() / g.norm()) for name, g in plain.items()}
    for name, distance in far[True].items():
        assert distance <= 1.5 * far[False][name] + 0.02, name
        assert distance < 0.2, name
