"""Runs the kernels of training under the interpreter (interpreted.py), in fp16: one process for each group
of cases.

Prints one JSON object a case: errors against float64, and those of float32 torch with inputs and outputs in the same dtype.
Options and skipping run through the operator (operator_interpreted.py). The interpreter computes bf16 incorrectly. "scaled"
cases take the path of bf16 operands, which half.py makes fp16.
"""

import json
import math
import sys
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from ssscale_kernels.stickbreaking import backward as backward_module
from ssscale_kernels.stickbreaking import descriptors, half, tile
from ssscale_kernels.stickbreaking import forward as forward_module
from ssscale_kernels.stickbreaking.backward import backward
from ssscale_kernels.stickbreaking.forward import forward, forward_config

from tests.kernels.interpreted import hasten
from tests.kernels.stickbreaking_interpreted import differentiate, report, starts

NAMES = ("o", "log_rest", "dq", "dk", "dv", "d_log_rest_in")


class Case(NamedTuple):
    lengths: list[int]
    logits: str = "normal"
    head_dim: int = 16
    heads: tuple[int, int] = (1, 1)  # query heads, key heads
    keys: list[int] | None = None
    offsets: list[int] | None = None
    rest: bool = True  # log_rest_in is given, and log_rest has a gradient
    scaled: bool = False
    scratch: int = 512  # bytes per row
    skip_below: float = 0.0


CASES = {
    "one": Case([1], heads=(2, 2)),
    "packed": Case([1, 0, 65, 20], head_dim=24),
    "slices": Case([140, 65], scratch=8),
    "wide": Case([70], head_dim=72),
    "dim 128": Case([129], head_dim=128, scaled=True, rest=False),
    "scaled": Case([70, 0, 65, 1], head_dim=24, heads=(2, 1), scaled=True, rest=False),
    "low": Case([100], "low"),
    "one-hot": Case([140], "one-hot", rest=False, scaled=True),
    "huge": Case([140], "huge", heads=(2, 1)),
    # All keys spend 7 bits or more, so that 16 leave the fast algebra's range, but none is near its cap.
    "steady": Case([140], "steady"),
    # A single row block needs the exact algebra, and only behind its diagonal; then single rows of one head of two.
    "far": Case([200], "far"),
    "far scaled": Case([200], "far", rest=False, scaled=True),
    "some rows": Case([200], "some rows", heads=(2, 1)),
    # Packed documents in slices, with the strides of the fp16 copies.
    "scaled slices": Case([1, 0, 200], "low", heads=(2, 1), scaled=True, rest=False, scratch=16),
    # u = 2^z is infinite, and zero for the next key.
    "infinite": Case([140], "infinite"),
    # Nothing is left of the sticks of the later slices at the first tiles.
    "spent slices": Case([200], "steady", scratch=8),
    "skipping": Case([140], rest=False, skip_below=2**-12),
    # Every other row has spent its stick before it meets keys at which it would leave the range of the fast algebra.
    "dead rows": Case([256], "dead rows", rest=False, skip_below=2**-12),
    "dead rows scaled": Case([256], "dead rows", rest=False, scaled=True, skip_below=2**-12),
    # Every other row spends its stick on the nearest keys, beyond the range. The others keep theirs. Then these leave it, too.
    "near": Case([250], "near", heads=(2, 1), rest=False, skip_below=2**-12),
    "near scaled": Case([250], "near", heads=(2, 1), rest=False, scaled=True, skip_below=2**-12),
    "near, not skipped": Case([250], "near", rest=False),
    "near and far": Case([250], "near and far", rest=False, skip_below=2**-12),
    # Every other row leaves the range at one tile in the middle. The others walk on.
    "between": Case([508], "between", rest=False, skip_below=2**-12),
    "between scaled": Case([508], "between", rest=False, scaled=True, skip_below=2**-12),
    "between, not skipped": Case([508], "between", rest=False),
    # 16 keys spend 108 bits: more than the range, unless sticks may be skipped.
    "far, in range": Case([250], "far, in range", rest=False, skip_below=2**-12),
    "far, in range, scaled": Case([250], "far, in range", rest=False, scaled=True, skip_below=2**-12),
    "far, not skipped": Case([250], "far, in range", rest=False),
    # Rows have spent 15 bits before, so that Σ g over the stick, which has no bound with log_rest, would not be finite.
    "far, in range, log_rest": Case([250], "far, in range, log_rest", scaled=True, skip_below=2**-12),
}
LONGER = [name for name in CASES if name.startswith("between")]
GROUPS = {
    "layouts": list(CASES)[:8],
    "range": [name for name in list(CASES)[8:] if name not in LONGER],
    "longer": LONGER,
}


def tensors(case: Case, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Returns q, k, v, dO in float16, log_rest_in and the gradient of log_rest."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens, num_keys = sum(case.lengths), sum(case.keys or case.lengths)
    counts = (
        (num_tokens, case.heads[0]),
        (num_keys, case.heads[1]),
        (num_keys, case.heads[1]),
        (num_tokens, case.heads[0]),
    )
    q, k, v, grad_o = (torch.randn(n, h, case.head_dim, generator=generator) for n, h in counts)
    if case.logits == "huge":
        q = q * 30
    elif case.logits == "low":
        q, k = -20 * q.abs() / case.head_dim, k.abs()
    elif case.logits == "one-hot":
        taken = torch.rand(k[..., :1].shape, generator=generator) < 0.1
        q, k = 1 + q.abs(), torch.where(taken, 8.0, -8.0) * (1 + k.abs())
    elif case.logits == "steady":
        q, k = 1 + q.abs() / 8, 1.3 + k.abs() / 8
    elif case.logits == "far":
        k[5:37] = q[190] * 3
        q[:64], q[64:] = q[:64] / 8, q[190] + q[64:] / 8
        k[37:] = k[37:] / 4 - q[190] / 3
    elif case.logits == "some rows":
        q[130:150, 1] *= 30
    elif case.logits == "dead rows":
        q, k = q / 10, k / 10
        q[..., 0], q[..., 1], k[..., 0], k[..., 1] = 0.0, 1.0, 2.0, -6.0
        q[::2, :, 0], q[::2, :, 1], k[:64, :, 0] = 4.0, 0.0, 16.0
    elif case.logits in ("near", "near and far"):
        q, k = q / 10, k / 10
        q[..., 0], q[..., 1], k[..., 0], k[..., 1] = 0.0, 1.0, 6.0, -24.0
        q[::2, :, 0], q[::2, :, 1] = 4.0, 0.0
        if case.logits == "near and far":
            k[10:30, :, 1] = 24.0
    elif case.logits == "between":
        q, k = q / 10, k / 10
        q[..., 0], q[..., 1], k[..., 0], k[..., 1] = 0.0, 1.0, -8.0, -24.0
        q[::2, :, 0], q[::2, :, 1], k[208:228, :, 0] = 4.0, 0.0, 16.0
    elif case.logits in ("far, in range", "far, in range, log_rest"):
        q, k = q / 10, k / 10
        q[..., 1], k[..., 1], k[16:32, :, 1] = 1.0, -24.0, 18.8
        if case.logits == "far, in range, log_rest":
            k[40, :, 1] = 43.0
    elif case.logits == "infinite":
        k[20:110:7], k[21:110:7] = 60 * k[20:110:7].sign() * q.sign().mean(0), -60 * q.sign().mean(0)
        q = q.sign()
    if case.scaled:
        sizes = torch.tensor([0.01 if i % 2 else 30.0 for i in range(len(case.lengths))])
        v, grad_o = 10 * v, sizes.repeat_interleave(torch.tensor(case.lengths))[:, None, None] * grad_o
    entering = -torch.rand(num_tokens, case.heads[0], generator=generator) * case.rest
    grad_rest = torch.randn(num_tokens, case.heads[0], generator=generator) * case.rest
    if case.logits == "far, in range, log_rest":
        grad_o, grad_rest = grad_o / 10000, 12 * grad_rest.sign()
    return *(x.half() for x in (q, k, v, grad_o)), entering, grad_rest


def run(case: Case):
    """Returns the inputs of `differentiate`, all results in the order of NAMES, and block_stop."""
    q, k, v, grad_o, entering, grad_rest = tensors(case)
    keys = case.keys or case.lengths
    cu_q = starts(case.lengths)
    cu_k = cu_q if case.keys is None else starts(keys)
    offsets = None if case.offsets is None else torch.tensor(case.offsets, dtype=torch.int32)
    scale = case.head_dim**-0.5
    o, rest, *saved = forward(
        q, k, v, cu_q, cu_k, offsets, entering if case.rest else None, max(keys), scale, case.skip_below, convert=case.scaled,
    )  # fmt: skip
    grads = backward(
        grad_o, grad_rest if case.rest else None, q, k, v, cu_q, cu_k, offsets, *saved, max(case.lengths), max(keys),
        scale, case.skip_below, scratch_bytes_per_row=case.scratch, convert=case.scaled,
    )  # fmt: skip
    layout = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "q_offsets": offsets}
    return (q, k, v, entering, grad_o, grad_rest, layout), (o, rest, *grads), saved[2]


def exact_tiles(case: Case, stops: torch.Tensor) -> list[list[int]]:
    """By head and row block: how many of the tiles that the block sees were computed with the exact algebra."""
    rows = forward_config(case.head_dim).row_block
    found: list[list[int]] = [[] for _ in stops]
    for i, (length, keys) in enumerate(zip(case.lengths, case.keys or case.lengths, strict=True)):
        offset = case.offsets[i] if case.offsets else 0
        for first in range(0, length, rows):
            seen = min(max(offset + min(first + rows, length) - 1, 0), keys)
            slot = sum(case.lengths[:i]) // 64 + i + first // 64
            for head, of_head in enumerate(found):
                of_head.append(-(-seen // 64) - int(stops[head, slot, 1]))
    return found


def compare(case: Case):
    inputs, ours, stops = run(case)
    exact, same = differentiate(torch.float64, *inputs), differentiate(torch.float16, *inputs)
    return report(NAMES, ours, exact, same) | {"exact_tiles": exact_tiles(case, stops)}


def compare_loads(case: Case, change: Any = None):
    """Whether results through descriptors have the bits of those from pointers, and how many tensors were described."""
    described = []

    def watched(*args):
        found = descriptors.descriptors(*args)
        described.extend(x for x in found if x is not None)
        for x in found:
            if change and x is not None:
                change(x)
        return found

    results = []
    for find in (watched, lambda *_: (None, None)):
        with patch.object(forward_module, "descriptors", find), patch.object(backward_module, "descriptors", find):
            results.append(run(case)[1])
    same = all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    return {"same_bits": same, "described": len(described)}


def convert():
    """Converts sequences with usual, large, small, no and other values, with 3 heads and 20 dims."""
    lengths, sizes = [70, 65, 0, 130, 1], [1.0, 200.0, 1.0, 2.0**-12, 0.0]
    cu = starts(lengths)
    generator = torch.Generator().manual_seed(0)
    k, grad_o = (torch.randn(sum(lengths), heads, 20, generator=generator) for heads in (3, 2))
    k = (k * torch.tensor(sizes).repeat_interleave(torch.tensor(lengths))[:, None, None]).half()
    k[3, 0, 0], k[4, 1, 1] = float("inf"), float("nan")
    padded = torch.cat([k, k], 2)[..., :20]
    zeros = torch.full((5, 7), 9, dtype=torch.int32)
    v_half, of_v = half.values(padded, cu, zeros)
    of_v[:, half.Q.value] = 5
    k_half, of_all = half.operands(of_v, padded, grad_o.half(), cu, cu)
    found = []
    for i, size in enumerate(sizes):
        rows = slice(cu[i], cu[i + 1])
        maxima = [
            max(x[rows].float().nan_to_num(0, 0, 0).abs().flatten().tolist(), default=0.0) for x in (k, grad_o.half())
        ]
        finite = k[rows].isfinite()
        power = 8 if size == 1 else 13 - math.floor(math.log2(maxima[0])) if maxima[0] else 0
        found.append(
            {
                "maxima": of_all[i].view(torch.float32).tolist()[1:] == [maxima[0], maxima[0], maxima[1]],
                "q": of_all[i, half.Q.value].item() == 5,
                "converted": all(
                    torch.equal(x[rows][finite], (k[rows].double() * 2.0**power).half()[finite])
                    for x in (k_half, v_half)
                ),
                "infinite": torch.equal(k_half[rows].isfinite(), finite),
            }
        )
    return {"sequences": found, "zeros": zeros.abs().max().item()}


def scale_gradients(case: Case):
    """Whether gradients scale with dO and the gradient of log_rest, bit for bit where float16 has all their bits."""
    q, k, v, grad_o, entering, grad_rest = tensors(case)
    # Values that float16 has at both scales.
    grad_o = torch.where(grad_o.abs() < 2**-3, 0, grad_o).bfloat16().half()
    cu, scale, length = starts(case.lengths), case.head_dim**-0.5, max(case.lengths)
    *_, row_carry, row_tile, block_stop, maxima = forward(
        q, k, v, cu, cu, None, entering, length, scale, 0.0, convert=True
    )
    saved = row_carry, row_tile, block_stop, maxima
    once, again = (
        backward(
            factor * grad_o, factor * grad_rest, q, k, v, cu, cu, None, *saved, length, length, scale, 0.0, convert=True
        )
        for factor in (1, 2**-6)
    )
    found = {}
    for name, x, y in zip(NAMES[2:], once, again, strict=True):
        precise = y.abs() >= (2**-14 if y.dtype == torch.float16 else 0)
        found[name] = [torch.equal(x[precise] / 64, y[precise]), precise.float().mean().item()]
    return found


def own_key_seen(z, limit):
    return mask(z, limit + 1)


mask = tile._mask


def swap_lanes(descriptor):
    descriptor.strides[1:4] = [descriptor.strides[i] for i in (2, 1, 3)]


if __name__ == "__main__":
    hasten()
    for name in GROUPS[sys.argv[1]]:
        print(json.dumps({"case": name} | compare(CASES[name])), flush=True)
    if sys.argv[1] == "layouts":
        tiles = Case([1, 140], heads=(2, 1))
        print(json.dumps({"case": "tma and pointers"} | compare_loads(tiles)), flush=True)
        print(json.dumps({"case": "conversion"} | convert()), flush=True)
        scaled = Case([70, 1, 65], scaled=True, heads=(2, 1))
        print(json.dumps({"case": "gradients scale"} | scale_gradients(scaled)), flush=True)
        with patch.object(tile, "_mask", own_key_seen):
            print(json.dumps({"case": "own key seen"} | compare(CASES["packed"])), flush=True)
        print(json.dumps({"case": "keys in another order"} | compare_loads(tiles, swap_lanes)), flush=True)
