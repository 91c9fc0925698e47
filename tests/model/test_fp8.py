"""`train.fp8`: products of scaled 8-bit numbers, beside float64, and the decoder's layers that use them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssscale.config.choices import Fp8, Recompute
from ssscale.engine.casts import WeightCasts
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel import fp8
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import FP8_LAYERS, ColumnParallelLinear, RowParallelLinear
from tests.distributed.compiled_models import make_model
from tests.model.fp8_reference import BF16, RECIPES, expected, numbers, products, run


@pytest.mark.parametrize("tokens", [64, 37, 1])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_and_gradients_beside_float64(recipe: str, tokens: int) -> None:
    given = numbers(tokens, 48, seed=1), numbers(96, 48, seed=2), 1e-7 * numbers(tokens, 96, seed=3)
    found, wanted = run(recipe, *given), expected(recipe, *given)
    for name, (a, b) in products(*(x.double() for x in given)).items():
        rounded, most = wanted[name]
        exact, size = a @ b.t(), a.abs() @ b.abs().t()
        # Equal to the looked-up numbers but for bf16, and within the bound of rounding both operands.
        assert (found[name] - rounded).norm() <= BF16 * rounded.norm(), name
        assert ((found[name] - exact).abs() <= most + BF16 * (exact.abs() + most) + 1e-6 * size).all(), name


def test_the_bound_notices_other_weights() -> None:
    given = numbers(64, 48, seed=1), numbers(96, 48, seed=2), numbers(64, 96, seed=3)
    rounded, _ = expected("rowwise", *given)["values"]
    assert (run("rowwise", *given, wrong=True)["values"] - rounded).norm() > 0.3 * rounded.norm()


def test_dtypes_and_scales_of_the_recipes() -> None:
    """Those of torchao: e5m2 for gradients with one scale per tensor, e4m3 and powers of two with scales per row."""
    x = numbers(32, 48)
    assert fp8.RECIPES["tensorwise"].gradient == torch.float8_e5m2
    assert {fp8.RECIPES[name].gradient for name in RECIPES[1:]} == {torch.float8_e4m3fn}
    for name in RECIPES:
        out, back = fp8.cast_weight(x, name)
        assert (out.values.shape, back.values.shape) == ((32, 48), (48, 32))
        assert out.values.dtype == back.values.dtype == torch.float8_e4m3fn
        assert out.values.is_contiguous()
        assert back.values.is_contiguous()
        if name == "tensorwise":
            assert out.inverse.shape == back.inverse.shape == ()
            assert torch.equal(out.values.view(torch.uint8), back.values.view(torch.uint8).t())
        else:
            assert (out.inverse.shape, back.inverse.shape) == ((32, 1), (48, 1))
            for cast in (out, back):
                assert (torch.frexp(cast.inverse)[0] == 0.5).all()
                assert (cast.values.float().abs().amax(1) > 223).all()


def test_scales_of_maxima_next_to_a_power_of_two() -> None:
    """x · s fills the dtype's range and 1 / s is exact, also where maxima of two kernels may be rounded apart."""
    borders = torch.tensor([1.0, 1.75, 2.0])
    near = torch.cat([borders.nextafter(torch.tensor(end)) for end in (0.0, 4.0)] + [borders, 1.75 + borders * 2.0**-8])
    largest = torch.outer(2.0 ** torch.arange(-90, 100, 10), near).flatten()
    scale, inverse = fp8.scale_of(largest[:, None] * torch.tensor([-1.0, 0.5]), torch.float8_e4m3fn, True)
    assert torch.equal(scale * inverse, torch.ones(len(largest), 1))
    filled = largest.double() * scale[:, 0].double()
    assert ((filled > 224) & (filled <= 448)).all()
    assert (torch.frexp(scale)[0] == 0.5).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_maximum_is_rounded_to_bf16(recipe: str) -> None:
    """Else Inductor computes s from rounded maxima and 1 / s from others (docs/log/2026-11-24-fp8.md)."""
    found = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket is torch.ops.aten.amax:
                found.append(result.dtype)
            return result

    with Record():
        run(recipe, numbers(32, 48), numbers(64, 48), numbers(32, 64))
    # Of X and dY, in two directions each if there are scales per row, and of Xᵀ.
    assert found.count(torch.float32) == len(found) >= 4


@pytest.mark.parametrize("recipe", RECIPES)
def test_zeros_are_zeros(recipe: str) -> None:
    x, weight, gradient = numbers(32, 48), numbers(64, 48), numbers(32, 64)
    for given in (
        (0 * x, weight, gradient),
        (x, 0 * weight, gradient),
        (x, weight, 0 * gradient),
        (0 * x, 0 * weight, 0 * gradient),
    ):
        found = run(recipe, *given)
        for name, (a, b) in products(*given).items():
            assert found[name].isfinite().all(), name
            assert bool(found[name].any()) == bool((a @ b.t()).any()), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_finite_is_not_hidden(recipe: str, value: float) -> None:
    """A saturating cast would turn infinity into a number, and the step would not be skipped."""
    x, weight, gradient = numbers(32, 48), numbers(64, 48), numbers(32, 64)
    x[3, 5] = value
    found = run(recipe, x, weight, gradient)
    assert not found["values"][3].isfinite().any()
    assert not found["weight"][:, 5].isfinite().any()
    if recipe != "tensorwise":
        assert found["values"].isfinite().all(1).sum() == 31
    gradient[3, 5] = value
    found = run(recipe, numbers(32, 48), weight, gradient)
    assert not found["x"][3].isfinite().any()
    assert not found["weight"][5].isfinite().any()


# The decoder.

TOKENS = 64
MODEL = replace(make_model("softmax", 4), vocab_size=128)


def make(groups: Groups, **options: Any) -> Decoder:
    decoder = Decoder(MODEL, groups, TOKENS, dtype=torch.bfloat16, **options)
    initialize_weights(decoder, MODEL, groups, 0)
    return decoder


def in_fp8(groups: Groups, recipe: str = "rowwise", **options: Any) -> Decoder:
    return make(groups, fp8=Fp8(recipe), fp8_blocks=[1, 2], **options)


def losses(decoder: Decoder) -> Tensor:
    tokens = 5 * torch.arange(TOKENS) % 128
    return decoder(tokens, PackedLayout.from_lengths([40, 24]), 7 * tokens % 128)


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    found = losses(decoder)
    found.mean().backward()
    return {name: weight.grad for name, weight in decoder.named_parameters()} | {"losses": found.detach()}


def linears(module: torch.nn.Module) -> list[type]:
    return [type(m) for m in module.modules() if isinstance(m, ColumnParallelLinear | RowParallelLinear)]


def test_only_the_chosen_blocks_have_other_layers(groups: Groups) -> None:
    assert set(linears(make(groups))) == {ColumnParallelLinear, RowParallelLinear}
    decoder = in_fp8(groups)
    assert [set(linears(block)) == set(FP8_LAYERS) for block in decoder.blocks] == [False, True, True, False]
    assert linears(decoder.head) == [ColumnParallelLinear]
    WeightCasts(decoder)
    losses(decoder)
    plain, other = dict(make(groups).named_parameters()), dict(decoder.named_parameters())
    assert decoder.state_dict().keys() == make(groups).state_dict().keys()
    assert plain.keys() == other.keys()
    assert all(torch.equal(plain[name], other[name]) and plain[name].dtype == other[name].dtype for name in plain)


def test_without_gradients_and_without_casts_the_bits_are_those_of_bf16(groups: Groups) -> None:
    plain, decoder = make(groups), in_fp8(groups)
    assert torch.equal(losses(decoder), losses(plain))
    casts = WeightCasts(decoder)
    with_casts = losses(decoder)
    assert not torch.equal(with_casts, losses(plain))
    with torch.no_grad():
        assert torch.equal(losses(decoder), losses(plain))
    casts.drop()
    assert all(layer.cast_weight is None for layer in casts.layers.values())
    assert torch.equal(losses(decoder), with_casts)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_near_those_of_bf16(recipe: str, groups: Groups) -> None:
    plain, decoder = gradients(make(groups)), in_fp8(groups, recipe)
    WeightCasts(decoder)
    found = gradients(decoder)
    for name, gradient in plain.items():
        difference = float((found[name].float() - gradient.float()).norm() / gradient.float().norm())
        assert 0 < difference < 0.2, name


@pytest.mark.parametrize("recompute", [Recompute.selective, Recompute.full])
def test_recomputation_gives_the_same_bits(
    recompute: Recompute, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that are computed again read the same casts: each weight is cast once."""
    counted: list[str] = []
    monkeypatch.setattr("ssscale.engine.casts.cast_weight", lambda w, r: (counted.append(r), fp8.cast_weight(w, r))[1])
    found = []
    for kind in (Recompute.none, recompute):
        decoder = in_fp8(groups, recompute=kind)
        WeightCasts(decoder)
        found.append(gradients(decoder))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], gradient) for name, gradient in found[0].items())
    assert len(counted) == 2 * 8


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.selective, Recompute.full])
def test_compiled_blocks_find_the_same_gradients(recompute: Recompute, groups: Groups) -> None:
    """In two graphs for all blocks: one for those in fp8 and one for the others."""
    plain = in_fp8(groups, "tensorwise", recompute=recompute)
    WeightCasts(plain)
    wanted = gradients(plain)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decoder = in_fp8(groups, "tensorwise", recompute=recompute)
    for block in decoder.blocks:
        block.compile(backend="aot_eager")
    casts = WeightCasts(decoder)
    casts._cast = fp8.cast_weight  # Inductor would have to compile it
    found = gradients(decoder)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2
    for name, gradient in wanted.items():
        # The dropped precision of fused casts in bf16 is all that differs.
        assert (found[name].float() - gradient.float()).norm() <= 0.02 * gradient.float().norm(), name
    casts.drop()
    gradients(decoder)
    assert counters["stats"]["unique_graphs"] == 2  # new casts need no new graph


def test_other_hardware_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"train\.fp8=rowwise needs GPUs of compute capability 9\.0 .* is on a CPU"):
        fp8.refuse_without_fp8("rowwise", torch.device("cpu"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "A100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match=r"A100 has 8\.0: use train\.fp8=none"):
        fp8.refuse_without_fp8("rowwise", torch.device("cuda", 0))
    for newer in ((9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda device, newer=newer: newer)
        fp8.refuse_without_fp8("rowwise", torch.device("cuda", 0))
