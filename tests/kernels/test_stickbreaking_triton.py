"""The Triton kernels without a GPU: their results under the interpreter, and what ptxas makes of them for Hopper."""

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from ssscale_kernels.stickbreaking import backward as B
from ssscale_kernels.stickbreaking import decode as D
from ssscale_kernels.stickbreaking import forward as F
from ssscale_kernels.stickbreaking import half
from ssscale_kernels.testing import Resources, compile_for_hopper, resources

from tests.kernels.interpreted import run_interpreted

CASES = [
    f"{name}-torch.{dtype}"
    for dtype in ("float16", "float32")
    for name in ("plain", "huge", "low", "one", "packed", "slices", "offset", "wide", "decode")
] + ["converted-torch.float16", "converted_offset-torch.float16"]


@pytest.fixture(scope="module")
def interpreted():
    return run_interpreted("stickbreaking_interpreted.py", "float16", "float32")


def budget(torch_error: float, magnitude: float, dtype: str) -> float:
    if dtype.startswith("converted"):
        torch_error *= 1.5  # made for bf16 results, which round eight times as coarsely
    # Half a unit in the last place of float16's subnormals, and float32 rounding of sums as large as the result.
    return 2 * torch_error + (2e-7 if "16" in dtype else 0.0) + 1e-5 * magnitude


@pytest.mark.parametrize("case", CASES)
def test_matches_float64(interpreted, case):
    for name, (error, torch_error, magnitude) in interpreted[case].items():
        assert error <= budget(torch_error, magnitude, case), (name, error, torch_error, magnitude)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_skipping_stays_within_its_bound(interpreted, dtype):
    result = interpreted[f"skip-torch.{dtype}"]
    error, torch_error, magnitude = result["o"]
    assert error <= budget(torch_error, magnitude, dtype) + result["allowed"]
    assert result["rest_is_upper_bound"]
    assert max(result["stop"]) > 0, "nothing was skipped"


def test_runs_of_row_blocks(interpreted):
    assert interpreted["runs"] == {"wrong": 0}


TENSORS = ("q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "q_half_ptr", "do_half_ptr")
TENSORS += ("k_half_ptr", "v_half_ptr")


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
    named |= dict.fromkeys(TENSORS, "*bf16")
    for name in ("row_tile_ptr", "block_stop_ptr", "cu_q_ptr", "cu_k_ptr", "list_ptr"):
        named[name] = "*i32"
    return {name: (named | special)[name] for name in kernel.arg_names if name not in constants}


DTYPES = {"float16": torch.float16, "float32": torch.float32}


def compiled(kernel, config, head_dim, operands="bfloat16", **constants) -> Resources:
    """operands: bfloat16, float16, float32, or bfloat16 that half.py has converted."""
    sums = F.sum_types(DTYPES.get(operands, torch.bfloat16), config.key_block)
    special = {"float16": dict.fromkeys(TENSORS, "*fp16"), "float32": dict.fromkeys(TENSORS, "*fp32")}.get(operands, {})
    if operands == "float32":
        special["row_carry_ptr"] = "*fp64"
    convert = operands == "converted"
    if convert:
        converted = {
            F.forward_kernel: ("v_ptr",),
            B.dq_kernel: ("k_ptr", "q_half_ptr", "do_half_ptr"),
            B.dkv_kernel: ("q_ptr", "k_ptr", "do_ptr"),
        }[kernel]
        special = {"maxima_ptr": "*i32"} | dict.fromkeys(converted, "*fp16")
        sums = sums._replace(farther=tl.float16, farther_parts=1, parts=1)
    elif "maxima_ptr" in kernel.arg_names:
        constants["maxima_ptr"] = None
    constants = {
        "HALF": convert,
        "ENTER_K": convert,
        "HOIST": F.hoists(head_dim, DTYPES.get(operands, torch.bfloat16), convert),
        "H": head_dim,
        "BH": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": config.row_block,
        "BN": config.key_block,
        "KV_GROUP": 1,
        "HAS_OFFSET": False,
        "offset_ptr": None,
        "NEARER": sums.nearer,
        "NEARER_PARTS": sums.nearer_parts,
        "FARTHER": sums.farther,
        "FARTHER_PARTS": sums.farther_parts,
        "PARTS": sums.parts,
        "PRECISION": sums.dot,
    } | constants
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = types(kernel, constants, scratch_rows="I32", **special)
    return resources(compile_for_hopper(kernel, signature, constants, **F.launch(config)))


SLOW = [
    pytest.param(operands, head_dim, marks=pytest.mark.slow)
    for operands, dims in {
        "converted": (16, 80),
        "bfloat16": (16, 80),
        "float16": (16, 32, 64, 80, 128),
        "float32": (16, 32, 64, 80, 128),
    }.items()
    for head_dim in dims
]


@pytest.mark.parametrize(
    ("operands", "head_dim"), [(o, h) for o in ("converted", "bfloat16") for h in (32, 64, 128)] + SLOW
)
@pytest.mark.parametrize("which", ["forward", "dq", "dkv"])
def test_compiles_for_hopper_without_spilling(which, head_dim, operands):
    dtype = DTYPES.get(operands, torch.bfloat16)
    config = B.backward_config(head_dim, dtype)
    # bfloat16 stays what it is where log_rest_in or its gradient is given: those kernels have both.
    has_rest = operands == "bfloat16"
    rest = {"HAS_REST": has_rest} | ({} if has_rest else {"log_rest_in_ptr": None, "d_rest_ptr": None})
    kernel, config, constants = {
        "forward": (F.forward_kernel, F.forward_config(head_dim, dtype), rest | {"SAVE": True}),
        "dq": (B.dq_kernel, config.dq, rest | ({"NEARER_PARTS": 2} if has_rest else {})),
        "dkv": (
            B.dkv_kernel,
            config.dkv,
            {"DQ_ROWS": config.dq.row_block, "MAX_BLOCKS": 64, "ADD": False},
        ),
    }[which]
    found = compiled(kernel, config, head_dim, operands, **constants)
    if config.row_block >= 64 and config.key_block >= 64:
        assert found.wgmma > 0, "the dots miss wgmma"
    if config.num_stages > 1:
        assert found.async_copies > 0, "the loads are not pipelined"
    assert found.spills_in_loops == (0, 0), found


@pytest.mark.parametrize("kernel", [half.key_maxima_kernel, half.value_kernel, half.operands_kernel])
def test_conversion_compiles_for_hopper_in_wide_accesses(kernel):
    constants = half.shape_constants(64)
    halves = dict.fromkeys(("k_half_ptr", "v_half_ptr"), "*fp16")
    program = compile_for_hopper(kernel, types(kernel, constants, maxima_ptr="*i32", **halves), constants)
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
    config = D.decode_config(rows, head_dim, DTYPES.get(operands, torch.bfloat16))
    found = compiled(D.split_kernel, config, head_dim, operands, CHUNK=4)
    assert found.async_copies > 0 or config.num_stages == 1, "the loads are not pipelined"
    assert found.spills_in_loops == (0, 0), found


def test_kernels_have_no_lock():
    """Nor sums by atomics: a maximum of integers has the same bits in any order."""
    folder = Path(F.__file__).parent
    found = {(file.name, name) for file in folder.rglob("*.py") for name in re.findall(r"atomic_\w+", file.read_text())}
    assert found == {("half.py", "atomic_max")}
    assert not [file for file in folder.rglob("*.py") if "atom." in file.read_text() or "volatile" in file.read_text()]
