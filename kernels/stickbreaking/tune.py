"""python -m kernels.stickbreaking.tune [--warm]: ranks tile sizes of the backward kernels, dense. Needs a CUDA GPU."""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from kernels.stickbreaking import backward as B
from kernels.stickbreaking import forward as F
from kernels.stickbreaking.benchmark import make, median_ms, starts

C = F.Config
# By shape (batch, heads, length, head dim): for dq, for dkv. The chosen ones stand first.
SHAPES = {
    (4, 24, 4096, 64): (
        [C(64, 64, 4, 4), C(64, 64, 4, 3)],
        [C(64, 64, 4, 3), C(64, 64, 4, 2), C(64, 64, 4, 4)],
    ),
    (8, 32, 2048, 32): (
        [C(64, 64, 4, 3), C(64, 64, 4, 3, 168)],
        [C(64, 64, 4, 3), C(64, 64, 4, 2, 168), C(64, 64, 4, 3, 168)],
    ),
    (4, 16, 4096, 128): (
        [C(128, 64, 8, 2), C(64, 64, 4, 2)],
        [C(128, 64, 8, 2), C(64, 64, 4, 2), C(64, 64, 4, 3)],
    ),
}
SCRATCH = ((1, 24, 16384, 64), (2048, 1024, 512))


Call = Callable[..., object]


def prepared(shape: tuple[int, int, int, int], count: int) -> list[Call]:
    """Backward passes on inputs of their own."""
    batch, _, length, head_dim = shape
    cu, scale = starts(batch, length), head_dim**-0.5

    def one() -> Call:
        q, k, v, grad = make(*shape, spent=False)
        saved = F.forward(q, k, v, cu, cu, None, None, length, scale, 2**-12)[2:]
        return partial(B.backward, grad, None, q, k, v, cu, cu, None, *saved, length, length, scale)

    return [one() for _ in range(count)]


def kernel_ms(call: Call) -> str:
    """Each kernel's own time."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    events = [e for e in record.key_averages() if e.key.startswith(("dq_kernel", "dkv_kernel"))]
    return ", ".join(f"{e.key.split('_')[0]} {e.self_device_time_total / 3000:.2f}" for e in events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", type=int, help="only compile the candidates of this shape's number")
    arguments = parser.parse_args()
    for number, (shape, (dqs, dkvs)) in enumerate(SHAPES.items()):
        if arguments.warm is not None and arguments.warm != number:
            continue
        calls = prepared(shape, 1 if arguments.warm is not None else 2)
        pairs = [(dqs[0], dkv) for dkv in dkvs] + [(dq, dkvs[0]) for dq in dqs[1:]]
        for pair in pairs:
            if pair[0].row_block % pair[1].row_block:
                continue
            config = B.BackwardConfig(*pair)
            try:
                if arguments.warm is not None:
                    calls[0](config=config)
                    continue
                ms = median_ms([partial(call, config=config) for call in calls], 20, 80)
                parts = kernel_ms(partial(calls[0], config=config))
                print(f"{shape} dq {tuple(pair[0])} dkv {tuple(pair[1])}: {ms:.3f} ms ({parts})")
            except Exception as error:  # a candidate that does not fit must not hide the others
                print(f"{shape} {pair}: {type(error).__name__} {str(error)[:100]}")
            sys.stdout.flush()
    if arguments.warm is None:
        shape, sizes = SCRATCH
        calls = prepared(shape, 2)
        for size in sizes:
            ms = median_ms([partial(call, scratch_bytes_per_row=size) for call in calls], 20, 80)
            print(f"{shape} scratch {size} bytes a row: {ms:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
