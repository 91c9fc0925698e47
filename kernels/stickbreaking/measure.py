"""python -m ssscale_kernels.stickbreaking.measure OUT: checks the kernels of training, then times them.

Needs a CUDA GPU, and 16 CPU cores to stay under 100 s after compilation. First, processes side by side compile every
kernel that will run, and one compares loads through TMA with loads from pointers; if it fails or hangs, the run goes on
with pointers. Then come results against float64, launch settings, and one table beside FlashAttention-2, cuDNN's attention
and an earlier form of this package (--before): medians of the GPU's time over replays of CUDA graphs, in ms.
OUT/measure.json has all figures, and is written again after every step. With --backward, only backward's candidates run,
on every shape and against the bits of the present settings, and then the table on dense inputs: under 3 minutes.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from ssscale_kernels.gpu import require_gpu
from ssscale_kernels.stickbreaking import accuracy, stickbreaking_attention
from ssscale_kernels.stickbreaking import backward as backward_module
from ssscale_kernels.stickbreaking import forward as forward_module
from ssscale_kernels.stickbreaking.accuracy import BF16, FP16, Case
from ssscale_kernels.stickbreaking.backward import BackwardConfig
from ssscale_kernels.stickbreaking.benchmark import forward_and_backward, graph_ms, make
from ssscale_kernels.stickbreaking.candidates import (
    BEFORE,
    CANDIDATES,
    SHAPES,
    Call,
    Settings,
    Shape,
    backward_call,
    both_call,
    current,
    earlier_form,
    empty_saved,
    fastest,
    forward_call,
    pairs,
    tuned_shape,
)
from ssscale_kernels.stickbreaking.settings import Config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

CHUNKS = ((2, 16), (2, 32), (4, 64))
CHECK_S = 30  # seconds for the comparison with float64
TUNE_S = 55  # no candidate is started later, so that the table is complete within 100 s
COMPILE_S = 240
COLUMNS = ("FA2", "cuDNN", "before", "now", "now, tuned")


def some_cases() -> list[Case]:
    """Returns about a third of `accuracy.cases`: every dtype, option and kind of logits, but not all pairs of them."""
    found = [Case(BF16, 64, kind) for kind in accuracy.KINDS]
    found += [Case(BF16, h) for h in (32, 128)] + [Case(FP16, h) for h in (32, 64, 80, 128)]
    found += [Case(BF16, 64, use=use) for use in accuracy.USES[1:]] + [Case(FP16, 64, use="carried")]
    found += [Case(FP16, 64, "huge"), Case(BF16, 64, "edge", "remainder"), Case(BF16, 64, heads=(8, 1))]
    found.append(Case(BF16, 64, use="carried", lengths=(20, 1, 130), keys=(170, 65, 300), offsets=(150, 70, -3)))
    skipping = [case for case in found if case.use in ("o", "remainder") and case.dtype == BF16]
    return found + [case._replace(skip_below=accuracy.SKIP) for case in skipping]


class Run:
    """What was found so far, on the terminal and in OUT/measure.json, and whether kernels load through TMA."""

    def __init__(self, folder: Path, before: str | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "measure.json"
        self.before, self.tma = before, True
        self.started = time.time()
        lists = ("candidates", "chunks", "kernels", "table", "failures")
        self.found: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        } | {name: [] for name in lists}

    def seconds(self) -> float:
        return time.time() - self.started

    def add(self, key: str, value: Any, text: str) -> None:
        """Appends to a list of results, or sets one."""
        if isinstance(self.found.get(key), list):
            self.found[key].append(value)
        else:
            self.found[key] = value
        self.found["seconds"] = round(self.seconds())
        self.file.write_text(json.dumps(self.found, indent=1), encoding="utf-8")
        print(text, flush=True)

    def fail(self, what: str, error: Exception) -> None:
        text = f"{what}: {type(error).__name__} {str(error)[:150]}"
        self.add("failures", text, text)

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Notes an error of the block, which ends the block but not the run."""
        try:
            yield
        except Exception as error:  # compilers and drivers raise many types where something does not fit
            self.fail(what, error)


def run_case(case: Case) -> object:
    return accuracy.differentiate(stickbreaking_attention, accuracy.draw(case, "cuda"), skip_below=case.skip_below)


def jobs(before: str | None, backward_only: bool) -> list[Call]:
    """Returns calls that together compile all kernels of a run."""

    def forwards(shape: Shape, module: Any, **options: Any) -> object:
        return forward_call(shape, make(*shape, True), module, **options)()

    def backwards(shape: Shape, module: Any, **options: Any) -> object:
        return backward_call(shape, make(*shape, True), empty_saved(shape), module, **options)()

    found: list[Call] = [
        partial(run_case, case) for case in some_cases() if case.kind == "normal" and not case.skip_below
    ]
    if backward_only:
        # The length of a sequence is a constant of dkv.
        found = [partial(forwards, shape, forward_module) for shape in SHAPES]
        pairs_of = [(shape, pair) for shape in SHAPES for _, pair in pairs(shape[3])]
        return found + [partial(backwards, shape, backward_module, config=pair) for shape, pair in pairs_of]
    for head_dim in CANDIDATES:
        shape = tuned_shape(head_dim)
        found += [partial(backwards, shape, backward_module, config=pair) for _, pair in pairs(head_dim)]
        found += [partial(forwards, shape, forward_module, config=c) for c in CANDIDATES[head_dim].forward]
        found += [
            partial(forwards, shape, forward_module, tma=False),
            partial(backwards, shape, backward_module, tma=False),
        ]
        if before:
            forward, backward = earlier_form(before)
            found.append(partial(forwards, shape, forward, config=BEFORE[head_dim].forward))
            found.append(partial(backwards, shape, backward, config=BEFORE[head_dim].backward))
    return found


def child(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", __spec__.name, *arguments])


def ended_well(process: subprocess.Popen[bytes], deadline: float) -> bool:
    try:
        return process.wait(max(1.0, deadline - time.time())) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        return False


def compile_side_by_side(workers: int, run: Run, backward_only: bool) -> None:
    """Fills Triton's cache from `workers` processes, and finds out whether TMA works. A failing job costs only itself."""
    deadline = time.time() + COMPILE_S
    before = (["--before", run.before] if run.before else []) + ["--backward"] * backward_only
    same = None if backward_only else child("unused", "--compare")
    running = [child("unused", *before, "--warm", f"{i}/{workers}") for i in range(workers)]
    for i, process in enumerate(running):
        if not ended_well(process, deadline):
            run.add("failures", f"process {i}", f"process {i} of the compilation failed")
    if same and not ended_well(same, deadline):
        run.tma = False
        run.add("failures", "TMA", "TMA fails or gives other results: the run uses pointers")
        use_pointers()


def warm(which: str, before: str | None, backward_only: bool) -> None:
    index, workers = map(int, which.split("/"))
    for job in jobs(before, backward_only)[index::workers]:
        try:
            job()
        except Exception as error:  # one candidate must not end the run
            print(f"does not compile or run: {type(error).__name__} {str(error)[:150]}", flush=True)
    torch.cuda.synchronize()


def tma_fails() -> bool:
    """Whether loads through TMA give other results than loads from pointers, for any head dim, spent or dense."""
    for head_dim, spent in itertools.product(CANDIDATES, (False, True)):
        shape = (2, 3, 640, head_dim)
        inputs = make(*shape, spent)
        results = []
        for tma in (True, False):
            o, rest, *saved = forward_call(shape, inputs, tma=tma)()
            results.append((o, rest, *backward_call(shape, inputs, saved, tma=tma)()))
        torch.cuda.synchronize()
        same = all(torch.equal(x, y) for x, y in zip(*results, strict=True))
        print(
            f"TMA and pointers, {head_dim} dims, spent {spent}: {'the same bits' if same else 'other bits'}", flush=True
        )
        for x, y in zip(*results, strict=True):
            if not (x - y).abs().max() <= 0.01 * y.abs().max():
                return True
    return False


def use_pointers() -> None:
    def none(*_: object) -> tuple[None, None]:
        return None, None

    forward_module.descriptors = backward_module.descriptors = none  # type: ignore[assignment]


def check(run: Run) -> bool:
    """Compares with float64. Returns whether all errors are allowed."""
    worst: dict[str, float] = {}
    over: list[str] = []
    end, done = run.seconds() + CHECK_S, 0
    for case in some_cases():
        if run.seconds() > end:
            break
        done += 1
        for name, error in accuracy.compare(accuracy.draw(case, "cuda")).items():
            share, column = accuracy.share(error), f"{str(case.dtype)[6:]} {name}"
            worst[column] = max(worst.get(column, 0.0), share)
            if not share <= 1:
                over.append(f"{name} is {share:.2f} of what is allowed: {case}")
                print(over[-1], flush=True)
    shares = ", ".join(f"{column} {x:.2f}" for column, x in worst.items())
    text = (
        f"{done} of {len(some_cases())} cases after {run.seconds():.0f} s: worst share of the allowed error: {shares}"
    )
    run.add("accuracy", {"cases": done, "worst": worst, "over": over}, f"{text}; over it: {len(over)}")
    return not over


def kernel_ms(call: Call) -> dict[str, float]:
    """Returns the mean time of each kernel in ms."""
    call()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(8):
            call()
        torch.cuda.synchronize()
    return {e.key.split("_kernel")[0]: e.self_device_time_total / e.count / 1000 for e in record.key_averages()}


def tune(shape: Shape, run: Run) -> Settings:
    """Times candidates on dense inputs. Returns the fastest settings that fit together."""
    head_dim = shape[3]
    inputs, now = make(*shape, spent=False), current(head_dim)
    times: dict[str, dict[Config, float]] = {"forward": {}, "dq": {}, "dkv": {}}

    def attempt(kernel: str, config: Config, call: Call) -> None:
        if run.seconds() > TUNE_S:
            return
        with run.trying(f"{shape} {kernel} {tuple(config)}"):
            ms = times[kernel][config] = kernel_ms(call)[kernel]
            result = {"shape": shape, "kernel": kernel, "config": config, "ms": ms}
            run.add("candidates", result, f"{shape} {kernel} {tuple(config)}: {ms:.4f} ms")

    for config in CANDIDATES[head_dim].forward:
        attempt("forward", config, forward_call(shape, inputs, config=config, tma=run.tma))
    saved = forward_call(shape, inputs, tma=run.tma)()[2:]
    for kernel, pair in pairs(head_dim):
        attempt(kernel, getattr(pair, kernel), backward_call(shape, inputs, saved, config=pair, tma=run.tma))
    best = fastest(times) if all(times.values()) else now
    details(shape, inputs, saved, run)
    return best


def difference(shape: Shape, pair: BackwardConfig, run: Run) -> float:
    """Returns how far gradients are from those of the present settings, dense and spent, as a share of the largest."""
    found = 0.0
    for spent in (False, True):
        inputs = make(*shape, spent)
        saved = forward_call(shape, inputs, tma=run.tma)()[2:]
        results = (backward_call(shape, inputs, saved, config=c, tma=run.tma)() for c in (None, pair))
        for x, y in zip(*results, strict=True):
            if not torch.equal(x, y):
                found = max(found, (x - y).abs().max().div(x.abs().max()).nan_to_num(torch.inf).item())
    return found


def tune_backward(shape: Shape, run: Run) -> Settings:
    """Times settings of backward on dense inputs, the present ones first and last. Returns the fastest that fit together."""
    sets, now = [make(*shape, spent=False) for _ in range(3)], current(shape[3])
    saved = [forward_call(shape, s, tma=run.tma)()[2:] for s in sets]
    times: dict[str, dict[Config, float]] = {"forward": {now.forward: 0.0}, "dq": {}, "dkv": {}}
    for kernel, pair in [*pairs(shape[3]), ("dkv", now.backward)]:
        config = getattr(pair, kernel)
        with run.trying(f"{shape} {kernel} {tuple(config)}"):
            calls = [backward_call(shape, *x, config=pair, tma=run.tma) for x in zip(sets, saved, strict=True)]
            alone, ms, apart = kernel_ms(calls[0])[kernel], graph_ms(calls, 60), difference(shape, pair, run)
            if apart < 2**-8:
                times[kernel].setdefault(config, alone)
            result = {"shape": shape, "kernel": kernel, "config": config, "ms": alone, "backward": ms, "apart": apart}
            text = f"{alone:.4f} ms, backward {ms:.4f} ms, {f'apart by {apart:.1e}' if apart else 'the same bits'}"
            run.add("candidates", result, f"{shape} {kernel} {tuple(config)}: {text}")
    return fastest(times) if all(times.values()) else now


def details(shape: Shape, inputs: list[torch.Tensor], saved: list[torch.Tensor], run: Run) -> None:
    """Times chunks, loads from pointers, and the conversions around the kernels. The table does not need this."""
    with run.trying(f"details of {shape}"):
        for first, chunk in CHUNKS if shape == SHAPES[0] else ():
            ms = kernel_ms(forward_call(shape, inputs, first_chunk=first, chunk=chunk, tma=run.tma))["forward"]
            run.add("chunks", {"first": first, "chunk": chunk, "ms": ms}, f"chunks of {first} to {chunk}: {ms:.4f} ms")
        for tma in (run.tma, False):
            times = kernel_ms(forward_call(shape, inputs, tma=tma)) | kernel_ms(
                backward_call(shape, inputs, saved, tma=tma)
            )
            text = ", ".join(f"{name[:40]} {ms:.4f}" for name, ms in times.items())
            run.add("kernels", {"shape": shape, "tma": tma, "ms": times}, f"{shape}, TMA {tma}: {text}")


def softmax_ms(shape: Shape, sets: list[list[torch.Tensor]], backend: SDPBackend) -> tuple[float, float]:
    inputs = [[x.unflatten(0, (shape[0], shape[2])).transpose(1, 2) for x in s] for s in sets]
    with sdpa_kernel(backend):
        forward, backward = forward_and_backward(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs, 60
        )
    return forward, forward + backward


def measure_row(shape: Shape, spent: bool, tuned: Settings, run: Run) -> None:
    """Times forward, and forward and backward, of every implementation."""
    sets = [make(*shape, spent) for _ in range(3)]

    def ours(modules: tuple[Any, Any], settings: Settings, **options: Any) -> tuple[float, float]:
        first = [forward_call(shape, s, modules[0], config=settings.forward, **options) for s in sets]
        return graph_ms(first, 60), graph_ms([both_call(shape, s, *modules, settings, **options) for s in sets], 60)

    def earlier() -> tuple[float, float]:
        return ours(earlier_form(run.before), BEFORE[shape[3]]) if run.before else (float("nan"), float("nan"))

    modules = (forward_module, backward_module)
    attempts: dict[str, Call] = {
        "FA2": partial(softmax_ms, shape, sets, SDPBackend.FLASH_ATTENTION),
        "cuDNN": partial(softmax_ms, shape, sets, SDPBackend.CUDNN_ATTENTION),
        "before": earlier,
        "now": partial(ours, modules, current(shape[3]), tma=run.tma),
        "now, tuned": partial(ours, modules, tuned, tma=run.tma),
    }
    cells = dict.fromkeys(COLUMNS, (float("nan"), float("nan")))
    for name in COLUMNS:
        with run.trying(f"{name} {shape}"):
            cells[name] = attempts[name]()
    sticks = "spent" if spent else "dense"
    times = " | ".join(f"{a:.3f} / {b:.3f}" for a, b in cells.values())
    best, fa2, cudnn = cells["now, tuned"], cells["FA2"], cells["cuDNN"]
    shares = f"{best[0] / fa2[0]:.2f} / {best[1] / fa2[1]:.2f} | {best[0] / cudnn[0]:.2f}"
    text = f"| {'×'.join(map(str, shape))} | {sticks} | {times} | {shares} |"
    run.add("table", {"shape": shape, "sticks": sticks, "ms": cells}, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for measure.json")
    parser.add_argument("--before", help='kernels/ of an earlier commit, for the column "before"')
    parser.add_argument("--backward", action="store_true", help="only compare the candidates of backward")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--warm", help=argparse.SUPPRESS)  # which of how many processes compiles
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    require_gpu()
    if arguments.warm:
        warm(arguments.warm, arguments.before, arguments.backward)
        return 0
    if arguments.compare:
        return int(tma_fails())
    run = Run(arguments.out, arguments.before)
    print(", ".join(f"{key} {run.found[key]}" for key in ("device", "torch", "triton")), flush=True)
    compile_side_by_side(arguments.workers, run, arguments.backward)
    print(f"compiled after {run.seconds():.0f} s", flush=True)
    run.started = time.time()
    right = arguments.backward or check(run)
    if arguments.backward:
        best = {shape: tune_backward(shape, run) for shape in SHAPES}
    else:
        of_dims = {head_dim: tune(tuned_shape(head_dim), run) for head_dim in CANDIDATES}
        best = {shape: of_dims[shape[3]] for shape in SHAPES}
    run.add("tuned", {str(shape): x for shape, x in best.items()}, f"tuned after {run.seconds():.0f} s: {best}")
    print("\nms, forward / forward + backward", flush=True)
    print(f"| shape | sticks | {' | '.join(COLUMNS)} | tuned ÷ FA2 | forward ÷ cuDNN |\n|{9 * '---|'}", flush=True)
    for shape, spent in itertools.product(SHAPES, (False,) if arguments.backward else (False, True)):
        measure_row(shape, spent, best[shape], run)
    print(f"done after {run.seconds():.0f} s", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
