"""Submit a training job. All key=value arguments that are not options of this command go to launch/pretrain.py."""

import json
import os
import shlex
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from launch.boot import EVERY_KEY, ROOT, Command, Option, run
from slurm.environment import check_environment, split_flags
from slurm.nodes import Node, Request, nodes_of, sbatch_flags
from slurm.times import check_times
from ssscale.config import load_config
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.validate import validate

COMMAND = Command(
    about=__doc__,
    usage="python slurm/submit.py config=NAME [nodes=N] [gpus=N] [time=LIMIT] [key=value ...] [--dry-run]",
    example="python slurm/submit.py config=3b_sb nodes=16 time=24:00:00 evaluate=cloze",
    options=(
        Option("nodes", int, "number of nodes", default=1, at_least=1),
        Option("gpus", int, "GPUs per node, one rank each; 0: one rank per node, on CPUs", default=8, at_least=0),
        Option("time", str, "the job's time limit", metavar="24:00:00"),
        Option("partition", str, "partition of the cluster", metavar="NAME"),
        Option("account", str, "account on the cluster", metavar="NAME"),
        Option("cpus", int, "CPUs per rank (the rank's share of the node)", at_least=1),
        Option("mem", str, "memory per node (all of it for whole nodes)", metavar="SIZE"),
        Option("exclusive", bool, "use the nodes alone (true for whole nodes)"),
        Option("early", int, "seconds between the early signal and the time limit (300)", at_least=1),
        Option("interface", str, "network interface between the nodes, for NCCL and gloo", metavar="NAME"),
        Option("env", str, "a file to source instead of slurm/env.sh", metavar="FILE"),
        Option("srun", str, 'further flags of srun, as one text: srun="--container-image=IMAGE"'),
        Option("sbatch", str, "further flags of sbatch, as one text"),
        Option(
            "evaluate",
            str,
            "tasks for a job that follows the training, or arguments of launch/evaluate.py as one text: "
            'evaluate="suite=stickbreaking_paper eval_data=DATA"',
            metavar="TASKS",
        ),
        Option("evaluate_jobs", int, "jobs that share these tasks (1)", at_least=1),
        Option("evaluate_gpus", int, "GPUs of each of them (1)", at_least=0),
        Option("evaluate_time", str, "time limit of each of them", metavar="LIMIT"),
        Option("evaluate_cpus", int, "CPUs per rank of each of them", at_least=1),
        Option("evaluate_mem", str, "memory per node of each of them", metavar="SIZE"),
        Option("evaluate_exclusive", bool, "use the nodes of these jobs alone"),
        Option("--dry-run", bool, "print the commands and the script, and submit nothing"),
    ),
    keys=EVERY_KEY,
)
Options = dict[str, Any]


def main(argv: list[str]) -> None:
    environment = dict(os.environ)  # for the jobs; importing torch would add to it
    options, arguments = COMMAND.parse(argv)
    if Path.cwd().resolve() != ROOT.resolve():
        raise UserError(f"submit from {ROOT}: jobs run there, and files have their names from there")
    check_options(options)
    nodes, gpus = options["nodes"], options["gpus"]
    config = load_config(arguments, options=COMMAND.names)
    check_world(config, options, arguments)
    if config.data.cache is None and any("://" in path for path in data_paths(config)):
        arguments.append("data.cache=auto")
    folder = Path(config.folder)
    kinds = nodes_of(options.get("partition"))
    train = training_command(config, folder, options, arguments, kinds)
    after = evaluation_command(folder, options, kinds)
    env_file = Path(options["env"]).resolve() if "env" in options else None
    check_environment(ROOT, env_file, container=bool(options.get("srun")))
    from ssscale.train.run_folder import check_folder  # imports torch, so after other mistakes are reported

    check_folder(folder, config)
    if "--dry-run" in options:
        note_kinds(kinds)
        print(shlex.join(train))
        if after:
            print(shlex.join(after).replace("{job}", "JOB"))
        print((ROOT / "slurm/pretrain.sbatch").read_text(), end="")
        return
    submit([train[0], "--test-only", *train[1:]], environment)  # a job that can never start would wait forever
    if after:  # checked before the training is queued, so without its number
        submit(
            [after[0], "--test-only", *(text for text in after[1:] if not text.startswith("--dependency="))],
            environment,
        )
    note_kinds(kinds)
    folder.mkdir(parents=True, exist_ok=True)
    job = submit(train, environment)
    record(folder, job, train, env_file)
    print(f"job {job} on {nodes} × {max(gpus, 1)} ranks, log {folder / f'slurm-{job}.log'}")
    if after:
        follower = submit([text.replace("{job}", job) for text in after], environment)
        print(f"job {follower} evaluates when it has finished")


def check_options(options: Options) -> None:
    for key in options:
        if key.startswith("evaluate_") and "evaluate" not in options:
            raise UserError(f"{key}={options[key]} is of the job that evaluate= adds: name its tasks there")
    for key in ("partition", "account", "mem", "interface", "env", "evaluate", "evaluate_mem"):
        if options.get(key) == "":
            raise UserError(f"{key}= is empty: give it a value or leave it out")
    check_times(options.get("time"), options.get("early"), options.get("evaluate_time"))


def note_kinds(kinds: list[Node]) -> None:
    if not kinds:
        print("sinfo does not answer here: CPUs, memory and exclusive use are left to Slurm", file=sys.stderr)


def log(folder: Path, name: str) -> str:
    """Returns the flag of sbatch for a log in the folder, in whose name % stands for itself."""
    return f"--output={str(folder).replace('%', '%%')}/{name}"


def check_world(config: Config, options: Options, arguments: list[str]) -> None:
    """Validates the run for its ranks. Raises UserError, with a command that works if another number of nodes does."""
    nodes, gpus = options["nodes"], options["gpus"]

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
    near = sorted(range(max(1, nodes - 1024), nodes + 1024), key=lambda count: abs(count - nodes))
    works = next((count for count in near if problem(count) is None), None)
    if works is None:
        raise error
    given = [f"{key}={value}" for key, value in (options | {"nodes": works}).items() if key != "--dry-run"]
    raise UserError(f"{error}; or: {shlex.join(['python', 'slurm/submit.py', *arguments, *given])}")


def data_paths(config: Config) -> list[str]:
    return [config.data.path, *(stage.data_path for stage in config.train.stages if stage.data_path)]


def shared_flags(options: Options) -> list[str]:
    """Returns the flags of sbatch for the training and for the evaluation after it."""
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
    nodes, gpus = options["nodes"], options["gpus"]
    tasks = max(gpus, 1)
    request = Request(gpus, tasks, options.get("cpus"), options.get("mem"), options.get("exclusive"))
    command = ["sbatch", *shared_flags(options), f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
    command += [log(folder, "slurm-%j.log")]
    command += [f"--gpus-per-node={gpus}"] if gpus else []
    command += sbatch_flags(request, kinds)
    command += [f"--time={options['time']}"] if "time" in options else []
    command += [f"--signal=B:USR1@{options['early']}"] if "early" in options else []
    command += [f"--job-name={config.name}", "slurm/pretrain.sbatch", *script_options(options)]
    return [*command, *arguments]


def evaluation_command(folder: Path, options: Options, kinds: list[Node]) -> list[str]:
    """Returns the command of the evaluation job, or []. `{job}` stands for the number of the training job."""
    if "evaluate" not in options:
        return []
    gpus, jobs = options.get("evaluate_gpus", min(options["gpus"], 1)), options.get("evaluate_jobs", 1)
    tasks = max(gpus, 1)
    exclusive = options.get("evaluate_exclusive")
    request = Request(
        gpus, tasks, options.get("evaluate_cpus"), options.get("evaluate_mem"), exclusive, prefix="evaluate_"
    )
    name = "slurm-evaluate-%A_%a.log" if jobs > 1 else "slurm-evaluate-%j.log"
    command = ["sbatch", *shared_flags(options), "--kill-on-invalid-dep=yes", log(folder, name)]
    command += [f"--gpus-per-node={gpus}"] if gpus else []
    command += [f"--ntasks={tasks}"] if tasks > 1 else []
    command += sbatch_flags(request, kinds)
    command += [f"--time={options['evaluate_time']}"] if "evaluate_time" in options else []
    command += [f"--array=0-{jobs - 1}"] if jobs > 1 else []
    command += ["--dependency=afterok:{job}", "slurm/evaluate.sbatch", *script_options(options)]
    return [*command, f"checkpoint={folder}", *evaluation(options["evaluate"])]


def evaluation(text: str) -> list[str]:
    """Returns the arguments of launch/evaluate.py for `evaluate=`, which may name tasks only.

    Raises UserError for wrong arguments, so that they are reported before the training.
    """
    from eval.checkpoint.task_names import check_names
    from launch.evaluate import COMMAND as EVALUATE
    from launch.evaluate import settings_of

    arguments = split_flags("evaluate", text) if "=" in text else [f"tasks={text}"]
    if any(argument.startswith("checkpoint=") for argument in arguments):
        raise UserError(f"evaluate={text}: checkpoint= is the run that this command trains: leave it out")
    try:
        settings = settings_of(*EVALUATE.parse([*arguments, "checkpoint=RUN"]))
        if not settings.include:  # which may be made on the nodes, as the data
            check_names([name for name in settings.names if not name.endswith((".yaml", ".yml"))])
    except UserError as error:
        raise UserError(f"evaluate={text}: {error}") from None
    return arguments


def submit(command: list[str], environment: dict[str, str]) -> str:
    """Submits a job and returns its number. Raises UserError with the message of Slurm."""
    try:
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError("there is no sbatch on this machine: submit from a login node of the cluster") from error
    if result.returncode:
        raise UserError(f"Slurm refuses the job: {' '.join(result.stderr.split()) or result.stdout.strip()}")
    return result.stdout.strip().split(";")[0]


def record(folder: Path, job: str, command: list[str], env_file: Path | None) -> None:
    """Writes the commit, the command and the hash of the environment file to the run folder."""

    def git(*arguments: str) -> str | None:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return None if result.returncode else result.stdout.strip()

    state: dict[str, Any] = {"job": job, "time": time.strftime("%Y-%m-%dT%H:%M:%S"), "command": shlex.join(command)}
    state |= {"commit": git("rev-parse", "HEAD"), "changed": git("status", "--porcelain", "--untracked-files=no")}
    file = env_file or ROOT / "slurm/env.sh"
    if file.is_file():  # not its text, which may contain secret keys
        state["env"] = {"file": str(file), "sha256": sha256(file.read_bytes()).hexdigest()}
    (folder / f"slurm-{job}.json").write_text(json.dumps(state, indent=1) + "\n")


if __name__ == "__main__":
    run(COMMAND, main)
