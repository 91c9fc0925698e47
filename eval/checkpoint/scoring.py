"""One task of lm-eval on the harness; what cannot be scored is named by its document."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from types import TracebackType
from typing import Any

import lm_eval
import torch.distributed as dist
from jinja2.exceptions import UndefinedError
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from eval.checkpoint.harness import PackedLM
from eval.checkpoint.lm_eval_patches import templates_end_with, without_environment
from eval.checkpoint.own_tasks import first_line, is_own
from ssscale.errors import UserError
from ssscale.parallel.exchange import gather_json

BOOTSTRAP = 100  # resamplings for the standard error of metrics that are not a mean; that of a mean is exact

Doc = dict[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """A task's first metric with its standard error; `metrics` holds all. chance: of a guess, for multiple choice.

    num_fewshot: examples before each document; None: a group's tasks differ. limit: of the first documents; None: all. length:
    the most tokens that the model was given.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    chance: float | None
    items: int
    num_fewshot: int | None
    limit: int | None
    length: int
    metrics: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Scored:
    """A task's result, each document as lm-eval logs it, and what a group's mean is taken from."""

    result: TaskResult
    samples: list[dict[str, Any]]
    metrics: dict[str, Any]


def score_task(lm: PackedLM, task: Task, limit: int | None = None) -> Scored | None:
    """Every rank of the model takes part; the first of a machine gets the result, the others None.

    Raises UserError, on all ranks before the model is called, where a document gives no request, and where one cannot be
    scored, with the document's number. What the model's passes raise is raised as it is.
    """
    check_shots(task)
    lm.in_passes = False
    with watched(task, lm) as watch, without_environment():
        try:
            output = lm_eval.simple_evaluate(
                lm, tasks=[task], task_manager=_NO_TASKS, bootstrap_iters=BOOTSTRAP, limit=limit
            )
        except UserError:
            raise
        except Exception as error:  # anything that a task's own code raises
            if lm.in_passes:
                raise
            raise UserError(watch.sentence(error)) from error
    return None if output is None else _scored(task.task_name, output, limit, lm.length)


_NO_TASKS = TaskManager(include_defaults=False)  # tasks come built


def check_shots(task: Task) -> None:
    """Raises UserError where the examples before a document are too few, or may be that document itself."""
    shots = task.config.num_fewshot or 0
    if not shots or not isinstance(task, ConfigurableTask):
        return
    own_examples = task.fewshot_cfg.split is not None or getattr(task.fewshot_cfg, "samples", None) is not None
    others = task.has_training_docs() or (task.has_validation_docs() and task.has_test_docs())
    if not own_examples and not others and task.has_test_docs():
        raise UserError(
            f"num_fewshot={shots}: the task has no documents for examples but those that are scored; name a fewshot_split in "
            "its YAML (the test split, too: a document is then never an example for itself)"
        )
    excluded = task.fewshot_cfg.split == task.config.test_split  # lm-eval leaves the scored document out
    available = len(task.sampler.df)
    if available < shots + excluded:
        raise UserError(f"num_fewshot={shots}: the task has {available} documents for examples")


def agree(failure: str | None) -> str | None:
    """The first rank's failure that has any, on all ranks: one alone would wait for the others in the next pass."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return failure
    return next((found for found in gather_json(failure) if found is not None), None)


class Watch:
    """Which document of a task is made into requests or scored."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.document: int | None = None
        self._strict = isinstance(task, ConfigurableTask) and is_own(task.config)
        self._build_all, self._construct, self._process = (
            task.build_all_requests,
            task.construct_requests,
            task.process_results,
        )
        self._docs = self._scored = 0

    def build_all_requests(self, **settings: Any) -> None:
        failure = None
        self.document = 0
        try:
            self._build_all(**settings)
        except Exception as error:
            failure = self.sentence(error)
        self.document = None
        failure = agree(failure)
        if failure is not None:
            raise UserError(failure)

    def construct_requests(self, doc: Doc, ctx: Any, **settings: Any) -> Any:
        if self._strict:
            check_document(self.task, doc)
        requests = self._construct(doc=doc, ctx=ctx, **settings)
        self._docs += 1
        self.document = self._docs
        return requests

    def process_results(self, doc: Doc, results: Any) -> Any:
        """lm-eval asks for the documents in order, once for every filter of the task."""
        self.document = self._scored % self._docs
        self._scored += 1
        found = self._process(doc, results)
        self.document = None
        return found

    def sentence(self, error: Exception) -> str:
        return sentence(error, self.document)

    def finalize(self, value: Any) -> Any:
        """What a template prints. JSON lines give None for a field that a document lacks and others have."""
        if value is None and self._strict:
            raise ValueError("a field that a template prints is missing or null")
        return value


@contextmanager
def watched(task: Task, lm: PackedLM) -> Iterator[Watch]:
    watch = Watch(task)
    names = ("build_all_requests", "construct_requests", "process_results")
    for name in names:
        setattr(task, name, getattr(watch, name))
    try:
        with templates_end_with(watch.finalize):
            yield watch
    finally:
        for name in names:
            delattr(task, name)


def check_document(task: ConfigurableTask, doc: Doc) -> None:
    """Raises ValueError where lm-eval would score a document that lacks its answer: as wrong, or as the text None."""
    target = task.doc_to_target(doc)
    if target is None:
        raise ValueError("doc_to_target gives nothing: the field is missing or null")
    if task.OUTPUT_TYPE != "multiple_choice":
        return
    choices = task.doc_to_choice(doc)
    if any(choice is None or choice == "" for choice in choices):
        raise ValueError("doc_to_choice gives a choice that is missing or empty")
    gold = task.doc_to_text(doc) if task.multiple_input else target
    for answer in gold if isinstance(gold, list) else [gold]:
        if not (0 <= answer < len(choices) if isinstance(answer, int) else answer in choices):
            raise ValueError(f"its answer {answer!r} is none of the {len(choices)} choices")


def sentence(error: Exception, document: int | None) -> str:
    """What went wrong, with the number of the document from 0."""
    text = first_line(error)
    if isinstance(error, UndefinedError):
        text = f"a template needs a field that the document lacks: {text}"
    elif not isinstance(error, ValueError | AssertionError | UserError):
        text = f"{type(error).__name__}: {text}"
    return text if document is None else f"document {document}: {text}"


def first_document(error: Exception) -> int | None:
    """0 where a task's first document is at fault, on which lm-eval tries the templates when it loads a task."""
    at: TracebackType | None = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code is ConfigurableTask.__init__.__code__:
            return 0 if "test_doc" in at.tb_frame.f_locals else None
        at = at.tb_next
    return None


def _scored(task: str, output: dict[str, Any], limit: int | None, length: int) -> Scored:
    samples, metrics = output["samples"][task], output["results"][task]
    choices = [len(sample["arguments"]) for sample in samples]
    config = output["configs"][task]
    multiple_choice = config["output_type"] == "multiple_choice"
    in_documents = (config.get("metadata") or {}).get("num_fewshot", 0)  # where a task's own prompts hold them
    result = make_result(
        task,
        metrics,
        chance=fmean(1 / count for count in choices) if multiple_choice else None,
        items=len({sample["doc_id"] for sample in samples}),  # each comes once for every filter of the task
        num_fewshot=output["n-shot"][task] or in_documents,
        limit=limit,
        length=length,
    )
    return Scored(result, samples, metrics)


def make_result(task: str, metrics: dict[str, Any], **more: Any) -> TaskResult:
    values = {key: value for key, value in metrics.items() if "," in key}
    metric = next(key for key in values if "_stderr" not in key)
    name, kind = metric.split(",")
    stderr = values.get(f"{name}_stderr,{kind}")
    return TaskResult(
        task=task,
        metric=name,
        value=float(values[metric]),
        stderr=float(stderr) if isinstance(stderr, int | float) else None,
        metrics=values,
        **more,
    )


def same_or_none(values: Sequence[int | None]) -> int | None:
    return values[0] if len(set(values)) == 1 else None
