"""The optimizer step over flat buffers: the definition, the path for CPUs, and the kernels without a GPU."""

import re
from typing import Any

import pytest
import torch
import triton.language as tl
from ssscale_kernels.adamw import FlatAdamW, Segment, Settings, adamw_reference, clip_factor, kernels
from ssscale_kernels.adamw.launch import Tiling
from ssscale_kernels.testing import compile_for_hopper, resources
from torch import Tensor

from tests.kernels.adamw_interpreted import CASES
from tests.kernels.interpreted import run_interpreted

STEPS = Settings(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
TYPES = {
    **dict.fromkeys(("addresses_ptr", "gradients_ptr", "sizes_ptr"), "*i64"),
    **dict.fromkeys(("segment_of_ptr", "first_chunk_ptr", "group_of_ptr", "counted_ptr"), "*i32"),
    **dict.fromkeys(("factor_ptr", "sums_ptr", "total_ptr"), "*fp32"),
    **dict.fromkeys(("num_segments", "num_chunks"), "i32"),
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
    with pytest.raises(ValueError, match="at least one"):
        FlatAdamW([])


@pytest.mark.parametrize(
    ("name", "aligned", "dtype"),
    [
        ("squares", True, "fp32"),
        ("squares", True, "bf16"),
        ("update", True, "fp32"),
        ("update", True, "bf16"),
        ("update", False, "bf16"),
    ],
)
def test_compiles_for_hopper(name: str, aligned: bool, dtype: str) -> None:
    kernel, tiling = getattr(kernels, f"{name}_kernel"), Tiling()
    block = tiling.block if name == "update" else tiling.squares_block
    gradient = {"fp32": tl.float32, "bf16": tl.bfloat16}[dtype]
    constants = {"GRADIENT": gradient, "ALIGNED": aligned, "CHUNK": tiling.chunk, "BLOCK": block}
    types = {argument: TYPES[argument] for argument in kernel.arg_names if argument not in constants}
    compiled = compile_for_hopper(kernel, types, constants, num_warps=tiling.num_warps)
    found, ptx = resources(compiled), compiled.asm["ptx"]
    assert found.stack_bytes == 0, found
    assert found.registers <= 64, found  # eight programs on a multiprocessor
    assert not re.search(r"\b(atom|red)\.global", ptx)
    counts = {width: len(re.findall(rf"\b{width}\b", ptx)) for width in ("ld.global.v4.b32", "st.global.v4.b32")}
    if name == "update":
        assert found.shared_bytes == 0, found  # no value changes threads between its load and its store
        assert "cvt.rn.bf16x2.f32" in ptx or not aligned
        assert set(re.findall(r"(?:sqrt|div)\.\w+\.f32", ptx)) == {"sqrt.rn.f32", "div.rn.f32"}
        # Master and moments, and fp32 gradients. bf16 tensors have 8 bytes per thread.
        assert counts == dict(zip(counts, (3 + (dtype == "fp32"), 3) if aligned else (0, 0))), counts
        assert ptx.count("ld.global.v2.b32") == (aligned and dtype == "bf16")
        assert ptx.count("st.global.v2.b32") == aligned
    else:
        assert counts["ld.global.v4.b32"] == {"fp32": 8, "bf16": 4}[dtype], (
            counts
        )  # the loop over the chunk is unrolled


def test_the_sum_over_chunks_compiles_for_hopper() -> None:
    from ssscale_kernels.adamw.launch import TOTAL_WARPS, TOTAL_WIDTH

    types = {name: TYPES[name] for name in ("sums_ptr", "total_ptr", "num_chunks")}
    compiled = compile_for_hopper(kernels.total_kernel, types, {"WIDTH": TOTAL_WIDTH}, num_warps=TOTAL_WARPS)
    assert resources(compiled).stack_bytes == 0
