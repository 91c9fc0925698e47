"""Shows that `train.deterministic=true` gives the same bits in two runs, one of which is killed and resumed.

For each run file and layout, one run trains all steps. Another one is killed (SIGKILL to all of its processes) after step
`kill` and started again with the same command, which continues from the save before. SHA-256 of all weights and of all
states of the optimizer in both last checkpoints must be equal, and so must all losses. The layouts are one process and,
with two GPUs or `processes=2`, tensor and data parallelism over two ranks (TP2 and DP2), both also with exchanges by copy
engines (TP2_copies, with validations, and DP2_copies). `at_once` of these runs share the GPUs. docs/results/options.md has what
the option costs, by launch/benchmark.py.

The command prints a table and writes FOLDER/results.json. Its exit code is 1 if anything differs.
"""

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from eval.checkpoint.command import sentences, write
from eval.checkpoint.gpus import visible_gpus
from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.launcher import LAUNCHER
from ssscale.options import EVERY_KEY, Command, Option, last_of_each
from ssscale.train.checkpoint_folder import list_checkpoints, step_of
from ssscale.train.records import read_metrics

ROOT = Path(__file__).resolve().parents[2]
BEFORE = 5  # steps from the save that the killed run continues from to the kill
POLL_S = 0.005
COMPARED = ("weights", "states", "losses")
COMMAND = Command(
    about=__doc__,
    usage="python -m eval.benchmarks.deterministic data=FOLDER [key=value ...]",
    example="python -m eval.benchmarks.deterministic data=data/study gpus=2",
    options=(
        Option("data", str, "a packed data folder", required=True, metavar="FOLDER"),
        Option("configs", str, "run files", default="162m_softmax,162m_ssmax,162m_sb", metavar="NAME,..."),
        Option(
            "layouts",
            str,
            "some of one, TP2, DP2, TP2_copies and DP2_copies (all that the ranks allow)",
            metavar="NAME,...",
        ),
        Option("gpus", int, "GPUs to use (all of this machine, at most 2)", at_least=1, at_most=2),
        Option("processes", int, "ranks of a run on a CPU", default=1, at_least=1, at_most=2),
        Option("steps", int, "steps of each run", default=50, at_least=2),
        Option("kill", int, "step after which a run is killed (half of the steps)", at_least=2),
        Option("rows", int, "rows per step", default=32, at_least=1),
        Option("microbatch", int, "rows per microbatch of a rank", default=8, at_least=1),
        Option("at_once", int, "runs at the same time (on GPUs 9, else 1)", at_least=1),
        Option("folder", str, "folder of the runs, their output and the result", default="runs/deterministic"),
    ),
    keys=EVERY_KEY,
)


class Layout(NamedTuple):
    name: str
    ranks: int
    keys: tuple[str, ...] = ()


COPIES = "parallel.copy_engines=true"
WHOLE = ("train.compile_exchanges=true", "parallel.keep_gathered=true", "train.eval_every=10")
LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one", 1),
        Layout("TP2", 2, ("parallel.tensor=2",)),
        Layout("DP2", 2),
        Layout("TP2_copies", 2, ("parallel.tensor=2", *WHOLE, COPIES)),
        Layout("DP2_copies", 2, ("parallel.overlap=true", COPIES)),
    )
}


class Job(NamedTuple):
    """A run. kill_after: the step after which it is killed and resumed; 0: never."""

    config: str
    layout: Layout
    name: str
    kill_after: int = 0


class Found(NamedTuple):
    """weights, states: SHA-256. killed, resumed: the steps seen at the kill and continued from; 0: not killed.

    error: why the run failed; the rest is then empty.
    """

    weights: str = ""
    states: str = ""
    losses: tuple[float, ...] = ()
    killed: int = 0
    resumed: int = 0
    error: str = ""


def digests(checkpoint: Path) -> tuple[str, str]:
    """Returns SHA-256 of all weights and of all states of the optimizer in a checkpoint, with their names and ranks."""
    import torch
    from safetensors import safe_open

    weights, states = hashlib.sha256(), hashlib.sha256()
    for file in sorted(checkpoint.glob("rank-*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in sorted(tensors.keys()):
                if key.startswith("rng/"):
                    continue
                digest = weights if key.startswith("weight/") else states
                tensor = tensors.get_tensor(key)
                digest.update(f"{file.name} {key} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy())
    return weights.hexdigest(), states.hexdigest()


class Runner:
    """Starts runs of launch/pretrain.py. gpus: names of the GPUs that are used; empty on a CPU."""

    def __init__(self, options: dict[str, Any], keys: list[str], gpus: list[str]) -> None:
        self.options, self.keys, self.gpus = options, keys, gpus
        self.folder = Path(options["folder"])

    def command(self, job: Job, save_every: int) -> list[str]:
        options = self.options
        stages = len(load_config([f"config={job.config}"]).train.stages)
        keys: dict[str, Any] = {
            "config": job.config,
            "data.path": options["data"],
            "run_dir": self.folder / job.name,
            "train.deterministic": "true",
            "train.batch_size": options["rows"],
            "train.microbatch": options["microbatch"],
            "train.max_steps": options["steps"],
            "train.save_every": save_every,
            "train.save_background": "false",
            "train.keep": 1,
            "train.log_every": 1,
            "train.eval_every": 0,
            "train.observe_every": 0,
        } | {f"train.stages.{stage}.mix": "null" for stage in range(stages)}
        if job.layout.ranks > 1:
            keys["gpus" if self.gpus else "processes"] = job.layout.ranks
        own = [f"{key}={value}" for key, value in keys.items()]
        return [sys.executable, "launch/pretrain.py", *last_of_each([*own, *self.keys, *job.layout.keys])]

    def start(self, job: Job, save_every: int, gpus: Sequence[str]) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{job.name}.log", "ab") as log:
            return subprocess.Popen(
                self.command(job, save_every),
                cwd=ROOT,
                env=os.environ
                | {LAUNCHER: str(os.getpid())}
                | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, job: Job, gpus: Sequence[str]) -> Found:
        """Trains, and deletes the run folder. Raises UserError with the end of the log if the run fails."""
        run_dir, steps = self.folder / job.name, self.options["steps"]
        shutil.rmtree(run_dir, ignore_errors=True)
        (self.folder / f"{job.name}.log").unlink(missing_ok=True)
        killed = resumed = 0
        began = time.perf_counter()
        if job.kill_after:
            process = self.start(job, max(1, job.kill_after - BEFORE), gpus)
            killed = self._kill(process, job)
            saves = list_checkpoints(run_dir / "checkpoints")
            if not saves:
                raise UserError(f"{job.name}: no checkpoint was saved before the kill: give a later kill=")
            resumed = step_of(saves[-1])
        if self.start(job, steps, gpus).wait():
            raise UserError(f"{job.name} failed: {self._end(job)}")
        records = [record for record in read_metrics(run_dir / "metrics.jsonl") if "loss" in record]
        weights, states = digests(list_checkpoints(run_dir / "checkpoints")[-1])
        shutil.rmtree(run_dir)
        print(f"# {job.name}: {time.perf_counter() - began:.0f} s", flush=True)
        losses = tuple(record["loss"] for record in records)
        return Found(weights, states, losses, killed, resumed)

    def _kill(self, process: "subprocess.Popen[bytes]", job: Job) -> int:
        """Kills all processes of a run after its step `kill_after`. Returns the last step that was seen."""
        metrics = self.folder / job.name / "metrics.jsonl"
        while True:
            step = max((record["step"] for record in read_metrics(metrics) if "loss" in record), default=0)
            if process.poll() is not None:
                why = "ended before it could be killed: give more steps=" if process.returncode == 0 else "failed: "
                raise UserError(f"{job.name} {why}{self._end(job) if process.returncode else ''}")
            if step >= job.kill_after:
                break
            time.sleep(POLL_S)
        parent = psutil.Process(process.pid)
        for victim in [parent, *parent.children(recursive=True)]:
            victim.kill()
        process.wait()
        return step

    def _end(self, job: Job) -> str:
        lines = (self.folder / f"{job.name}.log").read_text(errors="replace").splitlines()
        said = [line for line in lines if line.startswith(("error: ", "stopped: ", "failed: "))]
        return " ".join(said[:1] or lines[-5:])


def jobs_of(configs: list[str], layouts: list[Layout], kill: int) -> list[Job]:
    """Returns two runs per run file and layout, the longest first."""
    found = []
    for layout in sorted(layouts, key=lambda layout: -layout.ranks):
        for step, said in ((kill, "killed"), (0, "whole")):
            found += [Job(config, layout, f"{config}_{layout.name}_{said}", step) for config in configs]
    return found


def run_all(runner: Runner, jobs: list[Job], at_once: int) -> dict[Job, Found]:
    """Runs `at_once` jobs at the same time. Those of one rank take turns on the GPUs."""
    turns = itertools.cycle(runner.gpus)
    places = {job: [next(turns)] if runner.gpus and job.layout.ranks == 1 else runner.gpus for job in jobs}

    def run(job: Job) -> Found:
        try:
            return runner.run(job, places[job])
        except UserError as error:
            print(f"# {error}", flush=True)
            return Found(error=str(error))

    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(jobs, pool.map(run, jobs), strict=True))


def compared(found: dict[Job, Found], configs: list[str], layouts: list[Layout]) -> list[dict[str, Any]]:
    """Returns a record per run file and layout."""
    named = {job.name: result for job, result in found.items()}
    records = []
    for config in configs:
        for layout in layouts:
            whole, killed = (named[f"{config}_{layout.name}_{said}"] for said in ("whole", "killed"))
            record: dict[str, Any] = {"config": config, "layout": layout.name, "error": whole.error or killed.error}
            record |= {"killed_after": killed.killed, "resumed_from": killed.resumed}
            for what in COMPARED:
                same = getattr(whole, what) == getattr(killed, what)
                record[f"{what}_equal"] = same and not record["error"]
            record |= {"weights": [whole.weights, killed.weights], "states": [whole.states, killed.states]}
            records.append(record | {"last_losses": [whole.losses[-1:], killed.losses[-1:]]})
    return records


def show(records: list[dict[str, Any]]) -> None:
    print("| run file | layout | killed after | resumed from | weights | states | losses | SHA-256 of the weights |")
    print("|---|---|---|---|---|---|---|---|")
    for record in records:
        cells = [record[key] for key in ("config", "layout", "killed_after", "resumed_from")]
        differ = "failed" if record["error"] else "DIFFER"
        cells += ["equal" if record[f"{what}_equal"] else differ for what in COMPARED]
        print("| " + " | ".join(map(str, [*cells, record["weights"][0][:16]])) + " |")


def chosen_layouts(options: dict[str, Any], ranks: int) -> list[Layout]:
    """Raises UserError for an unknown layout, and for one that needs more ranks than there are."""
    if "layouts" not in options:
        return [layout for layout in LAYOUTS.values() if layout.ranks <= ranks]
    names = options["layouts"].split(",")
    for name in names:
        if name not in LAYOUTS:
            raise UserError(f"layouts={name}: use {', '.join(LAYOUTS)}")
        if LAYOUTS[name].ranks > ranks:
            raise UserError(f"layouts={name} needs two ranks: two GPUs, or processes=2 on a CPU")
    return [LAYOUTS[name] for name in names]


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    options, keys = COMMAND.parse(argv)
    import torch  # it takes seconds, and --help needs none of it

    here = torch.cuda.device_count()
    gpus = visible_gpus()[: min(options.get("gpus", 2), here)]
    if options.get("gpus", 0) > here:
        raise UserError(f"gpus={options['gpus']}: this machine has {here}; processes=2 runs two ranks on its CPU")
    configs = options["configs"].split(",")
    layouts = chosen_layouts(options, len(gpus) or options["processes"])
    kill = options.get("kill", max(2, options["steps"] // 2))
    if kill >= options["steps"]:
        raise UserError(f"kill={kill} must be below steps={options['steps']}")
    if not (Path(options["data"]) / "manifest.json").is_file():
        raise UserError(f"data={options['data']} is not a data folder; python -m data_prep pack makes one")
    for config in configs:
        load_config([f"config={config}", *keys], options=COMMAND.names)
    options["data"] = str(Path(options["data"]).resolve())
    options["folder"] = str(Path(options["folder"]).resolve())
    runner = Runner(options, keys, gpus)
    runner.folder.mkdir(parents=True, exist_ok=True)
    at_once = options.get("at_once", 9 if gpus else 1)
    records = compared(run_all(runner, jobs_of(configs, layouts, kill), at_once), configs, layouts)
    show(records)
    device = torch.cuda.get_device_name(0) if gpus else "CPU"
    settings = {key: options[key] for key in ("steps", "rows", "microbatch")} | {"kill": kill, "keys": keys}
    result = {"device": device, "torch": torch.__version__} | settings | {"runs": records}
    write(runner.folder / "results.json", json.loads(json.dumps(result)), indent=1)
    equal = all(record[f"{what}_equal"] for record in records for what in COMPARED)
    return 0 if equal else 1


if __name__ == "__main__":
    with sentences(COMMAND):
        sys.exit(main(sys.argv[1:]))
