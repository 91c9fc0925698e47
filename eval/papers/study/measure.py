"""Reads what the steps of a job have left in run folders, and thins it to a few kilobytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from eval.papers.figures.results import of_runs
from ssscale.errors import UserError
from ssscale.json_object import read_json
from ssscale.train.records import read_metrics

CAP = 3.0  # times the median step
POINTS = 160  # maximum number of points of a training curve


def training(run: Path) -> dict[str, Any]:
    """Return the thinned training losses (each the mean of its steps) and the validation losses of a run."""
    records = read_metrics(run / "metrics.jsonl")
    steps = [record for record in records if "loss" in record and "lr" in record]
    if not steps:
        raise UserError(f"{run} has no training loss in its metrics.jsonl")
    groups = np.array_split(np.arange(len(steps)), min(POINTS, len(steps)))
    last = [record["loss"] for record in steps[-max(1, len(steps) // 10) :] if record["loss"] is not None]
    speeds = [record["tokens_per_second"] for record in steps if record.get("tokens_per_second")]
    return {
        "tokens": [steps[group[-1]]["tokens"] for group in groups],
        "loss": [_mean([steps[i]["loss"] for i in group]) for group in groups],
        "last_tenth": _mean(last),
        "valid": [[record["tokens"], record["valid_loss"]] for record in records if "valid_loss" in record],
        "tokens_per_second": round(float(np.median(speeds))) if speeds else None,
    }


def _mean(losses: list[float | None]) -> float | None:
    finite = [loss for loss in losses if loss is not None and np.isfinite(loss)]
    return round(float(np.mean(finite)), 5) if finite else None


def by_position(run: Path) -> dict[str, Any]:
    """Return the loss by position: mean over all windows of each bin, and its standard error."""
    (result,) = of_runs([run], "long_context")
    return _by_position(result)


def _by_position(result: dict[str, Any]) -> dict[str, Any]:
    found = next(iter(result["lengths"].values()))
    losses = np.array(found["losses"])
    error = losses.std(0, ddof=1) / len(losses) ** 0.5 if len(losses) > 1 else np.zeros(losses.shape[1])
    return {
        "bin": found["bin"],
        "windows": found["windows"],
        "train_length": result["train_length"],
        "mean": losses.mean(0).round(4).tolist(),
        "error": error.round(4).tolist(),
    }


def positions(run: Path) -> dict[str, dict[str, Any]]:
    """Return {kind: loss by position}: `plain` as trained, `base` with another base of RoPE."""
    found = {}
    for result in of_runs([run], "long_context"):
        kind = "base" if any("rope.base" in change for change in result["changes"]) else "plain"
        found[kind] = _by_position(result)
    return found


def to_loss(run: Path) -> list[list[float]]:
    """Return [tokens, seconds, validation loss] of each validation.

    Seconds are those of training, without validations and saves. A step counts at most CAP times the median step, because the
    first one after every start compiles.
    """
    records = read_metrics(run / "metrics.jsonl")
    rates = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    longest = CAP / float(np.median(rates)) if rates else 0.0
    found: list[list[float]] = []
    seconds, tokens = 0.0, 0
    for record in records:
        if record.get("tokens_per_second"):
            seconds += (record["tokens"] - tokens) * min(1 / record["tokens_per_second"], longest)
            tokens = record["tokens"]
        elif record.get("valid_loss") is not None:
            found.append([record["tokens"], round(seconds, 2), round(record["valid_loss"], 5)])
    return found


def tables(run: Path) -> dict[str, dict[str, Any]]:
    """Return {task: metrics, 95 % interval of the printed one, chance, items} of the results of launch/evaluate.py."""
    found = {}
    for file in sorted((run / "eval").rglob("step-*.json")):
        for task, result in read_json(file).get("tasks", {}).items():
            metrics = {key: round(value, 5) for key, value in result["metrics"].items() if _number(value)}
            entry = {"metrics": metrics, "items": result["items"], "chance": result["chance"]}
            found[task] = entry | {"metric": result["metric"], "value": round(result["value"], 5)}
    if not found:
        raise UserError(f"{run} has no results of launch/evaluate.py")
    return found


def _number(value: Any) -> bool:
    return isinstance(value, int | float)


def ruler(run: Path) -> dict[str, list[float | None]]:
    """Return {TASK@LENGTH: [score, standard error]}."""
    from eval.papers.figures.ruler import cells_of  # imports matplotlib

    found: dict[str, list[float | None]] = {}
    for file in sorted((run / "eval").rglob("step-*.json")):
        found |= {name: list(cell) for name, cell in cells_of(read_json(file)).items()}
    if not found:
        raise UserError(f"{run} has no results of RULER")
    return found


def skipping(run: Path) -> dict[str, Any]:
    """Return {length: seconds of an evaluation and bits per byte, with and without skipping}."""
    return dict(read_json(sorted((run / "eval").glob("skipping-*.json"))[-1])["lengths"])


def cells(run: Path) -> dict[str, Any]:
    """Return the cells of retrieval by length and depth."""
    (result,) = of_runs([run], "needle")
    return {"cells": result["cells"]}


def by_length(run: Path, kind: str) -> dict[str, dict[str, Any]]:
    """Return {changed keys: {length: mean loss, …, windows, targets}} of kind `long_context` or `articles`."""
    found = {}
    for result in of_runs([run], kind):
        lengths = result["lengths"]
        first = next(iter(lengths.values()))
        entry: dict[str, Any] = {length: round(entry["mean"], 5) for length, entry in lengths.items()}
        counts = {"windows": first["windows"], "targets": first["targets"]}
        found[" ".join(result["changes"])] = {"losses": entry, **counts}
    return found


def needle(run: Path) -> dict[str, Any]:
    """Return the cells of Figure 6 and the scores of Figures 7 and 8."""
    (cells,) = of_runs([run], "needle")
    (scores,) = of_runs([run], "needle_scores")
    heads = sorted((round(x, 4) for layer in scores["heads"]["scores"] for x in layer), reverse=True)
    return {
        "cells": cells["cells"],
        "heads": {"length": scores["length"], "outcome": scores["heads"]["outcome"], "scores": heads},
        "trials": [
            [round(trial["top"], 4), trial["depth"], trial["outcome"]]
            for trial in sorted(scores["trials"], key=lambda trial: -trial["top"])
        ],
    }


def seconds(markers: list[Path]) -> dict[str, Any]:
    """Return {step: [seconds, jobs on its GPU when it began]} of finished steps."""
    found = {}
    for marker in markers:
        entry = json.loads(marker.read_text(encoding="utf-8"))
        found[marker.stem] = [entry["seconds"], entry["jobs"]]
    return found


def mqrar(file: Path) -> dict[str, Any]:
    """Return accuracy and loss by step of one result of eval.papers.mqrar."""
    found = read_json(file)
    solved = next((entry["step"] for entry in found["history"] if max(entry["accuracy"]) >= 0.99), None)
    keys = ("core", "pairs", "batch", "steps", "lrs", "trained_steps", "best", "best_lr", "seconds")
    history = [
        [entry["step"], [round(x, 4) for x in entry["accuracy"]], [round(x, 4) for x in entry["loss"]]]
        for entry in found["history"]
    ]
    return {key: found[key] for key in keys} | {"solved_at": solved, "history": history}
