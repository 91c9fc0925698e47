"""Compiles the kernels of stick-breaking training for Hopper, as their launches do, and checks shuffles between lanes."""

import re

import triton
from ssscale_kernels.stickbreaking.backward import launch_constants, walks_by_words
from ssscale_kernels.stickbreaking.dkv import dkv_kernel
from ssscale_kernels.stickbreaking.dq import dq_kernel
from ssscale_kernels.stickbreaking.forward import forward_kernel
from ssscale_kernels.stickbreaking.settings import Config, launch
from ssscale_kernels.testing import compile_for_hopper
from triton.compiler import CompiledKernel

TENSORS = ("q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "q_half_ptr", "do_half_ptr")
INTEGERS = ("row_tile_ptr", "block_stop_ptr", "cu_q_ptr", "cu_k_ptr", "list_ptr", "maxima_ptr", "rest_max_ptr")
SCALED = {
    "forward": ("v_ptr",),
    "dq": ("k_ptr", "q_half_ptr", "do_half_ptr"),
    "dkv": ("q_ptr", "k_ptr", "do_ptr"),
}


def argument_type(name, operands, which, head_dim):
    if name.endswith("_descriptor"):
        pointer = argument_type(name.replace("_descriptor", "_ptr"), operands, which, head_dim)
        return f"tensordesc<{pointer[1:]}[1, 8, 4, 2, {head_dim}]>"
    if name in INTEGERS:
        return "*i32"
    if name in TENSORS:
        half = operands == "float16" or name in SCALED[which]
        return "*fp16" if half else "*bf16"
    if name.endswith("_ptr"):
        return "*fp32"
    if name in ("scale", "logit_scale", "threshold"):
        return "fp32"
    is_stride = name == "scratch_rows" or (len(name) == 4 and name[0] == "s" and name[2] == "_")
    return "I32" if is_stride else "i32"


def compiled(which: str, config: Config, head_dim: int, operands: str, tma: bool = True) -> CompiledKernel:
    """operands: "scaled" (bf16 that half.py makes fp16), "log_rest" (scaled, log_rest_in and its gradient), "float16"."""
    scaled = operands != "float16"
    kernel = {"forward": forward_kernel, "dq": dq_kernel, "dkv": dkv_kernel}[which]
    constants = {
        "H": head_dim,
        "BH": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": config.row_block,
        "KEYS": config.key_block,
        "KV_GROUP": 1,
        "HAS_OFFSET": False,
        "offset_ptr": None,
        "HAS_REST": operands == "log_rest",
        "HALF": scaled,
        "PARTS": 1 if scaled else 2,
        "DQ_ROWS": config.row_block,
        "MAX_BLOCKS": 0 if walks_by_words(head_dim, scaled) else 64,
        "ADD": False,
        "EARLY": True,
        "SKIPS": True,
    }
    if which != "forward":
        constants |= launch_constants(which, config, 24, head_dim, scaled)
    if operands != "log_rest":
        constants |= {"log_rest_in_ptr": None, "d_rest_ptr": None, "rest_max_ptr": None}
    if not scaled:
        constants["maxima_ptr"] = None
    if constants["MAX_BLOCKS"] == 0:
        constants["list_ptr"] = None
    if head_dim != constants["BH"] or not tma:
        constants |= {"k_descriptor": None, "v_descriptor": None}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: argument_type(name, operands, which, head_dim) for name in kernel.arg_names if name not in constants}
    return compile_for_hopper(kernel, types, constants, **launch(config))


def shuffles_reach_their_lanes(ttgir: str) -> bool:
    """Whether all shuffles are on layouts whose two lowest bits of the lane are the second index of [ROWS, 4].

    A shuffle is inline assembly, so that Triton would compile it in any other layout as well, without a warning.
    """
    used = set(re.findall(r"shfl\.sync\.bfly.*-> tensor<\d+x4xf32, (#\w+)>", ttgir))
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    return bool(used) and all("lane = [[0, 1], [0, 2], [1, 0]," in layouts[name] for name in used)
