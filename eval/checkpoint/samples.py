"""Writes every scored example of a task as one JSON line: RUN/eval/step-00001000-samples/TASK.jsonl."""

import json
import os
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable


def samples_file(results: Path, task: str) -> Path:
    """Return the samples file of a task. It is in a separate folder next to the results file."""
    return results.with_name(f"{results.stem}-samples") / f"{task.replace('/', '_')}.jsonl"


def write_samples(file: Path, task: str, samples: list[dict[str, Any]]) -> None:
    """Write samples as JSON lines. The file is replaced atomically.

    samples: as lm-eval logs them, one per document and filter of the task.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as opened:
        for sample in samples:
            line = json.dumps(to_line(task, sample), ensure_ascii=False, default=handle_non_serializable)
            opened.write(line + "\n")
    os.replace(temporary, file)


def to_line(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON object of a sample: the document, requests, answers, target, and metrics of this document."""
    return {
        "task": task,
        "doc_id": sample["doc_id"],
        "filter": sample["filter"],
        "doc": sample["doc"],
        "requests": [_request(*each) for each in zip(sample["arguments"], sample["resps"], strict=True)],
        "filtered": sample["filtered_resps"],
        "target": sample["target"],
        "metrics": {name: sample[name] for name in sample["metrics"]},
    }


def _request(arguments: tuple[Any, ...], responses: list[Any]) -> dict[str, Any]:
    """Return the JSON object of a request. responses: one per repetition of the request."""
    if len(arguments) == 1:
        return {"text": arguments[0], "loglikelihood": responses[0]}
    first, second, *_ = arguments
    if isinstance(second, dict):
        return {"prompt": first, "settings": second, "responses": responses}
    value, greedy = responses[0]
    return {"context": first, "continuation": second, "loglikelihood": value, "greedy": greedy}
