"""Submit a training job. Every key=value that is not an option of its own goes to launch/pretrain.py."""

import json
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

from launch.boot import EVERY_KEY, ROOT, Command, Option, run
from launch.evaluate import COMMAND as EVALUATE
from ssscale.config import load_config, validate
from ssscale.errors import UserError
from ssscale.train.run_folder import check_folder

COMMAND = Command(
    about=__doc__,
    usage="python slurm/submit.py config=NAME nodes=N [key=value ...] [--dry-run]",
    example="python slurm/submit.py config=3b_sb nodes=16 time=24:00:00 evaluate=cloze",
    options=(
        Option("nodes", int, "of the job", default=1, at_least=1),
        Option("gpus", int, "per node; 0: one CPU task per node", default=8, at_least=0),
        Option("time", str, "the job's time limit", metavar="24:00:00"),
        Option("partition", str, "of the cluster", metavar="NAME"),
        Option("account", str, "of the cluster", metavar="NAME"),
        Option("cpus", int, "per task", at_least=1),
        Option("early", int, "seconds between the early signal and the time limit", at_least=0),
        Option(
            "evaluate",
            str,
            "tasks for a job that follows the training, or arguments of launch/evaluate.py as one text: "
            'evaluate="suite=stickbreaking_paper eval_data=DATA"',
            metavar="TASKS",
        ),
        Option("evaluate_jobs", int, "jobs that share these tasks out", default=1, at_least=1),
        Option("sbatch", str, "further options of sbatch, as one text"),
        Option("--dry-run", bool, "print the commands and the script, and submit nothing"),
    ),
    keys=EVERY_KEY,
)


def main(argv: list[str]) -> None:
    options, arguments = COMMAND.parse(argv)
    nodes, gpus = options["nodes"], options["gpus"]
    config = load_config(arguments, options=COMMAND.names)
    validate(config, world_size=nodes * max(gpus, 1), gpu=gpus > 0)
    folder = Path(config.folder)
    check_folder(folder, config)
    log = folder / "slurm-%j.log"
    shared = [f"--{key}={options[key]}" for key in ("partition", "account") if key in options]
    shared += ["--parsable", f"--chdir={ROOT}", *shlex.split(options.get("sbatch", ""))]
    train = ["sbatch", *shared, f"--nodes={nodes}", f"--ntasks-per-node={max(gpus, 1)}", f"--output={log}"]
    train += [f"--gpus-per-node={gpus}"] if gpus else []
    train += [f"--cpus-per-task={options['cpus']}"] if "cpus" in options else []
    train += [f"--time={options['time']}"] if "time" in options else []
    train += [f"--signal=B:USR1@{options['early']}"] if "early" in options else []
    train += [f"--job-name={config.name}", "slurm/pretrain.sbatch", *arguments]
    jobs = options["evaluate_jobs"]
    if jobs > 1 and "evaluate" not in options:
        raise UserError(f"evaluate_jobs={jobs}: a number from 1 on of the jobs that do what evaluate= names")
    log_name = "slurm-evaluate-%A_%a.log" if jobs > 1 else "slurm-evaluate-%j.log"
    after = ["sbatch", *shared, "--kill-on-invalid-dep=yes", f"--output={folder / log_name}"]
    after += ["--gpus-per-node=1"] if gpus else []
    after += [f"--array=0-{jobs - 1}"] if jobs > 1 else []
    after += ["--dependency=afterok:{job}", "slurm/evaluate.sbatch", f"checkpoint={folder}"]
    after += evaluation(options.get("evaluate", ""))
    if "--dry-run" in options:
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
    arguments = shlex.split(text)
    try:
        EVALUATE.parse([*arguments, "checkpoint=RUN"])
    except UserError as error:
        raise UserError(f"evaluate={text}: {error}") from None
    return arguments


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
    run(COMMAND, main)
