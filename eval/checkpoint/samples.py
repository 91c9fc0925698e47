"""Every example of a task as it was scored, one JSON line each: RUN/eval/step-00001000-samples/TASK.jsonl."""

import json
import os
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable


def samples_file(results: Path, task: str) -> Path:
    """Beside the results file, in a folder of its own."""
    return results.with_name(f"{results.stem}-samples") / f"{task.replace('/', '_')}.jsonl"


def write_samples(file: Path, task: str, samples: list[dict[str, Any]]) -> None:
    """Replace the file as a whole. samples: as lm-eval logs them, one for each document and filter of the task."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as opened:
        for sample in samples:
            line = json.dumps(to_line(task, sample), ensure_ascii=False, default=handle_non_serializable)
            opened.write(line + "\n")
    os.replace(temporary, file)


def to_line(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """A document with its requests, what the model answered, the target and the metrics of this document alone."""
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
    """responses: one, or as many as the task repeats its requests."""
    if len(arguments) == 1:
        return {"text": arguments[0], "loglikelihood": responses[0]}
    first, second, *_ = arguments
    if isinstance(second, dict):
        return {"prompt": first, "settings": second, "responses": responses}
    value, greedy = responses[0]
    return {"context": first, "continuation": second, "loglikelihood": value, "greedy": greedy}
