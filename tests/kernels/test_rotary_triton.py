"""The kernels around softmax attention (rotation, merge) without a GPU: under the interpreter, and compiled for Hopper."""

import pytest
from ssscale_kernels.softmax import merge
from ssscale_kernels.ssmax import rotary
from ssscale_kernels.testing import compile_for_hopper, resources

from tests.kernels.interpreted import run_interpreted
from tests.kernels.rotary_interpreted import CASES


@pytest.fixture(scope="module")
def interpreted():
    return run_interpreted("rotary_interpreted.py")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", [*CASES, "merge"])
def test_matches_float64(interpreted, name, dtype):
    for what, (error, torch_error, magnitude) in interpreted[f"{name}-torch.{dtype}"].items():
        assert error <= 2 * torch_error + 1e-6 * magnitude, (what, error, torch_error, magnitude)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_compiles_for_hopper(which, head_dim):
    kernel = getattr(rotary, f"{which}_kernel")
    pairs, num_warps = rotary.tiling(head_dim)
    constants = {"N": 24, "K": 24, "H": head_dim, "BT": pairs // 8, "BH": 8, "BD": head_dim // 2}
    constants |= {"ROTATE": True, "HAS_FACTOR": True, "HAS_B": True}
    if which == "backward":
        constants |= {"FACTOR_GRAD": True, "LOG_N_GRAD": False}
    types = dict.fromkeys(kernel.arg_names, "*fp32") | {"num_tokens": "i32"}
    types |= dict.fromkeys(("stride_qkv_t", "stride_dqkv_t"), "I32")
    types |= dict.fromkeys(("qkv_ptr", "q_ptr", "k_ptr", "dq_ptr", "dk_ptr", "dqkv_ptr"), "*bf16")
    types = {name: types[name] for name in kernel.arg_names if name not in constants}
    compiled = compile_for_hopper(kernel, types, constants, num_warps=num_warps)
    found = resources(compiled)
    assert found.stack_bytes == 0, found
    assert found.registers <= 128, found  # four programs on a multiprocessor
    # Every access of the large tensors is 16 bytes wide.
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "st.global.v4.b32" in compiled.asm["ptx"]
    assert "ld.global.b16" not in compiled.asm["ptx"], "the loads are not vectorised"


def test_merge_compiles_for_hopper():
    kernel = merge.merge_kernel
    constants = {"H": 64, "BH": 64}
    types = dict.fromkeys(("o_ptr", "lse_ptr", "lse_new_ptr"), "*fp32") | {"o_new_ptr": "*bf16", "num_pairs": "I32"}
    compiled = compile_for_hopper(kernel, types, constants)
    assert resources(compiled).stack_bytes == 0
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert "ld.global.b16" not in compiled.asm["ptx"], "the loads are not vectorised"
