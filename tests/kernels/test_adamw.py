"""The optimizer step over flat buffers: the definition, the path for CPUs, and the kernels without a GPU."""

import re
from typing import Any

import pytest
import torch
import triton.language as tl
from ssscale_kernels.adamw import FlatAdamW, Segment, Settings, adamw_reference, clip_factor, kernels, summed
from ssscale_kernels.adamw.bounds import exact_and_bounds, share_of_bounds
from ssscale_kernels.adamw.launch import EXACT, Tiling
from ssscale_kernels.adamw.settings import constants
from ssscale_kernels.sums import sum_in_order
from ssscale_kernels.testing import compile_for_hopper, resources
from torch import Tensor
from triton.compiler import CompiledKernel

from tests.kernels.adamw_interpreted import CASES, PARTS, spread
from tests.kernels.interpreted import run_interpreted

STEPS = Settings(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
TYPES = {
    **dict.fromkeys(("addresses_ptr", "gradients_ptr", "sizes_ptr"), "*i64"),
    **dict.fromkeys(("segment_of_ptr", "first_chunk_ptr", "group_of_ptr", "counted_ptr"), "*i32"),
    **dict.fromkeys(("factor_ptr", "sums_ptr", "total_ptr"), "*fp32"),
    **dict.fromkeys(("num_segments", "num_chunks", "begin"), "i32"),
    "settings_ptr": "*fp64",
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    return run_interpreted("adamw_interpreted.py")


@pytest.mark.parametrize("name", CASES)
def test_kernels_give_the_bits_of_the_reference(interpreted: dict[str, dict[str, Any]], name: str) -> None:
    found = interpreted[name]
    assert found["same_bits"]
    assert found["skipped"] == (name in ("nan", "inf"))
    assert found["norm_error"] < 1e-6
    assert found["share_of_bounds"] <= 1
    assert found["torch_share"] <= 1
    # In units of the last place, against float64. torch's fused AdamW on the same CPU is no better.
    assert found["error"] <= found["torch_error"]
    if name in ("not clipped", "no clipping"):
        assert found["factor"] == 1.0
    elif not found["skipped"]:
        assert 0 < found["factor"] < 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offsets_have_64_bits(interpreted: dict[str, dict[str, Any]], dtype: str) -> None:
    found = interpreted[f"far torch.{dtype}"]
    assert found["same_bits"]
    assert found["norm_error"] < 1e-6


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parts", PARTS)
def test_gradients_in_parts_have_the_bits_of_their_sums(
    interpreted: dict[str, dict[str, Any]], parts: int, dtype: str, aligned: bool
) -> None:
    found = interpreted[f"{parts} parts torch.{dtype} {aligned}"]
    assert found == {"same_norm": True, "same_bits": True, "untouched": True, "aligned": aligned}


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("max_norm", [0.7, 0.0])
def test_the_reference_is_adamw_with_clipping_in_float64(weight_decay: float, max_norm: float) -> None:
    """torch's own loop over tensors, and its clipping. Four steps of lr that differs from step to step."""
    torch.manual_seed(0)
    weight = torch.randn(50, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], betas=STEPS[1:3], eps=1e-8, weight_decay=weight_decay, foreach=False)
    state = (weight.detach().clone(), *(torch.zeros(50, dtype=torch.float64) for _ in range(2)))
    for step in range(1, 5):
        gradient = torch.randn(50, dtype=torch.float64)
        _, factor = clip_factor(gradient.square().sum(), max_norm)
        settings = STEPS._replace(lr=step * 1e-2, step=step, weight_decay=weight_decay)
        state = adamw_reference(*state, gradient, settings, factor)
        weight.grad = gradient.clone()
        if max_norm:
            torch.nn.utils.clip_grad_norm_([weight], max_norm)
        optimizer.param_groups[0]["lr"] = settings.lr
        optimizer.step()
        torch.testing.assert_close(state[0], weight.detach(), rtol=1e-12, atol=1e-14)
    found = optimizer.state[weight]
    torch.testing.assert_close(state[1:], (found["exp_avg"], found["exp_avg_sq"]), rtol=1e-12, atol=1e-14)


def random_state(n: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """As in the benchmark: moments and gradient are independent, so m nearly vanishes for some elements, and w for others."""
    torch.manual_seed(1)
    return (torch.randn(n) * 0.02, torch.randn(n) * 1e-4, (torch.randn(n) * 1e-4).square()), torch.randn(n) * 1e-3


def in_float32(state: tuple[Tensor, Tensor, Tensor], gradient: Tensor, settings: Settings, factor: Tensor) -> Any:
    """AdamW as torch's fused kernel on GPUs writes it since 2.10: float32 settings and operations."""
    w, m, v = state
    lr, beta1, beta2, eps, decay = (torch.tensor(x, dtype=torch.float32) for x in settings[:5])
    g = gradient * factor
    w = w - lr * decay * w
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    correction1, correction2 = 1 - beta1**settings.step, 1 - beta2**settings.step
    return w - lr / correction1 * m / (v.sqrt() / correction2.sqrt() + eps), m, v


def with_reciprocal(state: tuple[Tensor, Tensor, Tensor], gradient: Tensor, settings: Settings, factor: Tensor) -> Any:
    """The reference, but the division by √(1 − β₂ᵗ) is a product with its reciprocal, as torch divides on GPUs."""
    _, m, v = adamw_reference(*state, gradient, settings, factor)
    decay, *_, eps, step_size, correction = constants(settings)
    root = v.sqrt() * (1 / torch.tensor(correction))
    return (state[0].double() * (1 - decay)).float() - step_size * m / (root + eps), m, v


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_errors_stay_within_the_bounds(step: int) -> None:
    state, gradient = random_state(1_000_000)
    settings, factor = STEPS._replace(lr=1e-4, step=step), torch.tensor(0.6)
    for single, found in (
        (False, adamw_reference(*state, gradient, settings, factor)),
        (False, with_reciprocal(state, gradient, settings, factor)),
        (True, in_float32(state, gradient, settings, factor)),
    ):
        # The bounds are reached within a factor of 20: they are not much wider than errors are.
        assert 0.05 < share_of_bounds(found, *exact_and_bounds(state, gradient, settings, factor, single)) <= 1


def mistakes(state: tuple[Tensor, Tensor, Tensor], gradient: Tensor, settings: Settings, factor: Tensor) -> Any:
    """Results of wrong definitions by name, rounded from float64."""
    w, m, v = (x.double() for x in state)
    lr, beta1, beta2, eps, decay, step = settings

    def reference(**changed: Any) -> Any:
        return adamw_reference(w, m, v, gradient, settings._replace(**changed), factor.double())

    right = reference()
    root = (right[2] / (1 - beta2**step)).sqrt()
    kept, size = w - lr * decay * w, lr / (1 - beta1**step)
    found = {
        "beta1": reference(beta1=beta1 * (1 + 2e-6)),
        "beta2": reference(beta2=beta2 * (1 + 2e-6)),
        "the step before": reference(step=step + 1),
        "no correction of m": (kept - lr * right[1] / (root + eps), *right[1:]),
        "no correction of v": (kept - size * right[1] / (right[2].sqrt() + eps), *right[1:]),
        "eps inside the root": (kept - size * right[1] / (right[2] / (1 - beta2**step) + eps).sqrt(), *right[1:]),
        "no eps": (kept - size * right[1] / root, *right[1:]),
        "no clipping": adamw_reference(w, m, v, gradient, settings, torch.ones((), dtype=torch.float64)),
        "no decay": reference(weight_decay=0.0),
        "a coupled decay": adamw_reference(
            w, m, v, gradient + decay * state[0], settings._replace(weight_decay=0.0), factor
        ),
        "one element": tuple(x.clone() for x in right),
    }
    found["one element"][0][-1] = w[-1]
    return found


@pytest.mark.parametrize("single", [False, True])
def test_a_mistake_leaves_the_bounds(single: bool) -> None:
    state, gradient = random_state(100_000)
    settings, factor = STEPS._replace(lr=1e-4, step=3), torch.tensor(0.6)
    exact, bounds = exact_and_bounds(state, gradient, settings, factor, single)
    for name, wrong in mistakes(state, gradient, settings, factor).items():
        assert share_of_bounds(tuple(x.float() for x in wrong), exact, bounds) > 2, name
    broken = tuple(x.float() for x in exact)
    broken[1][0] = torch.nan
    assert share_of_bounds(broken, exact, bounds) == torch.inf


def segments(sizes: tuple[int, ...]) -> list[Segment]:
    torch.manual_seed(0)
    return [
        Segment(torch.randn(n), torch.randn(n), torch.rand(n), torch.zeros(n).bfloat16(), group=i % 2, counted=i != 1)
        for i, n in enumerate(sizes)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_path_for_cpus_follows_the_reference(dtype: torch.dtype) -> None:
    held = segments((5, 64, 1001))
    gradients = [torch.randn(s.master.numel()).to(dtype) for s in held]
    settings = [STEPS._replace(step=7), STEPS._replace(lr=1e-4, weight_decay=0.0, step=2)]
    exact = [(x.master.double(), x.exp_avg.double(), x.exp_avg_sq.double()) for x in held]
    optimizer = FlatAdamW(held)
    total = optimizer.sum_of_squares(gradients)
    expected = sum(g.double().square().sum() for g, s in zip(gradients, held) if s.counted)
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    _, factor = clip_factor(total, 1.0)
    optimizer.update(gradients, settings, factor)
    for segment, state, gradient in zip(held, exact, gradients):
        wanted = adamw_reference(*state, gradient, settings[segment.group], factor.double())
        ours: list[Tensor] = [segment.master, segment.exp_avg, segment.exp_avg_sq]
        for a, e in zip(ours, wanted):
            torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=1e-6)
        assert torch.equal(segment.rounded, segment.master.bfloat16())
    before = [segment.master.clone() for segment in held]
    optimizer.update(gradients, settings, clip_factor(torch.tensor(torch.nan), 1.0)[1])
    assert all(torch.equal(segment.master, old) for segment, old in zip(held, before))


@pytest.mark.parametrize("parts", PARTS)
def test_the_path_for_cpus_adds_parts_in_their_order(parts: int) -> None:
    sizes = (5, 64, 1001)
    held, same = segments(sizes), segments(sizes)
    generator = torch.Generator().manual_seed(0)
    given = [spread(n, generator).bfloat16() for n in sizes for _ in range(parts)]
    sums = [torch.empty(n) for n in sizes]
    for i, out in enumerate(sums):
        sum_in_order(given[i * parts : (i + 1) * parts], out)
        assert torch.equal(summed(given[i * parts : (i + 1) * parts]), out)
    settings = [STEPS, STEPS._replace(lr=1e-4)]
    ours, theirs = FlatAdamW(held), FlatAdamW(same)
    total = ours.sum_of_squares(given, parts)
    assert torch.equal(total, theirs.sum_of_squares(sums))
    _, factor = clip_factor(total, 1.0)
    ours.update(given, settings, factor, parts)
    theirs.update(sums, settings, factor)
    for a, b in zip(held, same):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in Segment.TENSORS)
    with pytest.raises(ValueError, match=f"there are {3 * parts} gradients for 3 segments of {parts + 1} parts"):
        ours.sum_of_squares(given, parts + 1)


def test_bad_tensors_are_refused() -> None:
    one = torch.zeros(4)
    with pytest.raises(ValueError, match=r"rounded must be torch\.bfloat16, not torch\.float32"):
        Segment(one, one, one, one)
    with pytest.raises(ValueError, match="exp_avg has 3 elements on cpu, and master 4"):
        Segment(one, one[:3], one, one.bfloat16())
    with pytest.raises(ValueError, match=r"master must be contiguous with one dimension, not \[2, 2\]"):
        Segment(one.view(2, 2), one, one, one.bfloat16())
    optimizer = FlatAdamW([Segment(one, one.clone(), one.clone(), one.bfloat16(), group=1)])
    with pytest.raises(ValueError, match="there are 2 gradients for 1 segments"):
        optimizer.sum_of_squares([one, one])
    with pytest.raises(ValueError, match=r"gradients must be all float32 or all bfloat16, not torch\.float16"):
        optimizer.sum_of_squares([one.half()])
    with pytest.raises(ValueError, match="there are 1 settings"):
        optimizer.update([one], [STEPS], torch.ones(()))
    with pytest.raises(ValueError, match="each of the 1 segments once"):
        optimizer.update_in_turn([one], [STEPS, STEPS], torch.ones(()), 1, [range(1), range(1)])
    with pytest.raises(ValueError, match="at least one"):
        FlatAdamW([])


@pytest.mark.parametrize(("dtype", "parts"), [("fp32", 1), ("bf16", 1), ("bf16", 2), ("bf16", 8)])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_update_compiles_for_hopper(aligned: bool, dtype: str, parts: int) -> None:
    tiling = Tiling()
    compiled = compile_kernel("update", aligned, dtype, parts, tiling.chunk, tiling.block, tiling.num_warps, **EXACT)
    found, ptx = resources(compiled), compiled.asm["ptx"]
    assert found.stack_bytes == found.shared_bytes == 0, (
        found
    )  # no value changes threads between its load and its store
    assert found.registers <= 64, found
    assert not re.search(r"\b(atom|red)\.global|\bfma\.", ptx)
    assert set(re.findall(r"(?:sqrt|div)\.\w+\.f32", ptx)) == {"sqrt.rn.f32", "div.rn.f32"}
    # Two elements per thread: master and moments, and fp32 gradients, in 8 bytes.
    loads, stores = (len(re.findall(rf"\b{kind}\.global\.v2\.b32\b", ptx)) for kind in ("ld", "st"))
    assert (loads, stores) == ((3 + (dtype == "fp32"), 3) if aligned else (0, 0))
    assert "cvt.rn.bf16x2.f32" in ptx or not aligned


@pytest.mark.parametrize(("dtype", "parts"), [("fp32", 1), ("bf16", 1), ("bf16", 2), ("bf16", 8)])
def test_the_norm_compiles_for_hopper(dtype: str, parts: int) -> None:
    tiling = Tiling()
    launch = tiling.squares_chunk, tiling.squares_block, tiling.squares_warps
    compiled = compile_kernel("squares", True, dtype, parts, *launch)
    found, ptx = resources(compiled), compiled.asm["ptx"]
    assert found.stack_bytes == 0, found
    # Eight parts have eight loads of 16 bytes in flight: 54 registers by Triton 3.7.1 and 81 by 3.6.0.
    assert found.registers <= (64 if parts < 8 else 96), found
    assert not re.search(r"\b(atom|red)\.global", ptx)
    vectors = len(re.findall(r"\bld\.global\.v4\.b32\b", ptx))
    assert vectors > 0
    assert vectors % (parts * {"fp32": 2, "bf16": 1}[dtype]) == 0, vectors


def compile_kernel(
    name: str, aligned: bool, dtype: str, parts: int, chunk: int, block: int, num_warps: int, **options: Any
) -> CompiledKernel:
    kernel = getattr(kernels, f"{name}_kernel")
    gradient = {"fp32": tl.float32, "bf16": tl.bfloat16}[dtype]
    constants = {"GRADIENT": gradient, "PARTS": parts, "ALIGNED": aligned, "CHUNK": chunk, "BLOCK": block}
    types = {argument: TYPES[argument] for argument in kernel.arg_names if argument not in constants}
    return compile_for_hopper(kernel, types, constants, num_warps=num_warps, **options)


def test_the_sum_over_chunks_compiles_for_hopper() -> None:
    from ssscale_kernels.adamw.launch import TOTAL_WARPS, TOTAL_WIDTH

    types = {name: TYPES[name] for name in ("sums_ptr", "total_ptr", "num_chunks")}
    compiled = compile_for_hopper(kernels.total_kernel, types, {"WIDTH": TOTAL_WIDTH}, num_warps=TOTAL_WARPS)
    assert resources(compiled).stack_bytes == 0
