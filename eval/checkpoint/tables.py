"""Prints the results of launch/evaluate.py."""

from pathlib import Path

from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from eval.checkpoint.scoring import TaskResult
from eval.checkpoint.validation import Loss

WIDE = 240  # columns in a file, whose width is not known; rich assumes 80 and cuts the cells


def show(console: Console, checkpoint: Path, tasks: list[TaskResult], losses: dict[str, Loss], settings: str) -> None:
    """Print task results and losses as two tables. settings: the changed settings, for the title."""
    if not console.is_terminal:
        console.width = WIDE
    title = f"{checkpoint}, {settings}" if settings else f"{checkpoint}"
    table = Table(title=title, box=ASCII, title_justify="left")
    for column in ("task", "shots", "metric", "value", "95 % interval", "chance", "excludes chance", "items"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", no_wrap=True)
    for task in tasks:
        error = "" if task.stderr is None else f" ± {task.stderr:.4f}"
        chance = "" if task.chance is None else f"{task.chance:.4f}"
        shots = "" if task.num_fewshot is None else f"{task.num_fewshot}"
        bounds = "" if task.interval is None else f"{task.interval[0]:.4f} to {task.interval[1]:.4f}"
        value = f"{task.value:.4f}{error}"
        table.add_row(task.task, shots, task.metric, value, bounds, chance, task.against_chance, f"{task.items:,}")
    if tasks:
        console.print(table)
    table = Table(box=ASCII)
    for column in ("loss, validation split", "nats per token", "bits per byte", "targets"):
        table.add_column(column, justify="left" if column.startswith("loss") else "right", no_wrap=True)
    for name, label in (("valid", "this model"), ("baseline", "Kneser–Ney bigram, d = 0.75")):
        if name in losses:
            loss = losses[name]
            table.add_row(label, f"{loss.nats_per_token:.4f}", f"{loss.bits_per_byte:.4f}", f"{loss.targets:,}")
    if losses:
        console.print(table)
