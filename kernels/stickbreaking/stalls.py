"""python -m ssscale_kernels.stickbreaking.stalls OUT [--shape 4 24 4096 64]: what the warps of the training kernels wait for.

Needs a CUDA GPU and Nsight Compute's `ncu`, which profiles one forward and backward pass on dense inputs, after a first
one that compiles. Prints, for each kernel, why warps did not issue, in % of all samples, and the SASS instructions at
which they waited most: in which loop, and after which product, barrier, copy or special function. OUT keeps ncu's pages.
"""

import argparse
import csv
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
from ssscale_kernels.gpu import require_gpu
from ssscale_kernels.stickbreaking.benchmark import make
from ssscale_kernels.stickbreaking.candidates import SHAPES, Shape, backward_call, forward_call

SECTIONS = (
    "SourceCounters",
    "WarpStateStats",
    "SchedulerStats",
    "ComputeWorkloadAnalysis",
    "Occupancy",
    "SpeedOfLight",
)
SAMPLES = ("# samples", "warp stall sampling (all samples)", "samples")
MARKS = r"HGMMA|WARPGROUP|BAR\.|SYNCS|UTMA|UBLKCP|LDGSTS|DEPBAR|LDSM|STSM|SHFL|MUFU"
# Metrics of the page "raw": time, registers, warps, share of cycles that issue, pipes, L2.
FIGURES = (
    r"gpu__time_duration\.sum|launch__registers_per_thread|(sm__warps_active|smsp__issue_active|lts__t\w*)\.avg\.pct\S*"
)
FIGURES += r"|sm__inst_executed_pipe_(tensor|xu)\w*\.avg\.pct\S*"


class Instruction(NamedTuple):
    address: int
    text: str
    samples: int
    reasons: Counter[str]  # samples by reason


class Kernel(NamedTuple):
    name: str
    instructions: list[Instruction]


def number(text: str) -> int:
    return int(float(text.replace(",", ""))) if re.fullmatch(r"[\d.,]*\d", text) else 0


def _columns(row: list[str]) -> dict[str, int] | None:
    """Returns where the columns of a row of headers are, by lower-case name, or None if the row has other cells."""
    found = {cell.strip().lower(): i for i, cell in reversed(list(enumerate(row)))}
    return found if "source" in found and found.keys() & set(SAMPLES) else None


def parse_source(text: str) -> list[Kernel]:
    """Returns the kernels of ncu's page "source". ValueError: no row names the columns "Source" and samples."""
    kernels: list[Kernel] = []
    columns, name = None, "kernel"
    for row in csv.reader(text.splitlines()):
        if len(row) >= 2 and row[0].strip().lower() == "kernel name":
            name = row[1]
        elif found := _columns(row):
            columns = found
            kernels.append(Kernel(name, []))
        elif columns and len(row) > columns["source"]:
            kernels[-1].instructions.append(_instruction(row, columns, len(kernels[-1].instructions)))
    if not kernels:
        raise ValueError("no row of ncu's source page names the columns Source and Warp Stall Sampling (All Samples)")
    return kernels


def _instruction(row: list[str], columns: dict[str, int], index: int) -> Instruction:
    total = next(columns[name] for name in SAMPLES if name in columns)
    # "stall_wait (Not Issued)" and "stall_wait_not_issued" count the same samples a second time.
    stalls = {c[6:]: i for c, i in columns.items() if c.startswith("stall_") and "issued" not in c and i < len(row)}
    reasons = +Counter({reason: number(row[i]) for reason, i in stalls.items()})
    address = row[columns["address"]].strip() if "address" in columns else ""
    # Without addresses, instructions of 16 bytes follow each other.
    at = int(address, 16) if re.fullmatch(r"(0x)?[0-9a-fA-F]+", address) else 16 * index
    return Instruction(at, row[columns["source"]].strip(), number(row[total]), reasons)


def loops(instructions: list[Instruction]) -> list[tuple[int, int]]:
    """Returns first and last index of each innermost loop: what a branch to an earlier address encloses."""
    start = instructions[0].address
    index = {x.address: i for i, x in enumerate(instructions)}
    found = []
    for i, x in enumerate(instructions):
        for target in re.findall(r"BRA\b.*?0x([0-9a-fA-F]+)", x.text):
            # ncu prints targets as they lie in memory or from the kernel's start.
            first = index.get(int(target, 16), index.get(int(target, 16) + start, i))
            found += [(first, i)] if first < i else []
    return [a for a in found if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in found)]


def place(instructions: list[Instruction], i: int) -> str:
    """Returns the loop of instruction i, and how far after which product, barrier, copy or special function it comes."""
    around = loops(instructions)
    n = next((n for n, (first, last) in enumerate(around) if first <= i <= last), None)
    first = around[n][0] if n is not None else 0
    where = "outside loops" if n is None else f"loop {n + 1} of {len(around)}, {i - first}"
    for j in range(i - 1, first - 1, -1):
        if mark := re.search(rf"\S*({MARKS})\S*", instructions[j].text):
            count = sum(mark[1] in x.text for x in instructions[first : j + 1])
            return f"{where}: {i - j} after {mark[0]}, number {count}"
    return where


def shares(reasons: Counter[str], total: int, least: float = 0.5) -> str:
    ordered = sorted(((100 * v / total, k) for k, v in reasons.items()), reverse=True)
    return ", ".join(f"{k} {share:.1f}" for share, k in ordered if share >= least)


def describe(kernel: Kernel, hottest: int = 15) -> str:
    total = sum(x.samples for x in kernel.instructions)
    if not total:
        return f"{kernel.name}: no samples"
    sums = sum((x.reasons for x in kernel.instructions), Counter[str]())
    lines = [f"{kernel.name}: {total:.0f} samples; %: {shares(sums, total)}"]
    order = sorted(range(len(kernel.instructions)), key=lambda i: -kernel.instructions[i].samples)
    for i in sorted(i for i in order[:hottest] if kernel.instructions[i].samples):
        x = kernel.instructions[i]
        why = shares(x.reasons, x.samples, 10)
        lines.append(f"  {100 * x.samples / total:5.1f} %  {x.text[:60]:60}  {why}; {place(kernel.instructions, i)}")
    return "\n".join(lines)


def figures(text: str) -> list[str]:
    """Returns a line for each kernel of ncu's page "raw", with the metrics of FIGURES that the report has."""
    rows = [row for row in csv.reader(text.splitlines()) if len(row) > 1]
    header = next((i for i, row in enumerate(rows) if "Kernel Name" in row), len(rows))
    found = []
    for row in rows[header + 2 :]:
        named = dict(zip(rows[header], zip(row, rows[header + 1], strict=True), strict=True))
        values = [f"{name} {' '.join(x)}".strip() for name, x in named.items() if re.fullmatch(FIGURES, name)]
        found.append(f"{named['Kernel Name'][0]}: {'; '.join(values)}")
    return found


def fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def ncu(*arguments: object) -> str:
    """Runs ncu and returns what it prints. Ends the command with its last line if it fails."""
    done = subprocess.run(["ncu", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        last = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["it printed nothing"]
        fail(f"ncu failed: {next((x for x in last if 'ERR' in x), last[-1]).strip()}")
    return done.stdout


def passes(shape: Shape) -> None:
    """Runs forward and backward twice, the second time for ncu."""
    inputs = make(*shape, spent=False)
    for profiled in (False, True):
        if profiled:
            torch.cuda.profiler.start()
        saved = forward_call(shape, inputs)()[2:]
        backward_call(shape, inputs, saved)()
        torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the report and its pages")
    parser.add_argument("--shape", type=int, nargs=4, default=SHAPES[0], help="batch, heads, length, head dim")
    parser.add_argument("--passes", action="store_true", help=argparse.SUPPRESS)  # what runs under ncu
    arguments = parser.parse_args()
    require_gpu()
    if not arguments.passes and shutil.which("ncu") is None:
        fail("this command needs Nsight Compute, and no ncu is on the PATH")
    shape = tuple(arguments.shape)
    if arguments.passes:
        passes(shape)
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = arguments.out / f"{'x'.join(map(str, shape))}.ncu-rep"
    child = (sys.executable, "-m", __spec__.name, arguments.out, "--passes", "--shape", *shape)
    chosen = ("--profile-from-start", "off", "--kernel-name", "regex:^(forward|dq|dkv)_kernel$")
    sections = [x for section in SECTIONS for x in ("--section", section)]
    ncu("--clock-control", "none", *chosen, *sections, "--force-overwrite", "--export", report, *child)
    pages = {page: ncu("--import", report, "--csv", "--page", page) for page in ("raw", "source")}
    for page, text in pages.items():
        report.with_suffix(f".{page}.csv").write_text(text, encoding="utf-8")
    print("\n\n".join(figures(pages["raw"]) + [describe(kernel) for kernel in parse_source(pages["source"])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
