"""python -m ssscale_kernels.stickbreaking.tune [--warm N]: times tile sizes, chunks, groups of heads and splits.

Needs a CUDA GPU.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial

import torch
from ssscale_kernels.stickbreaking import backward as B
from ssscale_kernels.stickbreaking import decode as D
from ssscale_kernels.stickbreaking import forward as F
from ssscale_kernels.stickbreaking.benchmark import graph_ms, make, starts
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

C = F.Config
# Candidates by shape (batch, heads, length, head dim): forward, dq, dkv. The current settings come first.
SHAPES = {
    (4, 24, 4096, 64): (
        [C(64, 64, 4, 3, 168), C(64, 64, 4, 4, 168)],
        [C(64, 64, 4, 3), C(64, 64, 4, 4)],
        [C(64, 64, 4, 4), C(64, 64, 4, 3), C(64, 64, 4, 2)],
    ),
    (8, 32, 2048, 32): (
        [C(64, 64, 4, 3, 128), C(64, 64, 4, 4, 128)],
        [C(64, 64, 4, 3), C(64, 64, 4, 4)],
        [C(64, 64, 4, 3), C(64, 64, 4, 4), C(64, 64, 4, 2, 168)],
    ),
    (4, 16, 4096, 128): (
        [C(128, 64, 8, 3), C(128, 64, 8, 2)],
        [C(128, 64, 8, 2), C(64, 64, 4, 2)],
        [C(128, 64, 8, 2), C(128, 64, 8, 1)],
    ),
}
# Shapes for heads that spend their sticks at very different speeds, as in trained models.
MIXED = ((4, 12, 4096, 64), (1, 12, 16384, 64))
CHUNKS = ((2, 16), (1, 16), (3, 16), (4, 16), (8, 8), (2, 8), (2, 32))
GROUP_BYTES = (48 << 20, 1, 24 << 20, 1 << 30)
SCRATCH_BYTES = (2048, 1024)
DECODING = ((1, 131072), (32, 16384))
# Warps, stages, total number of programs.
SPLITS = ((2, 3, 1056), (2, 2, 1056), (2, 4, 1056), (2, 3, 528), (2, 3, 2112), (1, 4, 1056), (4, 3, 1056))

Call = Callable[..., object]


def mixed(shape: tuple[int, int, int, int]) -> list[Tensor]:
    """Returns q, k, v, dO in which every third head never spends its stick."""
    some, all_of_it = (make(*shape, spent) for spent in (False, True))
    slow = (torch.arange(shape[1], device="cuda") % 3 == 2)[:, None]
    return [torch.where(slow, a, b) for a, b in zip(some, all_of_it, strict=True)]


def prepared(shape: tuple[int, int, int, int], inputs: list[list[Tensor]]) -> tuple[list[Call], list[Call]]:
    """Returns forward and backward calls, each with its own inputs."""
    batch, _, length, head_dim = shape
    cu, scale = starts(batch, length), head_dim**-0.5
    forward: list[Call] = []
    backward: list[Call] = []
    for q, k, v, grad in inputs:
        forward.append(partial(F.forward, q, k, v, cu, cu, None, None, length, scale, 2**-12))
        saved = F.forward(q, k, v, cu, cu, None, None, length, scale, 2**-12)[2:]
        backward.append(partial(B.backward, grad, None, q, k, v, cu, cu, None, *saved, length, length, scale))
    return forward, backward


def kernel_ms(call: Call) -> str:
    """Returns the time of each backward kernel, as text."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    events = [e for e in record.key_averages() if e.key.startswith(("dq_kernel", "dkv_kernel"))]
    return ", ".join(f"{e.key.split('_')[0]} {e.self_device_time_total / 3000:.2f}" for e in events)


def attempt(what: str, calls: list[Call], warm: bool, **kwargs: object) -> None:
    """Prints the time of one candidate. warm: only compiles it."""
    try:
        if warm:
            calls[0](**kwargs)
            return
        ms = graph_ms([partial(call, **kwargs) for call in calls], 60)
        parts = f" ({kernel_ms(partial(calls[0], **kwargs))})" if calls[0].func is B.backward else ""  # type: ignore[attr-defined]
        print(f"{what}: {ms:.4f} ms{parts}", flush=True)
    except Exception as error:  # a candidate that does not fit must not end the run
        print(f"{what}: {type(error).__name__} {str(error)[:100]}", flush=True)


def decoding(warm: bool) -> None:
    for batch, length in DECODING:
        cu_q, cu_k = starts(batch, 1), starts(batch, length)
        offsets = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        q, _, _, _ = make(batch, 24, 1, 64, spent=False)
        _, k, v, _ = make(batch, 8, length, 64, spent=False)
        call = partial(D.decode, q, k, v, cu_q, cu_k, offsets, None, 1, length, 0.125, 2**-12)
        for warps, stages, programs in SPLITS:
            splits = max(1, min(programs // (8 * batch), length // (D.MIN_TILES * 64)))
            what = f"decode {batch}×{length}: {warps} warps, {stages} stages, {splits} splits"
            attempt(what, [call] * 4, warm, num_splits=splits, config=C(16, 64, warps, stages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--warm", type=int, help="only compile the candidates of this shape's number")
    arguments = parser.parse_args()
    warm = arguments.warm is not None
    for number, (shape, (forwards, dqs, dkvs)) in enumerate(SHAPES.items()):
        if warm and arguments.warm != number:
            continue
        forward, backward = prepared(shape, [make(*shape, spent=False) for _ in range(1 if warm else 2)])
        for config in forwards:
            attempt(f"{shape} forward {tuple(config)}", forward, warm, config=config)
        for pair in [(dqs[0], dkv) for dkv in dkvs] + [(dq, dkvs[0]) for dq in dqs[1:]]:
            if pair[0].row_block % pair[1].row_block == 0:
                what = f"{shape} dq {tuple(pair[0])} dkv {tuple(pair[1])}"
                attempt(what, backward, warm, config=B.BackwardConfig(*pair))
    if arguments.warm in (None, len(SHAPES)):
        decoding(warm)
    if warm:
        sys.exit()
    for shape in ((4, 24, 4096, 64), (1, 24, 16384, 64), *MIXED):
        inputs = [mixed(shape) if shape in MIXED else make(*shape, spent=False) for _ in range(2)]
        forward, backward = prepared(shape, inputs)
        for first, chunk in CHUNKS:
            attempt(f"{shape} chunks {first}, {chunk}", forward, warm, first_chunk=first, chunk=chunk)
        for size in GROUP_BYTES:
            attempt(f"{shape} forward, heads of {size >> 20} MiB", forward, warm, group_bytes=size)
            attempt(f"{shape} backward, heads of {size >> 20} MiB", backward, warm, group_bytes=size)
        for scratch in SCRATCH_BYTES:
            attempt(f"{shape} scratch {scratch} bytes a row", backward, warm, scratch_bytes_per_row=scratch)


if __name__ == "__main__":
    main()
