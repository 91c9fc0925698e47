"""The kernels for float32 and for decoding without a GPU: results under the interpreter, and what ptxas makes for Hopper."""

import re
from pathlib import Path

import pytest
import torch
import triton
from ssscale_kernels.stickbreaking import backward as B
from ssscale_kernels.stickbreaking import decode as D
from ssscale_kernels.stickbreaking import forward as F
from ssscale_kernels.stickbreaking import half
from ssscale_kernels.testing import Resources, compile_for_hopper, resources

from tests.kernels.interpreted import run_interpreted

CASES = [f"{name}-torch.float32" for name in ("plain", "huge", "low", "one", "packed", "slices", "offset", "wide")]
CASES += ["decode-torch.float16", "decode-torch.float32"]


@pytest.fixture(scope="module")
def interpreted():
    return run_interpreted("stickbreaking_interpreted.py", "float16", "float32")


def budget(torch_error: float, magnitude: float, dtype: str) -> float:
    # Half a unit in the last place of float16's subnormals, and float32 rounding of sums as large as the result.
    return 2 * torch_error + (2e-7 if "16" in dtype else 0.0) + 1e-5 * magnitude


@pytest.mark.parametrize("case", CASES)
def test_matches_float64(interpreted, case):
    for name, (error, torch_error, magnitude) in interpreted[case].items():
        assert error <= budget(torch_error, magnitude, case), (name, error, torch_error, magnitude)


def test_skipping_stays_within_its_bound(interpreted):
    result = interpreted["skip-torch.float32"]
    error, torch_error, magnitude = result["o"]
    assert error <= budget(torch_error, magnitude, "float32") + result["allowed"]
    assert result["rest_is_upper_bound"]
    assert max(result["stop"]) > 0, "nothing was skipped"


def test_runs_of_row_blocks(interpreted):
    assert interpreted["runs"] == {"wrong": 0}


TENSORS = ("q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr", "dq_ptr", "dk_ptr", "dv_ptr")


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
    for name in ("row_tile_ptr", "block_stop_ptr", "cu_q_ptr", "cu_k_ptr", "list_ptr"):
        named[name] = "*i32"
    return {name: (named | special)[name] for name in kernel.arg_names if name not in constants}


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}


def compiled(kernel, config, head_dim, operands, **constants) -> Resources:
    sums = F.sum_types(DTYPES[operands], config.key_block)
    special = dict.fromkeys(TENSORS, POINTERS[operands]) | {"row_carry_ptr": "*fp64"}
    constants = {
        "H": head_dim,
        "BH": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": config.row_block,
        "BN": config.key_block,
        "KV_GROUP": 1,
        "HAS_OFFSET": False,
        "offset_ptr": None,
        "NEARER": sums.nearer,
        "NEARER_PARTS": sums.nearer_parts,
        "SUM_PARTS": sums.nearer_parts,
        "PARTS": sums.parts,
        "PRECISION": sums.dot,
    } | constants
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = types(kernel, constants, scratch_rows="I32", **special)
    return resources(compile_for_hopper(kernel, signature, constants, **F.launch(config)))


WIDTHS = [64, *(pytest.param(head_dim, marks=pytest.mark.slow) for head_dim in (16, 32, 80, 128))]


@pytest.mark.parametrize("head_dim", WIDTHS)
@pytest.mark.parametrize("which", ["forward", "dq", "dkv"])
def test_compiles_for_hopper_without_spilling(which, head_dim):
    config = B.backward_config(head_dim)
    rest = {"HAS_REST": False, "log_rest_in_ptr": None, "d_rest_ptr": None}
    kernel, config, constants = {
        "forward": (F.forward_kernel, F.forward_config(head_dim), rest),
        "dq": (B.dq_kernel, config.dq, rest),
        "dkv": (B.dkv_kernel, config.dkv, {"DQ_ROWS": config.dq.row_block, "MAX_BLOCKS": 64, "ADD": False}),
    }[which]
    found = compiled(kernel, config, head_dim, "float32", **constants)
    if config.row_block >= 64 and config.key_block >= 64:
        assert found.wgmma > 0, "the dots miss wgmma"
    assert found.spills_in_loops == (0, 0), found


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
    for rows in (16, 32, 64)
    for head_dim in (16, 32, 64, 80, 128)
]


@pytest.mark.parametrize(("operands", "rows", "head_dim"), DECODING)
def test_decode_compiles_for_hopper_without_spilling(operands, rows, head_dim):
    config = D.decode_config(rows, head_dim, DTYPES[operands])
    found = compiled(D.split_kernel, config, head_dim, operands, CHUNK=4)
    assert found.async_copies > 0 or config.num_stages == 1, "the loads are not pipelined"
    assert found.spills_in_loops == (0, 0), found


def test_kernels_have_no_lock():
    """Nor sums by atomics: a maximum of integers has the same bits in any order."""
    folder = Path(F.__file__).parent
    found = {(file.name, name) for file in folder.rglob("*.py") for name in re.findall(r"atomic_\w+", file.read_text())}
    assert found == {("half.py", "atomic_max")}
    assert not [file for file in folder.rglob("*.py") if "atom." in file.read_text() or "volatile" in file.read_text()]
