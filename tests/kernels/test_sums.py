"""Sums of a few tensors in one pass: against float64, under the interpreter, compiled for Hopper, and on a GPU."""

import pytest
import torch
from ssscale_kernels.sums import BLOCK, sum_in_order, sum_kernel
from ssscale_kernels.testing import compile_for_hopper, resources

from tests.kernels.interpreted import run_interpreted


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("ranks", "size"), [(2, 1), (2, 77_777), (3, 4096), (8, 5000)])
def test_sums_are_float32_and_rounded_once(ranks, size, device):
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, generator=generator).bfloat16().to(device) for _ in range(ranks)]
    exact = torch.stack(parts).double().sum(0)
    # One number of each part is so large that bf16, but not float32, would lose the others.
    parts[0][0], exact[0] = 512, 512 + exact[0] - parts[0][0].double()
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(size, dtype=dtype, device=device)
        sum_in_order(parts, out)
        bound = 2.0**-23 * ranks * torch.stack(parts).abs().double().sum(0)
        bound += exact.abs() * 2.0**-8 if dtype == torch.bfloat16 else 0
        assert ((out.double() - exact).abs() <= bound).all()
    own = parts[1].clone()
    sum_in_order([parts[0], own, *parts[2:]], own)
    assert torch.equal(own, out)


def test_the_kernel_gives_the_bits_of_torch():
    found = run_interpreted("sums_interpreted.py")
    assert len(found) == 4
    assert all(all(case.values()) for case in found.values()), found


@pytest.mark.parametrize("ranks", [2, 8])
def test_compiles_for_hopper_in_wide_accesses(ranks):
    types = {"parts": ("*bf16",) * ranks, "out_ptr": "*fp32", "size": "I32"}
    program = compile_for_hopper(sum_kernel, types, {"BLOCK": BLOCK})
    found = resources(program)
    assert found.stack_bytes == 0, found
    assert program.asm["ptx"].count("ld.global.v4.b32") == 2 * ranks
    assert program.asm["ptx"].count("st.global.v4.b32") == 4
