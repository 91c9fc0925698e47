"""Runs the public function on the Triton kernels under the interpreter (interpreted.py), forward and backward by autograd.

Argument: parts with commas between, each a group of cases, "mutations", "others" or "fuzz". Prints one JSON object per
case.
"""

import json
import sys
from typing import Any
from unittest.mock import patch

import torch
from ssscale_kernels.stickbreaking import accuracy, blocks, fuzz, half, ops, scales, stickbreaking_attention, tile
from ssscale_kernels.stickbreaking.accuracy import BF16, FP16, FP32, Case

from tests.kernels.interpreted import hasten, repair_bfloat16

EPSILON = 2.0**-8
SMALL = Case(FP16, 16, heads=(1, 1), lengths=(70,))
RECTANGLE: dict[str, Any] = {"use": "carried", "lengths": (20, 10), "keys": (70, 65), "offsets": (50, 70)}
CASES = {
    "options": {
        "log_rest": SMALL._replace(use="log_rest"),
        "carried, packed, grouped": Case(FP16, 24, use="carried", heads=(4, 2), lengths=(1, 0, 65, 20)),
        "remainder, grouped": Case(FP16, 16, use="remainder", heads=(2, 1), lengths=(3, 70)),
        "offsets": SMALL._replace(**RECTANGLE),
        "80 dims": SMALL._replace(head_dim=80, lengths=(66,)),
        "128 dims": SMALL._replace(head_dim=128, use="remainder", lengths=(66,)),
        "float32": Case(FP32, 16, use="remainder", heads=(1, 1), lengths=(66,)),
        "float32, 64 dims": Case(FP32, 64, use="carried", heads=(2, 1), lengths=(1, 0, 70)),
        "float32, 80 dims": Case(FP32, 80, use="carried", heads=(2, 1), lengths=(3, 40)),  # backward is torch's
        "float32, offsets": SMALL._replace(dtype=FP32, head_dim=40, **RECTANGLE),
    },
    "logits": {
        "skipping": SMALL._replace(lengths=(200,), skip_below=EPSILON),
        "skipping, remainder": Case(FP16, 16, "normal", "remainder", EPSILON, (2, 1), (150,)),
        "skipping, huge": SMALL._replace(kind="huge", lengths=(150,), skip_below=EPSILON),
        "huge": SMALL._replace(kind="huge", use="carried", lengths=(140,)),
        "float32, huge": SMALL._replace(dtype=FP32, kind="huge", lengths=(100,)),
        "float32, one-hot": SMALL._replace(dtype=FP32, kind="one-hot", lengths=(100,)),
        "float32, skipping": SMALL._replace(dtype=FP32, head_dim=40, lengths=(150,), skip_below=EPSILON),
        "edge": SMALL._replace(kind="edge", use="log_rest", lengths=(140,)),
        "in range": SMALL._replace(kind="in range", lengths=(140,), skip_below=EPSILON),
        "between": SMALL._replace(kind="between", lengths=(400,), skip_below=EPSILON),
        "between, not skipped": SMALL._replace(kind="between", use="log_rest", lengths=(400,)),
    },
    "bfloat16": {
        "bfloat16": Case(BF16, 24, heads=(2, 1), lengths=(70, 1, 65)),
        "bfloat16, remainder": Case(BF16, 16, use="remainder", heads=(2, 1), lengths=(70, 20)),
        "bfloat16, steep log_rest": SMALL._replace(dtype=BF16, use="log_rest"),
        "bfloat16, carried": SMALL._replace(dtype=BF16, **RECTANGLE),
        "bfloat16, skipping": SMALL._replace(dtype=BF16, lengths=(200,), skip_below=EPSILON),
        "bfloat16, huge": SMALL._replace(dtype=BF16, kind="huge", lengths=(140,)),
        "bfloat16, 128 dims": SMALL._replace(dtype=BF16, head_dim=128, lengths=(66,)),
    },
}
ALL = {name: case for group in CASES.values() for name, case in group.items()}


def one_tile_more_dropped(*args: Any, **kwargs: Any) -> Any:
    stop, exact = load_stop(*args, **kwargs)
    return stop + 1, exact


def flag_missing(*args: Any) -> None:
    save_stop(*args[:8], blocks.NEVER, *args[9:])


def lanes_swapped(num_keys: Any) -> Any:
    return key_of_column(num_keys) ^ 16


def gradient_of_log_rest_ignored(maxima_ptr: Any, rest_max_ptr: Any, sequence: Any, dims: Any, rest: Any) -> Any:
    return half.shifts(maxima_ptr, sequence, dims)


load_stop, save_stop, key_of_column = blocks.load_stop, blocks.save_stop, tile.key_of_column
# What each changes, and the case that must notice.
MUTATIONS = {
    "one tile more dropped in backward": (blocks, "load_stop", one_tile_more_dropped, "skipping"),
    "flag missing": (blocks, "save_stop", flag_missing, "huge"),
    "lanes swapped": (tile, "key_of_column", lanes_swapped, "log_rest"),
    "scale too large": (scales, "shifts", gradient_of_log_rest_ignored, "bfloat16, steep log_rest"),
}


def run(name: str) -> dict[str, Any]:
    inputs = accuracy.draw(ALL[name], "cpu")
    if "steep" in name:
        assert inputs.grad_rest is not None
        inputs = inputs._replace(grad_rest=1000 * inputs.grad_rest)
    errors = accuracy.compare(inputs)
    return {key: list(error) for key, error in errors.items()}


def run_in_two() -> dict[str, Any]:
    """Nearer keys, then farther ones with log_rest_in, as on a ring: against all keys at once. And its bits, twice."""
    inputs = accuracy.draw(Case(FP16, 16, heads=(2, 1), lengths=(90,), use="log_rest"), "cpu")

    def in_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first = stickbreaking_attention(q[:40], k[:40], v[:40], skip_below=0.0)
        near = stickbreaking_attention(q[40:], k[40:], v[40:], skip_below=0.0)
        offset = torch.tensor([40], dtype=torch.int32)
        options = {"q_offsets": offset, "log_rest_in": near[1], "skip_below": 0.0}
        far = stickbreaking_attention(q[40:], k[:40], v[:40], **options)
        return torch.cat([first[0], near[0] + far[0]]), torch.cat([first[1], far[1]])

    errors = accuracy.compare(inputs, in_two)
    once, again = (accuracy.differentiate(in_two, inputs) for _ in range(2))
    same = all(torch.equal(once[key], again[key]) for key in once)
    return {key: list(error) for key, error in errors.items()} | {"same_bits": same}


def run_scaled() -> dict[str, Any]:
    """Whether gradients in bf16 have the same bits, but for the exponent, if those of the results are 2^-40 or 2^20 times
    as large. float32 ones may differ by roundings of the scales."""
    inputs = accuracy.draw(Case(BF16, 16, use="carried", heads=(2, 1), lengths=(70,)), "cpu")
    assert inputs.grad_rest is not None
    once, same = accuracy.differentiate(stickbreaking_attention, inputs), {}
    for power in (-40, 20):
        factor = 2.0**power
        scaled = inputs._replace(grad_o=factor * inputs.grad_o, grad_rest=factor * inputs.grad_rest)
        again = accuracy.differentiate(stickbreaking_attention, scaled)
        for key in ("d_q", "d_k", "d_v"):
            same[f"{key}, {power}"] = torch.equal(factor * once[key], again[key])
        same[f"d_log_rest_in, {power}"] = torch.allclose(
            factor * once["d_log_rest_in"], again["d_log_rest_in"], rtol=1e-5, atol=1e-5 * factor
        )
    return same


def run_saved() -> dict[str, Any]:
    """Shapes and dtypes of all results of forward by dtype."""
    found = {}
    cu = accuracy.starts((5, 0, 66), "cpu")
    for dtype in (FP16, FP32):
        q = torch.randn(71, 2, 16).to(dtype)
        results = ops.forward_op(q, q[:, :1], q[:, :1], cu, cu, None, None, 66, 66, 0.25, 0.0)
        found[str(dtype)] = [[list(x.shape), str(x.dtype)] for x in results]
    return found


def run_fuzz() -> dict[str, Any]:
    """A few random calls of each setting that the interpreter can run."""
    settings = [setting for setting in fuzz.SETTINGS if setting.dtype == FP16]
    return {str(number): fuzz.run(s, 8, number, "cpu", 60) for number, s in enumerate(settings)}


def show(case: str, found: dict[str, Any]) -> None:
    print(json.dumps({"case": case} | found), flush=True)


def show_part(part: str) -> None:
    if part == "mutations":
        for mutation, (module, attribute, changed, noticing) in MUTATIONS.items():
            with patch.object(module, attribute, changed):
                show(mutation, run(noticing))
    elif part == "others":
        show("in two", run_in_two())
        show("scaled", run_scaled())
        show("saved", run_saved())
    elif part == "fuzz":
        show("fuzz", run_fuzz())
    else:
        for name in CASES[part]:
            show(name, run(name))


if __name__ == "__main__":
    hasten()
    repair_bfloat16()
    ops.forward_op.register_kernel("cpu")(ops.triton_forward)
    ops.backward_op.register_kernel("cpu")(ops.triton_backward)
    for argument in sys.argv[1].split(","):
        show_part(argument)
