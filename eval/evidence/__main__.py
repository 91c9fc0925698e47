"""Measures again what README and docs/results state.

    python -m eval.evidence --text TEXT [NAME ...] [--gpus 0,1] [--minutes N] [--out runs/evidence]
    python -m eval.evidence --print [NAME ...]
    python -m eval.evidence --plan GPUS [NAME ...] [--minutes N]

A job is one figure or table: `--print` shows the jobs with their commands and minutes, `--plan` when each would begin and
end on so many H200s. Without names, all of them run. The first one that fits into the free GPUs and the time left starts
next; behind one that needs more GPUs than are free, all wait. A job that keeps the CPU's cores busy, and one whose time
depends on the host, do not run beside each other.
TEXT is a folder with train.NAME.jsonl.zst, valid.NAME.jsonl.zst and tokenizer.json. Jobs whose time is a result have a
GPU alone, others share one. No job starts that would end after --minutes.

OUT/JOB has the files of a job, OUT/state.json the exit codes and seconds, OUT/evidence.tar.gz all small files. The same
command repeats what failed or is left. The exit code is 0 if all jobs ended well, 1 if one failed, 75 if some are left.
"""

import argparse
import sys
from pathlib import Path

from eval.checkpoint.command import Parser, sentences
from eval.checkpoint.gpus import gpus_here
from eval.evidence.jobs import BOOKS, Job, jobs
from eval.evidence.lanes import Lanes, shown
from eval.evidence.schedule import simulate
from ssscale.errors import UserError

GIB = 139.0  # of an H200


def chosen(names: list[str]) -> list[Job]:
    """Returns what must run before the named jobs, and then these in their order. Raises UserError for other names."""
    every = jobs()
    if unknown := [name for name in names if name not in every]:
        raise UserError(f"there is no job {unknown[0]}; use {', '.join(every)}")
    wanted = list(dict.fromkeys(names)) or list(every)
    before = {needed for name in wanted for needed in every[name].after}
    first = [name for name in every if name in before]
    return [every[name] for name in dict.fromkeys([*first, *wanted])]


def planned(some: list[Job], gpus: int, seconds: float) -> list[str]:
    """Returns the lines of `--plan`. Raises UserError if there are no GPUs to plan for."""
    if gpus < 1:
        raise UserError(f"--plan={gpus} must be at least 1, the number of GPUs")
    found, left = simulate(some, {str(gpu): GIB for gpu in range(gpus)}, seconds)
    lines = [f"{begin / 60:5.1f} to {end / 60:5.1f} min  {place}" for begin, end, place in found]
    return [*lines, *([f"left: {' '.join(left)}"] if left else [])]


def parser() -> argparse.ArgumentParser:
    found = Parser("python -m eval.evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("names", nargs="*", metavar="NAME", help="jobs; default: all")
    found.add_argument("--text", type=Path, help="folder with the text and tokenizer.json")
    found.add_argument("--out", type=Path, default=Path("runs/evidence"))
    found.add_argument("--gpus", help="comma-separated GPUs; default: all")
    found.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many minutes")
    found.add_argument("--print", action="store_true", help="only print the jobs and their commands")
    found.add_argument("--plan", type=int, metavar="GPUS", help="only print when each job would begin and end")
    return found


def main() -> int:
    options = parser().parse_args()
    some = chosen(options.names)
    if options.print:
        print(*map(shown, some), sep="\n\n")
        return 0
    if options.plan is not None:
        print(*planned(some, options.plan, 60 * options.minutes), sep="\n")
        return 0
    if options.text is None:
        raise UserError("--text is needed: the folder with the text and tokenizer.json")
    if absent := [name for name in ("tokenizer.json", BOOKS) if not (options.text / name).is_file()]:
        raise UserError(f"--text={options.text}: there is no file {absent[0]}")
    gpus = {gpu.name: gpu.gib for gpu in gpus_here(options.gpus) if gpu.name is not None}
    if not gpus:
        raise UserError("this machine has no GPU")
    if most := max((job for job in some if job.gpus > len(gpus)), key=lambda job: job.gpus, default=None):
        if options.names:
            raise UserError(f"{most.name} takes {most.gpus} GPUs, and there are {len(gpus)}")
        some = [job for job in some if job.gpus <= len(gpus)]
    return Lanes(some, gpus, options.text, options.out, 60 * options.minutes).run()


if __name__ == "__main__":
    with sentences():
        code = main()
    sys.exit(code)
