"""python -m ssscale_kernels.stickbreaking.sixteen.measure OUT: checks the kernels with 16 keys per thread, then times them.

Needs a CUDA GPU, and 16 CPU cores to stay under 6 minutes. First, processes side by side compile every kernel that will
run. Then come results against float64, launch settings, and one table beside FlashAttention-2, cuDNN's attention and
the kernels with four keys per group: medians of the GPU's time over replays of CUDA graphs, in ms. OUT/measure.json has
all figures, and is written again after every step.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from ssscale_kernels.stickbreaking import accuracy, stickbreaking_attention
from ssscale_kernels.stickbreaking import backward as four_backward
from ssscale_kernels.stickbreaking import forward as four_forward
from ssscale_kernels.stickbreaking.benchmark import check, forward_and_backward, graph_ms, make
from ssscale_kernels.stickbreaking.forward import Config
from ssscale_kernels.stickbreaking.sixteen import backward as sixteen_backward
from ssscale_kernels.stickbreaking.sixteen import forward as sixteen_forward
from ssscale_kernels.stickbreaking.sixteen.candidates import (
    CANDIDATES,
    SHAPES,
    Call,
    Settings,
    Shape,
    backward_call,
    both_call,
    current,
    empty_saved,
    fastest,
    forward_call,
    pairs,
    tuned_shape,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

CHUNKS = ((2, 32), (4, 16), (4, 64), (8, 64))
LIMIT_S = 270  # no candidate is started later, so that the table is complete within 6 minutes
COLUMNS = ("FA2", "cuDNN", "4 keys", "16 keys", "16 keys, tuned")
MODULES = {"4 keys": (four_forward, four_backward), "16 keys": (sixteen_forward, sixteen_backward)}
started = time.time()


class Log:
    """What was found so far, on the terminal and in OUT/measure.json."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "measure.json"
        self.found: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "candidates": [],
            "chunks": [],
            "table": [],
            "failures": [],
        }

    def add(self, key: str, value: Any, text: str) -> None:
        """Appends to a list of results, or sets one."""
        if isinstance(self.found.get(key), list):
            self.found[key].append(value)
        else:
            self.found[key] = value
        self.found["seconds"] = round(time.time() - started)
        self.file.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        print(text, flush=True)

    def fail(self, what: str, error: Exception) -> None:
        text = f"{what}: {type(error).__name__} {str(error)[:150]}"
        self.add("failures", text, text)


def run_case(case: accuracy.Case) -> object:
    inputs = accuracy.draw(case, "cuda")
    return accuracy.differentiate(stickbreaking_attention, inputs, skip_below=case.skip_below)


def jobs() -> list[Call]:
    """Returns calls that together compile all kernels of a run."""
    found: list[Call] = []
    for case in accuracy.cases():
        if case.dtype != accuracy.FP32 and case.kind == "normal" and not case.skip_below:
            found.append(partial(run_case, case))
    for shape in SHAPES:
        tuned = shape == tuned_shape(shape[3])

        def backwards(shape: Shape, module: Any, **options: Any) -> object:
            return backward_call(shape, make(*shape, True), empty_saved(shape), module, **options)()

        def forwards(shape: Shape, module: Any, **options: Any) -> object:
            return forward_call(shape, make(*shape, True), module, **options)()

        if tuned:
            found += [partial(backwards, shape, sixteen_backward, config=pair) for _, pair in pairs(shape[3])]
            configs = CANDIDATES[shape[3]].forward
            found += [partial(forwards, shape, sixteen_forward, config=config) for config in configs]
            found.append(partial(forwards, shape, four_forward))
        found += [partial(backwards, shape, module) for module in (sixteen_backward, four_backward)]
    return found


def compile_side_by_side(workers: int) -> None:
    """Fills Triton's cache from `workers` processes. A candidate that does not compile costs only itself."""
    command = [sys.executable, "-m", __spec__.name, "unused", "--warm"]
    running = [subprocess.Popen([*command, f"{i}/{workers}"]) for i in range(workers)]
    for process in running:
        process.wait()


def warm(which: str) -> None:
    index, workers = map(int, which.split("/"))
    for job in jobs()[index::workers]:
        try:
            job()
        except Exception as error:  # one candidate must not end the run
            print(f"does not compile or run: {type(error).__name__} {str(error)[:150]}", flush=True)
    torch.cuda.synchronize()


def kernel_ms(call: Call) -> dict[str, float]:
    """Returns the mean time of each attention kernel in ms."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
    events = {e.key.split("_kernel")[0]: e for e in record.key_averages() if "_kernel" in e.key}
    return {name: e.self_device_time_total / e.count / 1000 for name, e in events.items()}


def tune(shape: Shape, log: Log) -> Settings:
    """Times candidates on dense inputs. Returns the fastest settings that fit together."""
    head_dim = shape[3]
    inputs, now = make(*shape, spent=False), current(head_dim)
    times: dict[str, dict[Config, float]] = {"forward": {}, "dq": {}, "dkv": {}}

    def attempt(kernel: str, config: Config, call: Call) -> None:
        if time.time() - started > LIMIT_S:
            return
        try:
            ms = kernel_ms(call)[kernel]
        except Exception as error:  # a candidate that does not fit must not end the run
            log.fail(f"{shape} {kernel} {tuple(config)}", error)
            return
        times[kernel][config] = ms
        result = {"shape": shape, "kernel": kernel, "config": config, "ms": ms}
        log.add("candidates", result, f"{shape} {kernel} {tuple(config)}: {ms:.4f} ms")

    for config in CANDIDATES[head_dim].forward:
        attempt("forward", config, forward_call(shape, inputs, config=config))
    # Row blocks of 128 hold for row blocks of 64 as well.
    wide = next(config for config in CANDIDATES[head_dim].forward if config.row_block == 128)
    saved = forward_call(shape, inputs, config=wide)()[2:]
    for kernel, pair in pairs(head_dim):
        attempt(kernel, getattr(pair, kernel), backward_call(shape, inputs, saved, config=pair))
    for first, chunk in CHUNKS if shape == SHAPES[0] else ():
        ms = kernel_ms(forward_call(shape, inputs, first_chunk=first, chunk=chunk))["forward"]
        log.add("chunks", {"first": first, "chunk": chunk, "ms": ms}, f"chunks of {first} to {chunk}: {ms:.4f} ms")
    return fastest(times) if all(times.values()) else now


def softmax_ms(shape: Shape, sets: list[list[torch.Tensor]], backend: SDPBackend) -> tuple[float, float]:
    inputs = [[x.unflatten(0, (shape[0], shape[2])).transpose(1, 2) for x in s] for s in sets]
    with sdpa_kernel(backend):
        forward, backward = forward_and_backward(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs, 100
        )
    return forward, forward + backward


def measure_row(shape: Shape, spent: bool, tuned: Settings, log: Log) -> None:
    """Times forward, and forward and backward, of every implementation."""
    sets = [make(*shape, spent) for _ in range(3)]

    def ours(name: str, settings: Settings | None) -> tuple[float, float]:
        forward, backward = MODULES[name]
        first = {} if settings is None else {"config": settings.forward}
        return (
            graph_ms([forward_call(shape, s, forward, **first) for s in sets], 100),
            graph_ms([both_call(shape, s, forward, backward, settings) for s in sets], 100),
        )

    attempts = {
        "FA2": partial(softmax_ms, shape, sets, SDPBackend.FLASH_ATTENTION),
        "cuDNN": partial(softmax_ms, shape, sets, SDPBackend.CUDNN_ATTENTION),
        "4 keys": partial(ours, "4 keys", None),
        "16 keys": partial(ours, "16 keys", None),
        "16 keys, tuned": partial(ours, "16 keys", tuned),
    }
    cells = {}
    for name in COLUMNS:
        try:
            cells[name] = attempts[name]()
        except Exception as error:  # the other columns are still worth their time
            log.fail(f"{name} {shape}", error)
            cells[name] = (float("nan"), float("nan"))
    sticks = "spent" if spent else "dense"
    times = " | ".join(f"{a:.3f} / {b:.3f}" for a, b in cells.values())
    best, fa2 = cells["16 keys, tuned"], cells["FA2"]
    shares = f"{best[0] / fa2[0]:.2f} / {best[1] / fa2[1]:.2f}"
    text = f"| {'×'.join(map(str, shape))} | {sticks} | {times} | {shares} |"
    log.add("table", {"shape": shape, "sticks": sticks, "ms": cells}, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of measure.json")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    arguments = parser.parse_args()
    if arguments.warm:
        warm(arguments.warm)
        return 0
    log = Log(arguments.out)
    print(", ".join(f"{key} {log.found[key]}" for key in ("device", "torch", "triton")), flush=True)
    compile_side_by_side(arguments.workers)
    print(f"compiled after {time.time() - started:.0f} s", flush=True)
    wrong = check(float32=False)
    log.add("accuracy", wrong, f"checked after {time.time() - started:.0f} s")
    best = {head_dim: tune(tuned_shape(head_dim), log) for head_dim in CANDIDATES}
    log.add("tuned", {str(dim): x for dim, x in best.items()}, f"tuned after {time.time() - started:.0f} s: {best}")
    print("\nms, forward / forward + backward", flush=True)
    print(f"| shape | sticks | {' | '.join(COLUMNS)} | tuned ÷ FA2 |\n|{8 * '---|'}", flush=True)
    for shape, spent in itertools.product(SHAPES, (False, True)):
        measure_row(shape, spent, best[shape[3]], log)
    print(f"done after {time.time() - started:.0f} s", flush=True)
    return 1 if wrong["over"] else 0


if __name__ == "__main__":
    sys.exit(main())
