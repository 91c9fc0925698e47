"""Repeats the papers' findings with several seeds, job by job.

    python -m eval.papers.study NAME --text TEXT [--questions FILE,...] [--wikitext FILE] [--jobs PATTERN,...]
        [--seeds 0,1,2] [--out FOLDER] [--deadline SECONDS] [--pause SECONDS]
    python -m eval.papers.study ssmax,positions,why,mqrar --rates --text TEXT --questions FILE,... --wikitext FILE
    python -m eval.papers.study cores --text TEXT --questions FILE,... --eval-data FOLDER --rates [...]
    python -m eval.papers.study NAME --choose [--out FOLDER]
    python -m eval.papers.study NAME --report [FOLDER] [--out FOLDER]

NAME is ssmax, positions, why, mqrar (eval/papers/study/studies.py has their jobs) or cores (cores.py), or several of them,
whose jobs then share the GPUs. TEXT is made by `python -m eval.papers.study.split`. Every job trains, measures and writes
OUT/NAME/JOB-sSEED.json. A file that exists is not made again. The order is:

1. --jobs 'rate-*' tries three learning rates per method on validation documents, and writes OUT/NAME/rates/*.json. Where
   the best is at the edge of these, the same command tries the next one beyond it, two more at most.
2. --choose writes the best to OUT/NAME/rates.json. State and commit it. Without it no job that reads test documents
   starts. A learning rate that is on file stays.
3. The jobs without rate-, which are the default. METHOD@RATE is a whole training at another rate than the chosen one. Of
   both, the one with the lower validation loss stands for its method, and has the further seeds.
4. --report draws the figures and writes the claims with their verdicts as FOLDER/NAME.md.

--rates takes the first two steps for the methods that lack a learning rate. Each job starts as soon as its rate is
chosen, and a further seed as soon as it is known at which rate. --jobs takes names as --print shows them, also without
study or seed.

Jobs share the GPUs of the machine, up to --per-gpu on each, and one trains while fewer than two that started before it
do. --print only prints their commands. --plan MINUTES prints which jobs fit into which stay of so many minutes on one
GPU.

Models stay in --work until their job has ended, and are not brought back. --deadline starts no job that would not end
within so many seconds. --pause stops what is running after so many seconds: trainings save, and the same command
continues. Where a command may take 600 s and a machine is held for 1,800 s, call it three times with --pause 560 and
--deadline 1700, 1100 and 500. The exit code is 0 if all jobs have their files, 75 if some are left, 1 if one failed.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from eval.checkpoint.command import Parser, sentences, whole_numbers
from eval.checkpoint.gpus import gpus_here
from eval.papers.study.jobs import Place
from eval.papers.study.runner import ROOT, Runner
from eval.papers.study.schedule import plan
from eval.papers.study.selection import EVERY, Selection, check_files, choose_rates, names_of
from eval.papers.study.sizes import SIZES, Size
from eval.papers.study.studies import rates_of
from ssscale.errors import SAVED, UserError
from ssscale.train.files import refusal


def commit_here() -> str:
    """Return the commit of this checkout, with + if it has changes, or `unknown`."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed.stdout.strip() else "")


def parser() -> argparse.ArgumentParser:
    found = Parser(
        "python -m eval.papers.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("names", metavar="NAME", help=f"{', '.join(EVERY)}, or several with commas between")
    found.add_argument("--text", type=Path, default=Path("data/study"), help="folder of eval.papers.study.split")
    found.add_argument("--questions", help="comma-separated files in SQuAD's form")
    found.add_argument("--eval-data", type=Path, help="folder of the tasks' data, for cores")
    found.add_argument("--tokens", type=int, help="of each training of cores, in place of 262,144,000")
    found.add_argument("--rates", action="store_true", help="first try and choose the learning rates that are lacking")
    found.add_argument("--wikitext", type=Path, help="Wikitext's articles as .jsonl, for positions and why")
    found.add_argument("--jobs", help="comma-separated names, also with * and with the seed as in ssmax-s0")
    found.add_argument("--seeds", help="of all jobs; default: 0, and for ssmax also 1 and 2 of three methods")
    found.add_argument("--out", type=Path, default=Path("docs/results/papers/raw"))
    found.add_argument("--work", type=Path, default=Path("runs/study"), help="folder of models, data and logs")
    found.add_argument("--size", choices=SIZES, default="full", help="tiny: for tests")
    found.add_argument("--gpus", help="comma-separated GPUs to use; default: all")
    found.add_argument("--per-gpu", type=int, default=3, help="jobs at a time on each GPU")
    found.add_argument("--slower", type=float, default=1.0, help="factor of the declared minutes of an H200")
    found.add_argument("--deadline", type=float, default=float("inf"), help="start no job that would end after it")
    found.add_argument("--pause", type=float, default=float("inf"), help="save and stop running jobs after it")
    found.add_argument("--commit", help="commit to record; default: that of this checkout")
    found.add_argument("--keep-models", action="store_true")
    instead = found.add_mutually_exclusive_group()
    instead.add_argument("--print", action="store_true", help="only print the commands")
    instead.add_argument(
        "--plan", type=float, metavar="MINUTES", help="only print which jobs fit into stays of MINUTES"
    )
    instead.add_argument("--choose", action="store_true", help="choose learning rates from the rate jobs")
    instead.add_argument("--report", nargs="?", const=Path("docs/results/papers"), type=Path, metavar="FOLDER")
    return found


def check_numbers(options: argparse.Namespace) -> None:
    """Raise UserError for numbers with which no job can run."""
    if options.per_gpu < 1:
        raise UserError(f"--per-gpu must be at least 1, not {options.per_gpu}")
    for name in ("slower", "plan"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name} must be greater than 0, not {value:g}")
    for name in ("deadline", "pause"):
        if not getattr(options, name) >= 0:
            raise UserError(f"--{name} must be at least 0, not {getattr(options, name):g}")


def size_of(options: argparse.Namespace) -> Size:
    """Return the size, with --tokens. Raises UserError if they are fewer than a step's."""
    size = SIZES[options.size]
    if options.tokens is None:
        return size
    form = size.cores.form
    if "cores" not in options.names or options.tokens < form.rows * form.length:
        raise UserError(f"--tokens is for cores, and at least the {form.rows * form.length:,} of a step")
    return replace(size, cores=replace(size.cores, form=replace(form, tokens=options.tokens)))


def place_of(options: argparse.Namespace) -> Place:
    """Return the folders and files of the study. Raises UserError for missing and unfit ones."""
    questions = tuple(Path(file).resolve() for file in options.questions.split(",")) if options.questions else ()
    wikitext, eval_data = (path.resolve() if path else None for path in (options.wikitext, options.eval_data))
    place = Place(options.text.resolve(), options.work.resolve(), options.out.resolve(), questions, wikitext, eval_data)
    for name in options.names:
        check_files(name, place, SIZES[options.size])
    return place


def check_writable(folders: list[tuple[str, Path]]) -> None:
    """Raise UserError if a folder of an option cannot be written."""
    for option, folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if reason := refusal(folder):
            raise UserError(f"{option}: {folder} cannot be written ({reason})")


def without_jobs(options: argparse.Namespace, out: Path) -> list[str] | None:
    """Return what --choose or --report prints, or None without either."""
    if options.choose:
        return choose_rates(options.names, out, SIZES[options.size])
    if options.report is None:
        return None
    from eval.papers.study.report import report

    return [str(file) for name in options.names for file in report(name, out, options.report)]


def study(options: argparse.Namespace) -> int:
    """Do what the options say. Returns the exit code."""
    out, options.names = options.out.resolve(), names_of(options.names)
    if (lines := without_jobs(options, out)) is not None:
        print(*lines, sep="\n")
        return 0
    check_numbers(options)
    place, size = place_of(options), size_of(options)
    seeds = None if options.seeds is None else whole_numbers(options.seeds, "--seeds", 0)
    selection = Selection(options.names, place, size, seeds, options.jobs)
    jobs = selection.jobs()
    rates = selection.rates(jobs)
    if options.plan is not None:
        print(plan([*rates, *jobs], options.plan, options.per_gpu))
        return 0
    if options.print:
        for job in jobs:
            print(f"# {job.label}: {job.minutes:.1f} minutes", *(place.plain(s.command) for s in job.steps), sep="\n")
        return 0
    gpus = gpus_here(options.gpus)
    if gpus[0].name is None and options.size == "full":
        raise UserError("this machine has no GPU, and the smallest of these models takes hours on a CPU")
    written = [out / folder for name in options.names for folder in dict.fromkeys((name, rates_of(name)))]
    check_writable([*(("--out", folder) for folder in written), ("--work", place.work)])
    commit = options.commit or os.environ.get("STUDY_COMMIT") or commit_here()
    if not options.rates:
        selection.check(jobs)
    for job in [*rates, *jobs]:  # a result of other commands is said before a job starts
        if job.has_rate:
            job.has_result(place)
    limits = {"deadline": options.deadline, "pause": options.pause, "slower": options.slower}
    ready = partial(selection.ready, options.rates)
    keep = options.keep_models
    runner = Runner(place, ready(), gpus, commit, options.per_gpu, keep_models=keep, ready=ready, **limits)
    if (code := runner.run()) or all(job.file.is_file() for job in selection.jobs()):
        return code
    if not runner.stopped:  # learning rates that cannot be chosen
        print(*choose_rates(options.names, out, size), sep="\n", flush=True)
        selection.check(selection.jobs())
    return SAVED


def main() -> None:
    options = parser().parse_args()
    with sentences():
        code = study(options)
    sys.exit(code)


if __name__ == "__main__":
    with sentences():
        main()
