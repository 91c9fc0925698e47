"""Cost of saves and metrics in a run on this machine (one process, one GPU if there is one).

of=saves compares a run that saves in the background every `steps` / 4 steps with one that waits for each save. Blocked:
the seconds for which a save stopped training. Dip: the share of tokens/s that is lost in the steps during writing. The
checksums of the last checkpoint are verified. of=metrics alternates runs with all metrics (a record every 10 steps, one
look into attention in the measured steps) and runs with almost none. Rates are wall-clock rates over the second half of
the steps.
"""

import shutil
import statistics
from pathlib import Path
from typing import Any

from launch.benchmark import folder_of, run_stack
from launch.boot import EVERY_KEY, Command, Option, run
from ssscale.config import load_config
from ssscale.config.schema import TrainConfig
from ssscale.errors import UserError
from ssscale.model.flops import count_parameters
from ssscale.train.checkpoint_folder import list_checkpoints, verify
from ssscale.train.early import check_data
from ssscale.train.records import read_metrics

COMMAND = Command(
    about=__doc__,
    usage="python launch/costs.py of=saves|metrics config=NAME data=FOLDER [key=value ...]",
    example="python launch/costs.py of=saves config=1b_softmax data=data/pretrain",
    options=(
        Option("of", str, "what to measure", required=True, choices=("saves", "metrics")),
        Option("config", str, "the run file", required=True, metavar="NAME"),
        Option("data", str, "a packed data folder", required=True, metavar="FOLDER"),
        Option("steps", int, "steps of each run (80 for saves, 201 for metrics)", at_least=1),
        Option("accumulation", int, "microbatches per step (8 for saves, 1 for metrics)", at_least=1),
        Option("microbatch", int, "rows per microbatch", default=4, at_least=1),
        Option("repeats", int, "runs of each kind, for of=metrics", default=3, at_least=1),
        Option("folder", str, "folder of the runs", default="runs", metavar="FOLDER"),
    ),
    keys=EVERY_KEY,
)
GOAL_BLOCKED_S, GOAL_DIP, GOAL_METRICS = 0.5, 0.05, 0.01
Records = list[dict[str, Any]]


def records_of(options: dict[str, Any], accumulation: int, steps: int, keys: list[str]) -> Records:
    name = options["config"]
    if not run_stack(name, options, accumulation, steps, keys):
        raise UserError(f"the run of {name} failed: its output is above")
    return read_metrics(folder_of(name, options, accumulation) / "metrics.jsonl")


def rate(records: Records, first: int, last: int) -> float:
    """Returns tokens per second of wall-clock time between the records of two steps. Raises UserError if one is missing."""
    by_step = {record["step"]: record for record in records if "loss" in record}
    for step in (first, last):
        if step not in by_step:
            raise UserError(
                f"the run has no record of step {step} in its metrics.jsonl, so its rate cannot be computed"
            )
    begin, end = by_step[first], by_step[last]
    return (end["tokens"] - begin["tokens"]) / (end["time"] - begin["time"])


def check_run(options: dict[str, Any], extra: list[str]) -> None:
    """Raises UserError if a run of these options cannot start: for its keys, or for its data folder."""
    keys = [f"config={options['config']}", f"data.path={options['data']}", *extra]
    check_data(load_config(keys, options=COMMAND.names))


def check_room(options: dict[str, Any], folder: Path) -> None:
    """Raises UserError if two checkpoints do not fit on the disk, or one does not fit in memory."""
    import psutil

    config = load_config([f"config={options['config']}"])
    size = 12 * count_parameters(config.model, config.data.length)
    folder.mkdir(parents=True, exist_ok=True)
    disk, memory = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    for what, free, needed in ((f"on the disk of {folder}", disk, 2 * size), ("in memory", memory, 1.2 * size)):
        if free < needed:
            raise UserError(
                f"{free / 1e9:.1f} GB are free {what}, {needed / 1e9:.1f} GB are needed: try folder= or a smaller model"
            )


def measure_saves(options: dict[str, Any], extra: list[str]) -> None:
    accumulation, steps = options.get("accumulation", 8), options.get("steps", 80)
    every = steps // 4
    if every < 3:
        raise UserError(f"steps={steps} leaves no steps between saves: give 12 or more")
    check_run(options, extra)
    check_room(options, Path(options["folder"]))
    print("| save | blocked s | written s | GB | dip in tokens/s | tokens/s over two saves |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    background: Records = []
    for key, words in (("true", "background"), ("false", "blocking")):
        keys = [f"train.save_background={key}", f"train.save_every={every}", "train.observe_every=0", "train.keep=1"]
        records = records_of(options, accumulation, steps, [*extra, *keys])
        folder = folder_of(options["config"], options, accumulation)
        saved = list_checkpoints(folder / "checkpoints")
        if not saved:
            raise UserError(f"{folder} has no checkpoint, although train.save_every={every}")
        problem = verify(saved[-1])
        if problem is not None:
            raise UserError(problem)
        shutil.rmtree(folder / "checkpoints")
        saves = [record for record in records if "saved_step" in record][:3]  # no steps follow the last one
        over_all = rate(records, every, 3 * every)
        background += saves if words == "background" else []
        for save in saves:
            dip = "–" if save["save_dip"] is None else f"{save['save_dip']:.3f}"
            cells = (
                f"{save['save_blocked_s']:.2f}",
                f"{save['save_written_s']:.1f}",
                f"{save['save_bytes'] / 1e9:.2f}",
                dip,
            )
            print(f"| {words}, step {save['saved_step']} | {' | '.join(cells)} | {over_all:,.0f} |", flush=True)
    blocked = statistics.median(save["save_blocked_s"] for save in background)
    print(f"blocked, median: {blocked:.2f} s ({verdict(blocked, GOAL_BLOCKED_S, 's')})")
    dips = [save["save_dip"] for save in background if save["save_dip"] is not None]
    if dips:
        dip = statistics.median(dips)
        print(f"dip, median: {dip:.1%} ({verdict(100 * dip, 100 * GOAL_DIP, '%')})")


def measure_metrics(options: dict[str, Any], extra: list[str]) -> None:
    accumulation, steps = options.get("accumulation", 1), options.get("steps", 201)
    half = (steps - 1) // 2
    if half < 2:
        raise UserError(f"steps={steps} leaves too few steps to compare: give 5 or more")
    check_run(options, extra)
    rates: dict[str, list[float]] = {"all": [], "none": []}
    looks: list[float] = []
    for _ in range(options["repeats"]):
        for which, found in rates.items():
            keys = [f"train.log_every={max(half // 10, 1)}", f"train.observe_every={half}"]
            if which == "none":
                keys = [f"train.log_every={half}", "train.observe_every=0", "train.spike_z=0", "train.watchdog=0"]
            records = records_of(options, accumulation, 2 * half + 1, [*extra, *keys])
            found.append(rate(records, half, 2 * half))
            print(f"# metrics {which}: {found[-1]:,.0f} tokens/s", flush=True)
            looks += [record["seconds/observe"] for record in records if "seconds/observe" in record]
    every, none = (statistics.median(found) for found in rates.values())
    print("| metrics | tokens/s, each run | median |\n|---|---|---|")
    for which, found in rates.items():
        print(f"| {which} | {', '.join(f'{value:,.0f}' for value in found)} | {statistics.median(found):,.0f} |")
    cost = 1 - every / none
    goal = verdict(100 * cost, 100 * GOAL_METRICS, "%")
    print(f"all metrics cost {cost:.2%} of tokens/s with a look every {half} steps ({goal})")
    if looks:
        look, usual = statistics.median(looks), TrainConfig().observe_every
        share = look * none / (usual * records[-1]["tokens"] / records[-1]["step"])
        print(f"a look takes {look:.2f} s: {share:.2%} of the time every {usual} steps")


def verdict(value: float, goal: float, unit: str) -> str:
    return f"goal {goal:g} {unit}: {'met' if value <= goal else 'missed'}"


def main(argv: list[str]) -> None:
    options, extra = COMMAND.parse(argv)
    measures = {"saves": measure_saves, "metrics": measure_metrics}
    measures[options["of"]](options, extra)


if __name__ == "__main__":
    run(COMMAND, main)
