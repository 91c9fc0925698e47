"""Runs the kernels of the optimizer step under Triton's interpreter, in a process of its own.

Prints one JSON object per case: which results are the reference's to the last bit, and errors against float64.
"""

import json

import torch
from ssscale_kernels.adamw import Segment, Settings, adamw_reference, clip_factor
from ssscale_kernels.adamw.bounds import exact_and_bounds, share_of_bounds
from ssscale_kernels.adamw.launch import Tiling, TritonPath
from ssscale_kernels.sums import sum_in_order

from tests.kernels.interpreted import hasten

TILING = Tiling(
    chunk=64, block=32, num_warps=1, squares_chunk=32, squares_block=16, squares_warps=1
)  # several chunks per segment, several blocks per chunk
GUARD = 7  # elements before and after each segment, which must keep their value
SETTINGS = (
    Settings(lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1),
    Settings(lr=7e-4, beta1=0.85, beta2=0.999, eps=1e-6, weight_decay=0.0, step=1000),
    Settings(lr=1e-2, beta1=0.0, beta2=0.5, eps=1e-3, weight_decay=0.3, step=3),
)
# name: (sizes, dtype of gradients, whether segments start on 16 bytes, max_norm)
CASES = {
    "one": ((1,), torch.float32, True, 1.0),
    "chunks": ((64, 128, 192), torch.float32, True, 1.0),
    "tails": ((63, 65, 1, 130, 7, 96), torch.float32, True, 1.0),
    "bf16": ((64, 129, 31), torch.bfloat16, True, 1.0),
    "unaligned": ((65, 64, 33), torch.float32, False, 1.0),
    "unaligned bf16": ((65, 64, 33), torch.bfloat16, False, 1.0),
    "not clipped": ((65, 200), torch.bfloat16, True, 1e6),
    "no clipping": ((65, 200), torch.float32, True, 0.0),
    "nan": ((65, 200), torch.float32, True, 1.0),
    "inf": ((65, 200), torch.bfloat16, True, 0.0),
}


PARTS = (1, 2, 3)  # tensors whose sum is a gradient


def update(path, gradients, settings, factor, parts=1):
    """Updates in four launches, the second of no segment, or in one for a single segment."""
    last = len(path.segments)
    runs = [range(last - 1, last), range(last, last), range(1, last - 1), range(1)] if last > 1 else [range(1)]
    assert list(path.update(gradients, settings, factor, parts, runs)) == runs


class Guarded:
    """A segment of memory between elements that nothing may write."""

    def __init__(self, values, aligned):
        self.size, self.first = len(values), 16 if aligned else GUARD
        self.whole = torch.full((self.first + self.size + GUARD,), 77.0, dtype=values.dtype)
        self.inside = self.whole[self.first : self.first + self.size]
        self.inside.copy_(values)

    def untouched(self):
        outside = torch.cat((self.whole[: self.first], self.whole[self.first + self.size :]))
        return bool((outside == 77.0).all())


def make(sizes, dtype, aligned):
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return torch.randn(n, generator=generator)

    names = ("master", "exp_avg", "exp_avg_sq", "rounded", "gradient")
    memory = []
    for n in sizes:
        spread = 10 ** (2 * draw(n))  # from tiny to huge, for the roundings
        values = (draw(n), draw(n) * 0.1, draw(n).square() * 0.01, draw(n).bfloat16(), (draw(n) * spread).to(dtype))
        memory.append({name: Guarded(value, aligned) for name, value in zip(names, values)})
    return memory


def run(name):
    sizes, dtype, aligned, max_norm = CASES[name]
    memory = make(sizes, dtype, aligned)
    gradients = [m["gradient"].inside for m in memory]
    if name in ("nan", "inf"):
        gradients[0][-1] = float(name)
    segments = [
        Segment(*(m[key].inside for key in Segment.TENSORS), group=i % len(SETTINGS), counted=i != 1)
        for i, m in enumerate(memory)
    ]
    before = [[getattr(s, key).clone() for key in Segment.TENSORS] for s in segments]
    path = TritonPath(segments, TILING)
    assert path.aligned == aligned
    total = path.sum_of_squares(gradients)
    assert torch.equal(total, path.sum_of_squares(gradients)) or name == "nan"
    norm, factor = clip_factor(total, max_norm)
    counted = torch.cat([g.double() for g, s in zip(gradients, segments) if s.counted])
    kept = [g.clone() for g in gradients]
    update(path, gradients, SETTINGS, factor)
    assert all(x.untouched() for m in memory for x in m.values()), "wrote outside a segment"
    assert all(torch.equal(a, b) or name == "nan" for a, b in zip(kept, gradients)), "the gradient was changed"
    result = {"skipped": bool(factor.isnan()), "factor": factor.item()}
    result["norm_error"] = (abs(norm.item() / counted.norm().item() - 1)) if norm.isfinite() else 0.0
    result |= {"share_of_bounds": 0.0, "torch_share": 0.0}
    result["same_bits"], result["error"], result["torch_error"] = True, 0.0, 0.0
    for segment, (*state, old), gradient in zip(segments, before, gradients):
        settings = SETTINGS[segment.group]
        ours = [segment.master, segment.exp_avg, segment.exp_avg_sq]
        same = adamw_reference(*state, gradient, settings, factor)
        result["same_bits"] &= all(torch.equal(a, b) for a, b in zip(ours, same))
        if result["skipped"]:
            result["same_bits"] &= torch.equal(segment.rounded, old)
            continue
        # The interpreter cuts the last bits off where a GPU rounds.
        cut = (segment.master.view(torch.int32) & -65536).view(torch.float32).bfloat16()
        result["same_bits"] &= torch.equal(segment.rounded, cut)
        theirs = with_torch(state, gradient, settings, factor)
        for key, results, single in (("share_of_bounds", ours, False), ("torch_share", theirs, True)):
            exact, bounds = exact_and_bounds(state, gradient, settings, factor, single)
            result[key] = max(result[key], share_of_bounds(results, exact, bounds))
        for a, t, e in zip(ours, theirs, exact):
            scale = e.abs().clamp(min=1e-30) * 2**-24
            result["error"] = max(result["error"], ((a.double() - e).abs() / scale).max().item())
            result["torch_error"] = max(result["torch_error"], ((t.double() - e).abs() / scale).max().item())
    return result


def run_far(dtype):
    """Elements beyond the 2^31st of a segment. The tables say that it began 2^31 elements before the memory that it has."""
    (memory,) = make((100,), dtype, True)
    gradient = memory["gradient"].inside
    segment = Segment(*(memory[key].inside for key in Segment.TENSORS))
    state = [x.clone() for x in (segment.master, segment.exp_avg, segment.exp_avg_sq)]
    path, far = TritonPath([segment], TILING), 2**31
    path.chunks.first_chunk -= far // TILING.chunk
    path.squares_chunks.first_chunk -= far // TILING.squares_chunk
    path.sizes += far
    path.addresses -= far * torch.tensor([[4], [4], [4], [2]])
    table = path._gradients([gradient])
    table -= far * gradient.element_size()
    norm, factor = clip_factor(path.sum_of_squares([gradient]), 1.0)
    update(path, [gradient], SETTINGS[:1], factor)
    same = adamw_reference(*state, gradient, SETTINGS[0], factor)
    ours = (segment.master, segment.exp_avg, segment.exp_avg_sq)
    assert all(x.untouched() for x in memory.values()), "wrote outside the segment"
    return {
        "norm_error": abs(norm.item() / gradient.double().norm().item() - 1),
        "same_bits": all(torch.equal(a, b) for a, b in zip(ours, same)),
    }


def spread(n, generator):
    """Random numbers of such different sizes that their order in a sum matters, even for three in bf16."""
    return torch.randn(n, generator=generator) * 10 ** (3 * torch.randn(n, generator=generator))


def run_parts(parts, dtype, aligned):
    """Whether norm and update of gradients in parts have the bits of those of their sums, which another kernel's code adds.

    Every other segment's last part begins at an odd element, unless `aligned`.
    """
    sizes = (63, 65, 1, 130, 7, 96, 64)
    generator, held, given, sums = torch.Generator().manual_seed(parts), [], [], []
    for i, memory in enumerate(make(sizes, dtype, True)):
        state = [memory[key].inside for key in Segment.TENSORS]
        held.append([Segment(*(x.clone() for x in state), group=i % len(SETTINGS), counted=i != 1) for _ in range(2)])
        drawn = [spread(sizes[i], generator) for _ in range(parts)]
        found = [Guarded(x.to(dtype), aligned or i % 2 == 0 or n + 1 < parts).inside for n, x in enumerate(drawn)]
        given += found
        sums.append(torch.empty(sizes[i]))
        sum_in_order(found, sums[-1])
    kept = [x.clone() for x in given]
    (paths, plain), result = ([TritonPath(list(s), TILING) for s in zip(*held)]), {}
    total, expected = paths.sum_of_squares(given, parts), plain.sum_of_squares(sums)
    result["same_norm"] = torch.equal(total, expected) and bool(total > 0)
    _, factor = clip_factor(total, 1.0)
    update(paths, given, SETTINGS, factor, parts)
    update(plain, sums, SETTINGS, factor)
    result["same_bits"] = all(torch.equal(getattr(a, key), getattr(b, key)) for a, b in held for key in Segment.TENSORS)
    result["untouched"] = all(torch.equal(a, b) for a, b in zip(kept, given))
    result["aligned"] = paths._options(given, parts, 1, 1, 1)["ALIGNED"]
    return result


def with_torch(state, gradient, settings, factor):
    """torch's fused AdamW, on the clipped gradient."""
    state = [x.clone() for x in state]
    lr, beta1, beta2, eps, weight_decay, step = settings
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay, "eps": eps}
    tensors = [[state[0]], [gradient.float() * factor], [state[1]], [state[2]], [], [torch.tensor(float(step))]]
    torch._fused_adamw_(*tensors, **options, amsgrad=False, maximize=False)
    return state


if __name__ == "__main__":
    hasten()
    for name in CASES:
        print(json.dumps({"case": name} | run(name)), flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        print(json.dumps({"case": f"far {dtype}"} | run_far(dtype)), flush=True)
        for parts in PARTS:
            for aligned in (True, False):
                case = f"{parts} parts {dtype} {aligned}"
                print(json.dumps({"case": case} | run_parts(parts, dtype, aligned)), flush=True)
