"""Scores one lm-eval task with the harness. Errors name the document that cannot be scored."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from statistics import fmean
from types import TracebackType
from typing import Any

import lm_eval
import torch.distributed as dist
from jinja2.exceptions import UndefinedError
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager

from eval.checkpoint.chance import SHARES, WRITTEN, against_chance, interval
from eval.checkpoint.harness import PackedLM
from eval.checkpoint.lm_eval_patches import templates_end_with, without_environment
from eval.checkpoint.own_tasks import first_line, is_own
from ssscale.errors import UserError
from ssscale.parallel.exchange import gather_json

BOOTSTRAP = 100  # resamples for standard errors of metrics that are not means. Those of means are exact.

Doc = dict[str, Any]


@dataclass(frozen=True)
class TaskResult:
    """The result of one task or group.

    metric, value, stderr: the metric of `first_metric` with its standard error.
    chance: the expected score of guessing, if it is known (`eval.checkpoint.chance`).
    items: number of scored documents.
    num_fewshot: examples before each document. None: the tasks of a group differ.
    limit: number of first documents that were scored. None: all.
    length: the maximum number of tokens in a sequence.
    metrics: all metrics of the task.
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

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the value."""
        return interval(self.metric, self.value, self.stderr, self.items)

    @property
    def against_chance(self) -> str:
        """Whether the interval excludes chance: above, below, no, or "" if one of both is not known."""
        return against_chance(self.interval, self.chance)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "TaskResult":
        """Return the result that `to_json` gave."""
        return cls(**{entry.name: found[entry.name] for entry in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"interval": self.interval, "against_chance": self.against_chance}


@dataclass(frozen=True)
class Scored:
    """A task's result, its documents as lm-eval logs them, and the raw metrics for the mean of a group."""

    result: TaskResult
    samples: list[dict[str, Any]]
    metrics: dict[str, Any]


def score_task(lm: PackedLM, task: Task, limit: int | None = None) -> Scored | None:
    """Score a task. Every rank must call it. The first rank of each machine gets the result, the others None.

    limit: number of first documents to score. None: all.

    Raises UserError with the number of the document if a document gives no request or cannot be scored. The first case
    is found on all ranks before the model is called. Exceptions of the model's passes are not converted.
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
        except Exception as error:  # the code of a task can raise anything
            if lm.in_passes:
                raise
            raise UserError(watch.sentence(error)) from error
    return None if output is None else _scored(task.task_name, output, limit, lm.length)


_NO_TASKS = TaskManager(include_defaults=False)  # tasks are already built


def check_shots(task: Task) -> None:
    """Raise UserError if there are too few few-shot examples, or if a document could be its own example."""
    shots = task.config.num_fewshot or 0
    if not shots or not isinstance(task, ConfigurableTask):
        return
    own_examples = task.fewshot_cfg.split is not None or getattr(task.fewshot_cfg, "samples", None) is not None
    others = task.has_training_docs() or (task.has_validation_docs() and task.has_test_docs())
    if not own_examples and not others and task.has_test_docs():
        raise UserError(
            f"num_fewshot={shots}: the task has no documents for examples other than the scored ones; set fewshot_split "
            "in its YAML (it may be the test split: lm-eval never uses a document as its own example)"
        )
    excluded = task.fewshot_cfg.split == task.config.test_split  # lm-eval excludes the scored document
    available = len(task.sampler.df)
    if available < shots + excluded:
        raise UserError(f"num_fewshot={shots}: the task has only {available} documents for examples")


def agree(failure: str | None) -> str | None:
    """Return the failure of the first rank that has one, on all ranks.

    Without it, ranks without a failure would wait for the failed one in the next pass.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return failure
    return next((found for found in gather_json(failure) if found is not None), None)


class Watch:
    """Records which document of a task is being turned into requests or scored. document: its number, or None."""

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
        """Score a document. lm-eval passes the documents in order, once per filter of the task."""
        self.document = self._scored % self._docs
        self._scored += 1
        found = self._process(doc, results)
        self.document = None
        return found

    def sentence(self, error: Exception) -> str:
        return sentence(error, self.document)

    def finalize(self, value: Any) -> Any:
        """Check a value that a template prints. JSON lines give None for a field that only other documents have."""
        if value is None and self._strict:
            raise ValueError("a field that a template prints is missing or null")
        return value


@contextmanager
def watched(task: Task, lm: PackedLM) -> Iterator[Watch]:
    """Record in a Watch which document the task works on, for as long as the block lasts."""
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
    """Raise ValueError if a document lacks its answer or a choice, or if the answer is not one of the choices.

    lm-eval would score such a document as wrong, or use the text "None".
    """
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
            raise ValueError(f"its answer {answer!r} is not one of the {len(choices)} choices")


def sentence(error: Exception, document: int | None) -> str:
    """Describe an error in one sentence, with the number of the document, counted from 0."""
    text = first_line(error)
    if isinstance(error, UndefinedError):
        text = f"a template needs a field that the document lacks: {text}"
    elif not isinstance(error, ValueError | AssertionError | UserError):
        text = f"{type(error).__name__}: {text}"
    return text if document is None else f"document {document}: {text}"


def first_document(error: Exception) -> int | None:
    """Return 0 if the first document caused the error, else None. lm-eval tests templates on it at loading."""
    at: TracebackType | None = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code is ConfigurableTask.__init__.__code__:
            return 0 if "test_doc" in at.tb_frame.f_locals else None
        at = at.tb_next
    return None


def _scored(task: str, output: dict[str, Any], limit: int | None, length: int) -> Scored:
    samples, metrics = output["samples"][task], output["results"][task]
    config = output["configs"][task]
    # With this metric, lm-eval also asks for each choice without its question.
    asked = 2 if any(metric["metric"] == "acc_mutual_info" for metric in config.get("metric_list") or ()) else 1
    choices = [len(sample["arguments"]) // asked for sample in samples]
    multiple_choice = config["output_type"] == "multiple_choice"
    in_documents = (config.get("metadata") or {}).get(
        "num_fewshot", 0
    )  # for tasks whose prompts already contain the examples
    result = make_result(
        task,
        metrics,
        chance=fmean(1 / count for count in choices) if multiple_choice else guessing(task, first_metric(metrics)),
        items=len({sample["doc_id"] for sample in samples}),  # a document occurs once per filter of the task
        num_fewshot=output["n-shot"][task] or in_documents,
        limit=limit,
        length=length,
    )
    return Scored(result, samples, metrics)


def guessing(task: str, metric: str) -> float | None:
    """Return the score of guessing on a task that is not multiple choice, or None. RULER's tasks are TASK@LENGTH.

    A metric such as perplexity has none.
    """
    found = WRITTEN.get(task.partition("@")[0])
    return found.rate if found and metric.partition(",")[0] in (*SHARES, "string_match") else None


def first_metric(metrics: dict[str, Any]) -> str:
    """Return the first share of documents with its filter, as `acc,none`, or the first metric if there is no share.

    A share says more of a task than a perplexity, which lm-eval gives first for LAMBADA: guessing has a score.
    """
    names = [key for key in metrics if "," in key and "_stderr" not in key]
    return next((key for key in names if key.partition(",")[0] in SHARES), names[0])


def make_result(task: str, metrics: dict[str, Any], **more: Any) -> TaskResult:
    """Make a TaskResult whose metric is `first_metric` of `metrics`. more: the other fields."""
    values = {key: value for key, value in metrics.items() if "," in key}
    metric = first_metric(values)
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
    """Return the value if all values are equal, else None."""
    return values[0] if len(set(values)) == 1 else None
