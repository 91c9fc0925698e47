"""Submit a training job:   python slurm/submit.py config=3b_sb nodes=16 [gpus=8] [time=24:00:00] [key=value ...] [--dry-run]

Options of its own: nodes, gpus (a node), time, partition, account, cpus (a task), early (seconds between the early signal and
the time limit), evaluate (tasks for a job that follows the training, or arguments of launch/evaluate.py as one text:
evaluate="suite=stickbreaking_paper eval_data=DATA"), evaluate_jobs (which share them out), sbatch (further options of sbatch,
as one text).
Every other key=value goes to launch/pretrain.py. --dry-run prints the commands and the script.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.cli import run, take_options
from launch.evaluate import CHANGEABLE, SUITES
from launch.evaluate import OPTIONS as EVALUATE_OPTIONS
from ssscale.config import load_config, validate
from ssscale.errors import UserError
from ssscale.train.run_folder import check_folder

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {
    "nodes": int,
    "gpus": int,
    "time": str,
    "partition": str,
    "account": str,
    "cpus": int,
    "early": int,
    "evaluate": str,
    "evaluate_jobs": int,
    "sbatch": str,
}


def main(argv: list[str]) -> None:
    dry = "--dry-run" in argv
    options, arguments = take_options([text for text in argv if text != "--dry-run"], OPTIONS)
    nodes, gpus = options.get("nodes", 1), options.get("gpus", 8)
    if nodes < 1 or gpus < 0:
        raise UserError(f"nodes must be at least 1 and gpus 0 or more, not nodes={nodes} gpus={gpus}")
    config = load_config(arguments, options=OPTIONS)
    validate(config, world_size=nodes * max(gpus, 1), gpu=gpus > 0)
    folder = Path(config.folder)
    check_folder(folder, config)
    log = folder / "slurm-%j.log"
    shared = [f"--{key}={options[key]}" for key in ("partition", "account") if key in options]
    shared += ["--parsable", f"--chdir={ROOT}", *words("sbatch", options.get("sbatch", ""))]
    train = ["sbatch", *shared, f"--nodes={nodes}", f"--ntasks-per-node={max(gpus, 1)}", f"--output={log}"]
    train += [f"--gpus-per-node={gpus}"] if gpus else []
    train += [f"--cpus-per-task={options['cpus']}"] if "cpus" in options else []
    train += [f"--time={options['time']}"] if "time" in options else []
    train += [f"--signal=B:USR1@{options['early']}"] if "early" in options else []
    train += [f"--job-name={config.name}", "slurm/pretrain.sbatch", *arguments]
    jobs = options.get("evaluate_jobs", 1)
    if jobs < 1 or (jobs > 1 and "evaluate" not in options):
        raise UserError(f"evaluate_jobs={jobs}: a number from 1 on of the jobs that do what evaluate= names")
    log_name = "slurm-evaluate-%A_%a.log" if jobs > 1 else "slurm-evaluate-%j.log"
    after = ["sbatch", *shared, "--kill-on-invalid-dep=yes", f"--output={folder / log_name}"]
    after += ["--gpus-per-node=1"] if gpus else []
    after += [f"--array=0-{jobs - 1}"] if jobs > 1 else []
    after += ["--dependency=afterok:{job}", "slurm/evaluate.sbatch", f"checkpoint={folder}"]
    after += evaluation(options.get("evaluate", ""))
    if dry:
        print(shlex.join(train))
        if "evaluate" in options:
            print(shlex.join(after).replace("{job}", "JOB"))
        print((ROOT / "slurm/pretrain.sbatch").read_text(), end="")
        return
    submit([train[0], "--test-only", *train[1:]])  # else a job that can never start would wait for ever
    folder.mkdir(parents=True, exist_ok=True)
    job = submit(train)
    record(folder, job, train)
    print(f"job {job}, log {str(log).replace('%j', job)}")
    if "evaluate" in options:
        print(f"job {submit([text.replace('{job}', job) for text in after])} evaluates when it has finished")


def evaluation(text: str) -> list[str]:
    """launch/evaluate.py's arguments, from them or from tasks alone. Raises UserError, now rather than after the training."""
    if "=" not in text:
        return [f"tasks={text}"]
    arguments = words("evaluate", text)
    given, rest = take_options(arguments, EVALUATE_OPTIONS)
    unknown = [argument for argument in rest if not argument.startswith(CHANGEABLE)]
    if unknown:
        raise UserError(f"evaluate={text}: launch/evaluate.py takes no {unknown[0]!r}")
    if given.get("suite") not in (None, *SUITES):
        raise UserError(f"evaluate={text}: there are suite={' and suite='.join(SUITES)}")
    return arguments


def words(option: str, text: str) -> list[str]:
    """A text as the shell divides it. Raises UserError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{option}={text}: {str(error).lower()}, the shell would not read it") from None


def submit(command: list[str]) -> str:
    """The job's number. Raises UserError with what Slurm says."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError("there is no sbatch on this machine: submit from a login node of the cluster") from error
    if result.returncode:
        raise UserError(f"Slurm refuses the job: {' '.join(result.stderr.split()) or result.stdout.strip()}")
    return result.stdout.strip().split(";")[0]


def record(folder: Path, job: str, command: list[str]) -> None:
    """The commit, and the command, with the run."""

    def git(*arguments: str) -> str | None:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return None if result.returncode else result.stdout.strip()

    state: dict[str, Any] = {"job": job, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "command": shlex.join(command)}
    state |= {"commit": git("rev-parse", "HEAD"), "changed": git("status", "--porcelain", "--untracked-files=no")}
    (folder / f"slurm-{job}.json").write_text(json.dumps(state, indent=1) + "\n")


if __name__ == "__main__":
    run(main, __doc__)
