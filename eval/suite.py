"""lm-eval's tasks by name, ours (eval/tasks/) and its own, run on our harness."""

import difflib
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from eval.harness import PackedLM
from ssscale.errors import UserError

logger = logging.getLogger("ssscale")

TASKS = Path(__file__).parent / "tasks"
BOOTSTRAP = 100  # resamplings for the standard error of metrics that are no mean; a mean's is exact


@dataclass(frozen=True)
class TaskResult:
    """A task's first metric with its standard error; `metrics` holds all. chance: of a guess, for multiple choice."""

    task: str
    metric: str
    value: float
    stderr: float | None
    chance: float | None
    items: int
    metrics: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_tasks(names: list[str], metadata: dict[str, Any]) -> TaskManager:
    """A manager that knows all the names. Raises UserError with the nearest names for one that is unknown.

    metadata: what custom data sets are made from (`cloze_items`: a file).
    """
    manager = TaskManager(include_path=str(TASKS), include_defaults=False, metadata=metadata)
    unknown = [name for name in names if name not in manager.all_tasks]
    if not unknown:
        return manager
    ours = manager.all_tasks
    logger.warning("looking through lm-eval's thousands of tasks (up to a minute)")
    manager = TaskManager(include_path=str(TASKS), metadata=metadata)
    for name in unknown:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, ours, n=1) + difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = " or ".join(dict.fromkeys(near)) or f"one of ours ({', '.join(ours)}) or of lm-eval's"
            raise UserError(f"tasks={name}: there is no such task; did you mean {hint}?")
    return manager


def run_tasks(lm: PackedLM, names: list[str], manager: TaskManager) -> list[TaskResult]:
    """Every task, or every task of a group, in order. Raises UserError where a task's data cannot be reached."""
    try:
        output = lm_eval.simple_evaluate(lm, tasks=names, task_manager=manager, bootstrap_iters=BOOTSTRAP)
    except (ConnectionError, FileNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"tasks={','.join(names)}: the data cannot be reached ({reason}); "
            "HF_HUB_OFFLINE=0 lets lm-eval download what the machine's cache does not have"
        ) from error
    return [_result(task, output) for task in output["samples"]]


def _result(task: str, output: dict[str, Any]) -> TaskResult:
    samples = output["samples"][task]
    values = {key: value for key, value in output["results"][task].items() if "," in key}
    metric = next(key for key in values if "_stderr" not in key)
    name, kind = metric.split(",")
    stderr = values.get(f"{name}_stderr,{kind}")
    multiple_choice = output["configs"][task]["output_type"] == "multiple_choice"
    return TaskResult(
        task=task,
        metric=name,
        value=float(values[metric]),
        stderr=float(stderr) if isinstance(stderr, int | float) else None,
        chance=fmean(1 / len(sample["arguments"]) for sample in samples) if multiple_choice else None,
        items=len(samples),
        metrics=values,
    )
