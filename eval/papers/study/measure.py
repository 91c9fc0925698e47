"""Reads what the steps of a job have left in run folders, and thins it to a few kilobytes."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from eval.papers.figures.results import of_runs, read
from ssscale.errors import UserError
from ssscale.train.records import read_metrics

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
    found = read(file)
    solved = next((entry["step"] for entry in found["history"] if max(entry["accuracy"]) >= 0.99), None)
    keys = ("core", "pairs", "batch", "steps", "lrs", "trained_steps", "best", "best_lr", "seconds")
    history = [
        [entry["step"], [round(x, 4) for x in entry["accuracy"]], [round(x, 4) for x in entry["loss"]]]
        for entry in found["history"]
    ]
    return {key: found[key] for key in keys} | {"solved_at": solved, "history": history}
