"""lm-eval's tasks by name, ours (eval/tasks/) and its own, run on our harness."""

import logging
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any
from unittest import mock

import lm_eval
from lm_eval.tasks import TaskManager

from eval.harness import PackedLM
from eval.task_names import TASKS, check_tasks
from eval.tasks.local.files import FILES
from ssscale.errors import UserError

logger = logging.getLogger("ssscale")

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


def find_tasks(names: list[str], metadata: dict[str, Any], option: str = "tasks") -> TaskManager:
    """A manager that knows all the names: ours over local files where these are there, else lm-eval's own.

    metadata: what custom data sets are made from: `eval_data`, the folder of local files; `cloze_items`, a file. Raises
    UserError as `check_tasks` does.
    """
    others = check_tasks(names, metadata["eval_data"], option)
    local = [] if set(others) & set(FILES) else [str(TASKS / "local")]
    paths = [str(TASKS / "cloze"), *local]
    if not others:
        return TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    logger.warning("looking through lm-eval's thousands of tasks (up to a minute)")
    manager = TaskManager(include_path=paths, metadata=metadata)
    for name in names:
        if name not in manager.all_tasks:
            raise UserError(f"{option}={name}: lm-eval has no such task")
    return manager


def run_tasks(lm: PackedLM, names: list[str], manager: TaskManager, limit: int | None = None) -> list[TaskResult]:
    """Every task, or every task of a group, in order. limit: of the first examples of each.

    Every rank of the model takes part; the first of a machine gets the results, the others none. Raises UserError where
    a task's data cannot be reached.
    """
    try:
        return run_lm_eval(lm, names, manager, limit)
    except (ConnectionError, FileNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"tasks={','.join(names)}: the data cannot be reached ({reason}); "
            "HF_HUB_OFFLINE=0 lets lm-eval download what the machine's cache does not have"
        ) from error


def run_lm_eval(
    lm: PackedLM, tasks: list[str] | list[dict[str, Any]], manager: TaskManager, limit: int | None = None
) -> list[TaskResult]:
    """As `run_tasks`, of tasks by name or by definition, and with lm-eval's own errors."""
    with mock.patch("lm_eval.evaluator.add_env_info"):  # seconds of `pip list` for what nobody reads here
        output = lm_eval.simple_evaluate(lm, tasks=tasks, task_manager=manager, bootstrap_iters=BOOTSTRAP, limit=limit)
    return [] if output is None else [_result(task, output) for task in output["samples"]]


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
        items=len({sample["doc_id"] for sample in samples}),  # each comes once for every filter of the task
        metrics=values,
    )
