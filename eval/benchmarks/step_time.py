"""Says where the time of a training step went, from the traces that `train.profile` has written on GPUs.

The step begins with its first backward pass, and ends where that of the next step could begin: updated weights may be
gathered during the next forward pass. Only the last step of a run, which has no next one, begins with its forward pass.
Each moment of the step belongs to one part, so that the parts add up to the step:

    matrix products, attention, elementwise
                       kernels of these kinds; elementwise is all other computation, copies included
    optimizer          what was launched after the backward pass: norm, clipping, update, rounding
    exposed exchange   a collective runs, and no kernel computes
    host               nothing runs: the GPU waits for the host, or for the loader

If kernels of several kinds run at a time, the first in this order counts. `hidden exchange` is the time in which a
collective runs beside computation; it is part of the other columns. Tracing slows the host down, so `host` is an upper bound.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from eval.checkpoint.command import sentences
from ssscale.errors import UserError
from ssscale.options import Command, Option

COMMAND = Command(
    about=__doc__,
    usage="python -m eval.benchmarks.step_time traces=PATH,...",
    example="python -m eval.benchmarks.step_time traces=runs/before,runs/after",
    options=(Option("traces", str, "run folders, or traces of torch's profiler", required=True, metavar="PATH,..."),),
)
COMPUTATION = ("matrix products", "attention", "optimizer", "elementwise")  # in the order in which they count
EXCHANGE, EXPOSED, HIDDEN, HOST = "exchange", "exposed exchange", "hidden exchange", "host"
COLUMNS = ("matrix products", "attention", "elementwise", "optimizer", EXPOSED, HOST)
PHASE = "phase/"  # ssscale/train/hooks/profile.py begins the names of its annotations with it
# Parts of kernels' names, in lower case, in the order in which they are tried. FlashAttention's kernels name CUTLASS, too.
KINDS = {
    EXCHANGE: re.compile(r"nccl|^memcpy ptop|multimem|one_shot_all_reduce|two_shot_all_reduce"),
    "attention": re.compile(
        r"flash|fmha|sdpa|attention|dot_do_o|convert_dq"
        r"|^(forward|backward|reduce|dq|dkv|value|operands|key_maxima|rest_maxima)_kernel"  # of kernels/
    ),
    "matrix products": re.compile(r"gemm|gemv|nvjet|cutlass|xmma|cublas|splitk|^triton_tem_fused.*mm"),
    "optimizer": re.compile(r"multi_tensor|adam|^(squares|total|update)_kernel"),
}


class Event(NamedTuple):
    """What a GPU did: a kernel, or a copy. In microseconds."""

    start: float
    end: float
    part: str
    launched: float  # by the host; `start` if that is not known


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Returns the events of a trace in Chrome's JSON, compressed or not. Raises UserError."""
    try:
        data = path.read_bytes()
        found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    except OSError as error:
        raise UserError(f"traces={path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, EOFError):
        raise UserError(
            f"traces={path} is not a whole trace of torch's profiler: use a file that train.profile wrote"
        ) from None
    return [event for event in found if event.get("ph") == "X"]


def part_of(name: str, optimizing: bool) -> str:
    """Returns the part that a kernel belongs to. optimizing: whether it was launched after the backward pass."""
    kinds = [kind for kind, words in KINDS.items() if words.search(name.lower())]
    if optimizing and EXCHANGE not in kinds:
        return "optimizer"
    return kinds[0] if kinds else "elementwise"


def gpu_events(trace: Iterable[dict[str, Any]]) -> list[Event]:
    """Returns what the GPU did, each with its part."""
    trace = list(trace)
    optimizing = [span(event) for event in trace if event["name"] == PHASE + "optimizer"]
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in trace
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    found = []
    for event in trace:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launched = launches.get(event.get("args", {}).get("correlation"))
        launched = event["ts"] if launched is None else launched
        late = any(start <= launched < end for start, end in optimizing)
        found.append(Event(*span(event), part_of(event["name"], late), launched))
    return found


def span(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def step_of(trace: Iterable[dict[str, Any]], events: Sequence[Event]) -> tuple[float, float]:
    """Returns the start and the end of the step.

    With an annotation `next`: of what the GPU computed from the first backward pass on. Else of the annotations or, in a
    trace without them, of the GPU's work.
    """
    phases = [event for event in trace if event["name"].startswith(PHASE) and event.get("cat") == "user_annotation"]
    backward = min((event["ts"] for event in phases if event["name"] == PHASE + "backward"), default=None)
    if backward is not None and any(event["name"] == PHASE + "next" for event in phases):
        computed = [event for event in events if event.part != EXCHANGE]
        return min(e.start for e in computed if e.launched >= backward), max(e.end for e in computed)
    spans = [span(event) for event in phases] or [(event.start, event.end) for event in events]
    return min(start for start, _ in spans), max(end for _, end in spans)


def breakdown(trace: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the milliseconds of each of COLUMNS, which add up to the step, and of HIDDEN.

    Raises UserError if the trace has nothing of a GPU.
    """
    events = gpu_events(trace)
    if not events:
        raise UserError("the trace has no kernels of a GPU: a run on CPUs has no such table")
    start, end = step_of(trace, events)
    totals = dict.fromkeys((*COLUMNS, HIDDEN), 0.0)
    for seconds, running in moments(events, start, end):
        busy = [part for part in COMPUTATION if part in running]
        part = busy[0] if busy else EXPOSED if EXCHANGE in running else HOST
        totals[part] += seconds / 1e3
        if busy and EXCHANGE in running:
            totals[HIDDEN] += seconds / 1e3
    return totals


def moments(events: Iterable[Event], start: float, end: float) -> Iterator[tuple[float, set[str]]]:
    """Divides the time from `start` to `end` where events begin or end. Yields (length, parts that run)."""
    changes = [(start, "", 0), (end, "", 0)]
    for event in events:
        first, last = max(event.start, start), min(event.end, end)
        if first < last:
            changes += [(first, event.part, 1), (last, event.part, -1)]
    changes.sort()
    running = dict.fromkeys((*COMPUTATION, EXCHANGE), 0)
    before = start
    for moment, part, change in changes:
        yield moment - before, {name for name, count in running.items() if count}
        before = moment
        if part:
            running[part] += change


def files_of(path: Path) -> list[Path]:
    """Returns the traces at a path: the file itself, or those of a run's folder. Raises UserError if there are none."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("profile/step-*.json.gz"))
    if not found:
        raise UserError(f"traces={path}: the run has no profile/step-*.json.gz; train.profile=STEP writes it")
    return found


def show(path: Path, parts: dict[str, float]) -> str:
    """Returns a row of the table."""
    step = sum(parts[name] for name in COLUMNS)
    cells = [f"{parts[name]:.1f} ({parts[name] / step:.1%})" for name in COLUMNS]
    return f"| {path} | {' | '.join(cells)} | {step:.1f} | {parts[HIDDEN]:.1f} |"


def main(argv: list[str]) -> None:
    options, _ = COMMAND.parse(argv)
    files = [file for path in options["traces"].split(",") for file in files_of(Path(path.strip()))]
    print(f"| trace, ms (of the step) | {' | '.join(COLUMNS)} | step | {HIDDEN} |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    for file in files:
        try:
            parts = breakdown(read_trace(file))
        except UserError as error:
            raise error if str(file) in str(error) else UserError(f"traces={file}: {error}") from None
        print(show(file, parts), flush=True)


if __name__ == "__main__":
    with sentences(COMMAND):
        main(sys.argv[1:])
