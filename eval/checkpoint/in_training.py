"""Evaluates lm-eval tasks during training, on the current weights."""

import logging
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from eval.checkpoint.cloze import build_items, write_items
from eval.checkpoint.harness import PackedLM
from eval.checkpoint.results import FOLDER, add_results, results_file
from eval.checkpoint.scoring import TaskResult
from eval.checkpoint.suite import find_tasks, run_tasks
from eval.checkpoint.text import TextTokenizer, held_out
from ssscale.config.schema import Config
from ssscale.train.build import open_data
from ssscale.train.checkpoint_folder import checkpoint_path
from ssscale.train.pretrain import PackedRows
from ssscale.train.run import Run

logger = logging.getLogger("ssscale")


class TaskEvaluation:
    """Evaluates `train.tasks` on the model of a run.

    The results equal those of launch/evaluate.py on a checkpoint of the same step. All ranks must call it together. The
    model, the data and the random number generators of the run are not changed. A batch has at most as many tokens as a
    microbatch of training, because the optimizer keeps its memory. The constructor raises UserError for unknown tasks
    and missing data.
    """

    def __init__(self, config: Config) -> None:
        train = config.train
        self.items = Path(config.folder) / FOLDER / "cloze.jsonl"
        self.names, self.limit = train.tasks, train.task_limit
        metadata = {"eval_data": train.task_data, "cloze_items": str(self.items)}
        self.manager = find_tasks(self.names, metadata, train.task_include, "train.tasks")
        self._items_of: tuple[str, int] | None = None  # (fingerprint of the data, length) of the items

    def __call__(self, run: Run) -> dict[str, float]:
        """Evaluate, and return {"task/metric": value} on the main rank and {} on the others.

        The main rank also writes RUN/eval/step-XXXXXXXX.json.
        """
        config, model, source = run.config, run.engine.module, run.source
        assert isinstance(source, PackedRows)
        data = source.data
        entry = data.manifest["tokenizer"]
        tokenizer = TextTokenizer(data.tokenizer_file, entry["bos_id"], entry["eos_id"])
        if "cloze" in self.names:
            self._write_items(run, tokenizer)
        length = config.data.length
        with undisturbed(model, run.groups.device):
            lm = PackedLM(
                model,
                tokenizer,
                length,
                batch_tokens=config.train.microbatch_rows * length,
                name=config.name,
                in_step=config.parallel.zero_stage == 3,
                alive=lambda: run.watchdog.mark("evaluation"),
            )
            outcome = run_tasks(lm, self.names, self.manager, self.limit)
        if not run.groups.is_main:
            return {}
        for task, reason in outcome.failures.items():
            logger.warning("train.tasks: %s failed: %s", task, reason)
        tasks = {result.task: result.to_json() for result in outcome.results}
        content = {"prefix": "BOS before every document", "tasks": tasks}
        changes = [] if self.limit is None else [f"limit={self.limit}"]
        checkpoint = checkpoint_path(Path(config.folder) / "checkpoints", run.state.step)
        file = results_file(checkpoint, changes)
        try:
            add_results(file, content)
        except OSError as error:  # a full disk must not stop training, and metrics.jsonl has the values
            logger.error("%s cannot be written: %s", file, error.strerror)
        return values_of(outcome.results)

    def _write_items(self, run: Run, tokenizer: TextTokenizer) -> None:
        """Write the items of the cloze task, once per data folder and length."""
        valid = open_data(run.config, "valid", fingerprint=run.source.fingerprint)
        if self._items_of == (valid.fingerprint, valid.length):
            return
        if run.groups.is_main:
            write_items(build_items(held_out(valid, tokenizer), tokenizer, valid.length), self.items)
        dist.barrier()
        self._items_of = (valid.fingerprint, valid.length)


def values_of(results: Iterable[TaskResult]) -> dict[str, float]:
    """Return {task/metric: mean}. Of the filters of a metric the first counts, as it does in a result."""
    found: dict[str, float] = {}
    for result in results:
        for name, value in means(result.metrics):
            found.setdefault(f"{result.task}/{name.split(',')[0]}", value)
    return found


def means(metrics: dict[str, object]) -> Iterator[tuple[str, float]]:
    """Yield the numeric metrics, without standard errors."""
    for name, value in metrics.items():
        if "_stderr" not in name and isinstance(value, int | float):
            yield name, float(value)


@contextmanager
def undisturbed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model into eval mode without torch.compile, and restore training mode and random states afterwards.

    lm-eval seeds the generators of Python, NumPy and torch.
    """
    states = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    model.eval()
    try:
        # Varying shapes would make torch.compile's graphs dynamic, also those of training.
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train()
        random.setstate(states[0])
        np.random.set_state(states[1])
