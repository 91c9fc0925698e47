"""Finds lm-eval tasks by name and runs them on our harness: ours (eval/checkpoint/tasks/), lm-eval's and the user's."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval.api.group import Group
from lm_eval.api.task import Task

from eval.checkpoint.harness import PackedLM
from eval.checkpoint.own_tasks import OwnTasks, TaskManager, first_line, group_folders, leads_to
from eval.checkpoint.scoring import (
    Scored,
    TaskResult,
    agree,
    first_document,
    make_result,
    same_or_none,
    score_task,
    sentence,
)
from eval.checkpoint.task_names import TASKS, check_tasks
from eval.checkpoint.tasks.local.files import FILES
from ssscale.errors import UserError

logger = logging.getLogger("ssscale")

Samples = list[dict[str, Any]]


def find_tasks(
    names: list[str], metadata: dict[str, Any], include: Sequence[str] = (), option: str = "tasks"
) -> TaskManager:
    """Return a TaskManager that knows all the names.

    Definitions of the user come first, then ours over local files if these exist, then lm-eval's.

    names: names of tasks and groups, or YAML files.
    metadata: sources of custom data sets. `eval_data` is the folder of local files, `cloze_items` a file.
    include: folders with YAML files of the user.
    option: the name of the option in messages.

    Raises UserError like `check_tasks`, and for broken definitions of the user.
    """
    own = OwnTasks([*include, *group_folders(names)])
    theirs = [str(folder) for folder in own.folders]
    wanted = leads_to(names, TaskManager(include_path=theirs, include_defaults=False).task_index)
    own.check(wanted)
    others = [name for name in wanted if name not in own.files]
    try:
        elsewhere = check_tasks(others, metadata["eval_data"], option, own.folders)
    except UserError as error:
        raise UserError("; ".join([str(error), *own.broken])) from None
    local = [] if set(elsewhere) & set(FILES) else [str(TASKS / "local")]
    paths = [str(TASKS / "cloze"), *local, *theirs]
    manager = TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    if all(name in manager.all_tasks for name in wanted):
        return manager
    logger.warning("searching lm-eval's thousands of tasks (up to one minute)")
    manager = TaskManager(include_path=paths, metadata=metadata)
    for name in leads_to(names, manager.task_index):
        if name not in manager.all_tasks:
            raise UserError("; ".join([f"{option}={name}: lm-eval has no such task", *own.broken]))
    return manager


@dataclass
class Outcome:
    """The results of several tasks. failures: one sentence for each task that could not be scored, by task name."""

    results: list[TaskResult] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def check(self, kept: str) -> None:
        """Raise UserError if a task failed. kept: where the results of the others are, for the message."""
        if self.failures:
            reasons = "; ".join(f"{task}: {reason}" for task, reason in self.failures.items())
            count = f"{len(self.failures)} of {len(self.failures) + len(self.results)} tasks failed"
            others = f"; the results of the others are in {kept}" if self.results else ""
            raise UserError(f"{count}: {reasons}{others}")


def run_tasks(
    lm: PackedLM,
    names: list[str],
    manager: TaskManager,
    limit: int | None = None,
    num_fewshot: int | None = None,
    done: Callable[[TaskResult, Samples], None] = lambda *_: None,
    failed: Callable[[str, str], None] = lambda *_: None,
) -> Outcome:
    """Score tasks and groups in order. A group gives the results of its tasks and its own means.

    limit: number of first documents of each task. None: all.
    num_fewshot: replaces the number of examples that the tasks define.
    done: called with each new result, and with its documents as lm-eval logs them.
    failed: called with the name of a task that cannot be scored, and the reason. The other tasks are still scored.

    Every rank must call it. The first rank of each machine gets the results, the others none.
    """
    outcome = Outcome()
    metrics: dict[str, Any] = {}

    def keep(result: TaskResult, samples: Samples) -> None:
        outcome.results.append(result)
        done(result, samples)

    def fail(name: str, reason: str) -> None:
        outcome.failures[name] = reason
        failed(name, reason)

    tasks, groups = load_tasks(names, manager, fail)
    for name, task in tasks.items():
        # Rolling log-likelihoods are of whole texts, without examples.
        if num_fewshot is not None and task.OUTPUT_TYPE != "loglikelihood_rolling":
            task.set_config("num_fewshot", num_fewshot)
        try:
            scored = score_task(lm, task, limit)
        except UserError as error:
            fail(name, str(error))
            continue
        if scored is not None:
            metrics[name] = scored.metrics
            keep(scored.result, scored.samples)
    for group in groups.values():
        lacking = [task.task_name for task in group.get_all_tasks() if task.task_name in outcome.failures]
        if group.has_aggregation and lacking:
            fail(group.name, f"its task {lacking[0]} failed")
        elif group.has_aggregation and metrics:
            keep(group_result(group, metrics, outcome.results), [])
    return outcome


def load_tasks(
    names: list[str], manager: TaskManager, fail: Callable[[str, str], None]
) -> tuple[dict[str, Task], dict[str, Group]]:
    """Load tasks and groups with their data.

    If one cannot be loaded, all ranks leave it out, and `fail` is called with its name and the reason. Raises UserError
    if two of the names contain the same task.
    """
    tasks: dict[str, Task] = {}
    groups: dict[str, Group] = {}
    origins: dict[str, str] = {}
    for name in dict.fromkeys(names):
        failure, loaded = None, None
        try:
            loaded = manager.load([name])
        except Exception as error:  # the YAML, code and data of a task can raise anything
            failure = not_loaded(error)
        failure = agree(failure)
        if failure is not None or loaded is None:
            fail(name, failure or "")
            continue
        for task in loaded["tasks"]:
            if task in origins:
                raise UserError(f"tasks={','.join(names)}: {origins[task]} and {name} both contain the task {task}")
            origins[task] = name
        tasks |= loaded["tasks"]
        groups |= loaded["groups"]
    return tasks, groups


def not_loaded(error: Exception) -> str:
    """Describe in one sentence why a task cannot be loaded."""
    if isinstance(error, UserError):
        return str(error)
    document = first_document(error)
    if document is None and isinstance(error, OSError):  # includes ConnectionError and FileNotFoundError
        return (
            f"the data cannot be reached ({first_line(error)}); with HF_HUB_OFFLINE=0, lm-eval downloads data that is "
            "not in the cache"
        )
    return sentence(error, document)


def group_result(group: Group, metrics: dict[str, Any], results: list[TaskResult]) -> TaskResult:
    """Return the means of a group over its tasks."""
    found = group.aggregate(metrics)
    members = {task.task_name for task in group.get_all_tasks()}
    results = [result for result in results if result.task in members]
    return make_result(
        group.name,
        found,
        chance=None,
        items=found["sample_len"],
        num_fewshot=same_or_none([result.num_fewshot for result in results]),
        limit=results[0].limit,
        length=results[0].length,
    )


def run_lm_eval(
    lm: PackedLM, tasks: Iterable[str | dict[str, Any]], manager: TaskManager, limit: int | None = None
) -> list[TaskResult]:
    """Score tasks given by name or by definition. Errors of loading are raised, and UserError for a bad document."""
    loaded = manager.load(list(tasks))["tasks"].values()
    found: list[Scored | None] = [score_task(lm, task, limit) for task in loaded]
    return [scored.result for scored in found if scored is not None]
