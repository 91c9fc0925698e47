"""The kernels for float32 and for decoding without a GPU: results under the interpreter, and what ptxas makes for Hopper."""

import re
from pathlib import Path

import pytest
import torch
import triton
from ssscale_kernels.stickbreaking import decode, half, ops
from ssscale_kernels.stickbreaking.dkv import dkv_kernel
from ssscale_kernels.stickbreaking.dq import dq_kernel
from ssscale_kernels.stickbreaking.forward import forward_config, forward_kernel
from ssscale_kernels.stickbreaking.settings import launch
from ssscale_kernels.testing import compile_for_hopper, resources
from triton.compiler import CompiledKernel

from tests.kernels.interpreted import run_interpreted
from tests.kernels.stickbreaking_hopper import shuffles_reach_their_lanes
from tests.kernels.stickbreaking_interpreted import DECODES, PRECISE

CASES = [f"{name}-torch.float32" for name in ("plain", "huge", "low", "one", "packed", "slices", "offset", "wide")]
CASES += [f"{name}-torch.{dtype}" for name in DECODES for dtype in ("float16", "float32")]


@pytest.fixture(scope="module")
def interpreted():
    return run_interpreted("stickbreaking_interpreted.py", "float16", "float32")


def budget(torch_error: float, magnitude: float, dtype: str) -> float:
    # Half a unit in the last place of float16's subnormals, and float32 rounding of sums as large as the result.
    return 2 * torch_error + (2e-7 if "16" in dtype else 0.0) + 1e-5 * magnitude


@pytest.mark.parametrize("case", CASES)
def test_matches_float64(interpreted, case):
    result = dict(interpreted[case])
    skipped = result.pop("allowed", 0.0)
    for name, (error, torch_error, magnitude) in result.items():
        assert error <= budget(torch_error, magnitude, case) + skipped, (name, error, torch_error, magnitude)


@pytest.mark.parametrize("case", PRECISE)
def test_float32_keeps_its_digits_with_the_logarithms_of_a_gpu(interpreted, case):
    for name, (error, torch_error, magnitude) in interpreted[f"{case}, precise"].items():
        assert error <= 2 * torch_error + 4e-6 * max(magnitude, 1.0), (name, error, torch_error, magnitude)


def test_skipping_stays_within_its_bound(interpreted):
    result = interpreted["skip-torch.float32"]
    error, torch_error, magnitude = result["o"]
    assert error <= budget(torch_error, magnitude, "float32") + result["allowed"]
    assert result["rest_is_upper_bound"]
    assert max(result["stop"]) > 0, "nothing was skipped"


def test_runs_of_row_blocks(interpreted):
    assert interpreted["runs"]["wrong"] == 0
    assert set(interpreted["runs"]["flags"]) == {0, 1, 2}


def test_words_of_row_blocks(interpreted):
    assert interpreted["live"]["wrong"] == 0


def types(kernel, constants, **special):
    """Argument types by this package's naming: *_ptr, strides s?_?, everything else an int32."""
    named = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            named[name] = "*fp32"
        elif len(name) == 4 and name[0] == "s" and name[2] == "_":
            named[name] = "I32"
        else:
            named[name] = "fp32" if name in ("scale", "logit_scale", "threshold") else "i32"
    for name in ("row_tile_ptr", "block_stop_ptr", "cu_q_ptr", "cu_k_ptr", "list_ptr", "offset_ptr"):
        named[name] = "*i32"
    return {name: (named | special)[name] for name in kernel.arg_names if name not in constants}


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


def compiled(kernel, config, head_dim, operands, **constants) -> CompiledKernel:
    special = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), POINTERS[operands]) | {"row_carry_ptr": "*fp64"}
    constants = {
        "H": head_dim,
        "BH": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": config.row_block,
        "KEYS": config.key_block,
        "KV_GROUP": 1,
        "HAS_OFFSET": True,
        "HALF": False,
        "PARTS": 2 if operands == "float16" else 1,
        **dict.fromkeys(("k_descriptor", "v_descriptor", "maxima_ptr", "rest_max_ptr")),
    } | constants
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = types(kernel, constants, scratch_rows="I32", **special)
    program = compile_for_hopper(kernel, signature, constants, **launch(config))
    assert shuffles_reach_their_lanes(program.asm["ttgir"])
    return program


FLOAT32 = [
    ("forward", 64),
    *(
        pytest.param(which, head_dim, marks=pytest.mark.slow)
        for which in ("forward", "dq", "dkv")
        for head_dim in (16, 32, 64, 80, 128)
        if which == "forward" or head_dim <= ops.MAX_FLOAT32_DIM
    ),
]


@pytest.mark.parametrize(("which", "head_dim"), FLOAT32)
def test_float32_compiles_for_hopper_without_spilling(which, head_dim):
    kernel = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel}[which]
    config = forward_config(head_dim, torch.float32)
    absent = ("log_rest_in_ptr", "d_rest_ptr", "q_half_ptr", "do_half_ptr")
    constants = {"HAS_REST": False, **dict.fromkeys(absent), "HOIST": 0, "SKIPS": False}
    constants |= {"ROW_STRIDE": 0, "DQ_ROWS": config.row_block, "MAX_BLOCKS": 64, "ADD": False}
    found = resources(compiled(kernel, config, head_dim, "float32", **constants))
    assert found.wgmma > 0, "the dots miss wgmma"
    assert not any(found.spills_in_loops), found


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("kernel", [half.convert_kernel, half.settle_kernel])
def test_conversion_compiles_for_hopper_in_wide_accesses(kernel, saved):
    """saved: of k and dO, in backward; otherwise of v, in forward."""
    constants = half.shape_constants(64)
    tensors = dict.fromkeys(("x_ptr", "y_ptr"), "*bf16") | {"half_ptr": "*fp16"}
    tensors |= dict.fromkeys(("x_max_ptr", "y_max_ptr", "zeros_ptr", "saved_ptr", "maxima_ptr"), "*i32")
    absent = dict.fromkeys(("zeros_ptr",) if saved else ("y_ptr", "saved_ptr"))
    constants |= {name: None for name in absent if name in kernel.arg_names}
    program = compile_for_hopper(kernel, types(kernel, constants, **tensors), constants)
    found = resources(program)
    assert found.stack_bytes == 0
    wide = program.asm["ptx"].count("ld.global.v4.b32")
    assert wide > 0
    assert wide % (half.ROWS * 64 * 2 // (16 * 128)) == 0  # 16 bytes a thread, every load of a tensor


DECODING = [("bfloat16", 16, 64), ("bfloat16", 64, 64)] + [
    pytest.param(operands, rows, head_dim, marks=pytest.mark.slow)
    for operands in ("bfloat16", "float16", "float32")
    for rows in (16, 64)
    for head_dim in (16, 32, 64, 80, 128)
]


@pytest.mark.parametrize(("operands", "rows", "head_dim"), DECODING)
def test_decode_compiles_for_hopper_without_spilling(operands, rows, head_dim):
    config = decode.split_config(rows, head_dim, DTYPES[operands])
    found = resources(compiled(decode.split_kernel, config, head_dim, operands))
    assert found.async_copies > 0 or config.num_stages == 1, "the loads are not pipelined"
    masked, *others = found.spills_in_loops
    assert not any(others), found
    assert masked <= (1 if rows == 16 and head_dim > 64 else 0), found  # runs once per query


def test_kernels_have_no_lock():
    """Nor sums by atomics: a maximum of integers has the same bits in any order."""
    folder = Path(decode.__file__).parent
    found = {(file.name, name) for file in folder.rglob("*.py") for name in re.findall(r"atomic_\w+", file.read_text())}
    assert found == {("half.py", "atomic_max")}
    assert not [file for file in folder.rglob("*.py") if "atom." in file.read_text() or "volatile" in file.read_text()]
