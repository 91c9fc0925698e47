"""Submit a training job:   python slurm/submit.py config=3b_sb nodes=16 [gpus=8] [time=24:00:00] [key=value ...] [--dry-run]

nodes, gpus          nodes (1) and GPUs per node (8), one rank each; gpus=0: one rank per node, on CPUs
time, partition, account                    as Slurm takes them
cpus                 CPUs per rank (the rank's share of the node)
mem, exclusive       memory per node, and whether no other job shares the nodes (true, and all memory, for whole nodes)
early                seconds between the early signal and the time limit (300)
interface            network interface between the nodes, for NCCL and gloo
env                  a file sourced in place of slurm/env.sh
srun, sbatch         further flags, as one text: srun="--container-image=IMAGE"
evaluate             tasks for a job that follows the training, or arguments of launch/evaluate.py as one text:
                     evaluate="suite=stickbreaking_paper eval_data=DATA"
evaluate_jobs        jobs that share these (1)
evaluate_gpus, evaluate_time, evaluate_cpus, evaluate_mem, evaluate_exclusive       of each of them (1 GPU)

Every other key=value goes to launch/pretrain.py. --dry-run prints the commands and the script.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.cli import run, take_options
from slurm.environment import check_environment, split_flags
from slurm.nodes import Node, Request, nodes_of, sbatch_flags
from ssscale.config import load_config, validate
from ssscale.errors import UserError
from ssscale.schema import Config

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {
    "nodes": int,
    "gpus": int,
    "time": str,
    "partition": str,
    "account": str,
    "cpus": int,
    "mem": str,
    "exclusive": str,
    "early": int,
    "interface": str,
    "env": str,
    "srun": str,
    "sbatch": str,
    "evaluate": str,
    "evaluate_jobs": int,
    "evaluate_gpus": int,
    "evaluate_time": str,
    "evaluate_cpus": int,
    "evaluate_mem": str,
    "evaluate_exclusive": str,
}
Options = dict[str, Any]


def main(argv: list[str]) -> None:
    environment = dict(os.environ)  # of the jobs: importing torch adds to it
    dry = "--dry-run" in argv
    options, arguments = take_options([text for text in argv if text != "--dry-run"], OPTIONS)
    check_numbers(options)
    nodes, gpus = options.get("nodes", 1), options.get("gpus", 8)
    config = load_config(arguments, options=OPTIONS)
    check_world(config, options, arguments)
    if config.data.cache is None and any("://" in path for path in data_paths(config)):
        arguments.append("data.cache=auto")
    folder = Path(config.folder)
    kinds = nodes_of(options.get("partition"))
    train = training_command(config, folder, options, arguments, kinds)
    after = evaluation_command(folder, options, kinds)
    env_file = Path(options["env"]).resolve() if "env" in options else None
    check_environment(ROOT, env_file, container=bool(options.get("srun")))
    from ssscale.train.run_folder import check_folder  # here, as it imports torch: other mistakes are said at once

    check_folder(folder, config)
    if not kinds:
        print("sinfo does not answer here: CPUs, memory and exclusive use are left to Slurm", file=sys.stderr)
    if dry:
        print(shlex.join(train))
        if after:
            print(shlex.join(after).replace("{job}", "JOB"))
        print((ROOT / "slurm/pretrain.sbatch").read_text(), end="")
        return
    submit([train[0], "--test-only", *train[1:]], environment)  # else a job that can never start would wait forever
    if after:  # before the training is queued, and without its number
        submit(
            [after[0], "--test-only", *(text for text in after[1:] if not text.startswith("--dependency="))],
            environment,
        )
    folder.mkdir(parents=True, exist_ok=True)
    job = submit(train, environment)
    record(folder, job, train, env_file)
    print(f"job {job} on {nodes} × {max(gpus, 1)} ranks, log {folder / f'slurm-{job}.log'}")
    if after:
        follower = submit([text.replace("{job}", job) for text in after], environment)
        print(f"job {follower} evaluates when it has finished")


def check_numbers(options: Options) -> None:
    nodes, gpus, jobs = options.get("nodes", 1), options.get("gpus", 8), options.get("evaluate_jobs", 1)
    if nodes < 1 or gpus < 0:
        raise UserError(f"nodes must be at least 1 and gpus 0 or more, not nodes={nodes} gpus={gpus}")
    for key in ("cpus", "early", "evaluate_cpus"):
        if options.get(key, 1) < 1:
            raise UserError(f"{key} must be at least 1, not {options[key]}")
    if options.get("evaluate_gpus", 0) < 0:
        raise UserError(f"evaluate_gpus must be 0 or more, not {options['evaluate_gpus']}")
    for key in options:
        if key.startswith("evaluate_") and "evaluate" not in options and key != "evaluate_jobs":
            raise UserError(f"{key}={options[key]} is of the job that evaluate= adds: name its tasks there")
    if jobs < 1 or (jobs > 1 and "evaluate" not in options):
        raise UserError(f"evaluate_jobs={jobs}: a number from 1 on of the jobs that do what evaluate= names")


def check_world(config: Config, options: Options, arguments: list[str]) -> None:
    """Validate the run on its ranks. Raises UserError, with a command that works where only their number is in the way."""
    nodes, gpus = options.get("nodes", 1), options.get("gpus", 8)

    def problem(count: int) -> UserError | None:
        try:
            validate(config, world_size=count * max(gpus, 1), gpu=gpus > 0)
        except UserError as error:
            return error
        return None

    error = problem(nodes)
    if error is None:
        return
    validate(config, gpu=gpus > 0)
    near = sorted(range(1, 2 * nodes), key=lambda count: abs(count - nodes))
    works = next((count for count in near if problem(count) is None), None)
    if works is None:
        raise error
    given = [f"{key}={value}" for key, value in (options | {"nodes": works}).items()]
    raise UserError(f"{error}; or: {shlex.join(['python', 'slurm/submit.py', *arguments, *given])}")


def data_paths(config: Config) -> list[str]:
    return [config.data.path, *(stage.data_path for stage in config.train.stages if stage.data_path)]


def flag(options: Options, key: str) -> bool | None:
    """true or false; None where it is not given."""
    text = options.get(key)
    if text not in (None, "true", "false"):
        raise UserError(f"{key} must be true or false, not {text!r}")
    return None if text is None else text == "true"


def shared_flags(options: Options) -> list[str]:
    """Of sbatch, for the training and what follows it."""
    flags = [f"--{key}={options[key]}" for key in ("partition", "account") if key in options]
    return [*flags, "--parsable", f"--chdir={ROOT}", *split_flags("sbatch", options.get("sbatch", ""))]


def script_options(options: Options) -> list[str]:
    """Of slurm/setup.sh."""
    split_flags("srun", options.get("srun", ""))
    given = [f"{key}={options[key]}" for key in ("interface", "srun") if key in options]
    return [*given, *([f"env={Path(options['env']).resolve()}"] if "env" in options else [])]


def training_command(
    config: Config, folder: Path, options: Options, arguments: list[str], kinds: list[Node]
) -> list[str]:
    nodes, gpus = options.get("nodes", 1), options.get("gpus", 8)
    tasks = max(gpus, 1)
    request = Request(gpus, tasks, options.get("cpus"), options.get("mem"), flag(options, "exclusive"))
    command = ["sbatch", *shared_flags(options), f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    command += [f"--output={folder / 'slurm-%j.log'}"]
    command += [f"--gpus-per-node={gpus}"] if gpus else []
    command += sbatch_flags(request, kinds)
    command += [f"--time={options['time']}"] if "time" in options else []
    command += [f"--signal=B:USR1@{options['early']}"] if "early" in options else []
    command += [f"--job-name={config.name}", "slurm/pretrain.sbatch", *script_options(options)]
    return [*command, *arguments]


def evaluation_command(folder: Path, options: Options, kinds: list[Node]) -> list[str]:
    """Empty where nothing is to be evaluated; `{job}` stands for the training's number."""
    if "evaluate" not in options:
        return []
    gpus, jobs = options.get("evaluate_gpus", min(options.get("gpus", 8), 1)), options.get("evaluate_jobs", 1)
    tasks = max(gpus, 1)
    exclusive = flag(options, "evaluate_exclusive")
    request = Request(
        gpus, tasks, options.get("evaluate_cpus"), options.get("evaluate_mem"), exclusive, prefix="evaluate_"
    )
    log = "slurm-evaluate-%A_%a.log" if jobs > 1 else "slurm-evaluate-%j.log"
    command = ["sbatch", *shared_flags(options), "--kill-on-invalid-dep=yes", f"--output={folder / log}"]
    command += [f"--gpus-per-node={gpus}"] if gpus else []
    command += [f"--ntasks={tasks}"] if tasks > 1 else []
    command += sbatch_flags(request, kinds)
    command += [f"--time={options['evaluate_time']}"] if "evaluate_time" in options else []
    command += [f"--array=0-{jobs - 1}"] if jobs > 1 else []
    command += ["--dependency=afterok:{job}", "slurm/evaluate.sbatch", *script_options(options)]
    return [*command, f"checkpoint={folder}", *evaluation(options["evaluate"])]


def evaluation(text: str) -> list[str]:
    """launch/evaluate.py's arguments, from them or from tasks alone. Raises UserError, now rather than after the training."""
    if "=" not in text:
        return [f"tasks={text}"]
    from launch.evaluate import CHANGEABLE
    from launch.evaluate import OPTIONS as EVALUATE_OPTIONS

    arguments = split_flags("evaluate", text)
    _, rest = take_options(arguments, EVALUATE_OPTIONS)
    unknown = [argument for argument in rest if not argument.startswith(CHANGEABLE)]
    if unknown:
        raise UserError(f"evaluate={text}: launch/evaluate.py takes no {unknown[0]!r}")
    return arguments


def submit(command: list[str], environment: dict[str, str]) -> str:
    """The job's number. Raises UserError with what Slurm says."""
    try:
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError("there is no sbatch on this machine: submit from a login node of the cluster") from error
    if result.returncode:
        raise UserError(f"Slurm refuses the job: {' '.join(result.stderr.split()) or result.stdout.strip()}")
    return result.stdout.strip().split(";")[0]


def record(folder: Path, job: str, command: list[str], env_file: Path | None) -> None:
    """The commit, the command and which environment it was, with the run."""

    def git(*arguments: str) -> str | None:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return None if result.returncode else result.stdout.strip()

    state: dict[str, Any] = {"job": job, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "command": shlex.join(command)}
    state |= {"commit": git("rev-parse", "HEAD"), "changed": git("status", "--porcelain", "--untracked-files=no")}
    file = env_file or ROOT / "slurm/env.sh"
    if file.is_file():  # not its text, where keys may stand
        state["env"] = {"file": str(file), "sha256": sha256(file.read_bytes()).hexdigest()}
    (folder / f"slurm-{job}.json").write_text(json.dumps(state, indent=1) + "\n")


if __name__ == "__main__":
    run(main, __doc__)
