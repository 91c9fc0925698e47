"""The trainings behind Figures 3 and 4. Each has one result file per core, and a later call continues with what is missing."""

import argparse

from eval.checkpoint.command import whole_numbers
from eval.papers.mqrar.picture import write_picture
from eval.papers.mqrar.recipe import Deadline, Recipe
from eval.papers.mqrar.task import Task
from eval.papers.mqrar.train import Experiment, model_config
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups

LETTERS = Task(pairs=16, length=64, num_keys=26, num_values=10)


def cores(text: str) -> list[str]:
    """Parse --cores. Raises UserError for an unknown core."""
    known = ("softmax", "stickbreaking")
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise UserError(f"--cores: {unknown[0]!r} is not one of {', '.join(known)}")
    return text.split(",")


def curve(arguments: argparse.Namespace, recipe: Recipe, groups: Groups, until: Deadline) -> bool:
    """Train for the points of Figure 3 that have no result yet. Returns whether all points have one now."""
    for pairs in whole_numbers(arguments.pairs, "--pairs"):
        task = Task(pairs, arguments.length, arguments.keys, arguments.values)
        for core in cores(arguments.cores):
            file = arguments.out / f"{core}-{pairs:03d}.json"
            config = model_config(core, task, arguments.width)
            experiment = Experiment(config, task, recipe, groups, file)
            if experiment.has_result():
                continue
            done = experiment.run(until)
            last = experiment.history[-1]["accuracy"] if experiment.history else []
            shown = " ".join(f"{accuracy:.3f}" for accuracy in last)
            print(f"{core} {pairs} pairs: step {experiment.step}, {experiment.seconds:.0f} s, {shown}", flush=True)
            if not done:
                return False
    return True


def picture(arguments: argparse.Namespace, recipe: Recipe, groups: Groups, until: Deadline) -> bool:
    """Train the models of Figure 4 (width 100, heads of 32) and write their attention on one sequence.

    Returns whether all results are written.
    """
    for core in cores(arguments.cores):
        file = arguments.out / f"attention-{core}.json"
        experiment = Experiment(model_config(core, LETTERS, 100, 32), LETTERS, recipe, groups, file)
        if experiment.has_result() and '"weights"' in file.read_text(encoding="utf-8"):
            continue
        if not experiment.run(until):
            return False
        write_picture(experiment)
        print(f"{core}: step {experiment.step}, accuracy {max(experiment.history[-1]['accuracy']):.3f}", flush=True)
    return True
