"""Whole trainings of one method at several learning rates: METHOD at the chosen one, METHOD@RATE at others.

Rates are chosen in short trainings, which need not prefer the rate that is best for a whole one. So some methods are trained
whole at two rates. The training with the lower validation loss stands for its method, and gets the further seeds.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssscale.json_object import read_json

Result = dict[str, Any]
Results = dict[str, list[Result]]  # job → one result per seed


def at(method: str, rate: float) -> str:
    """Return the name of a whole training at a rate that was not chosen."""
    return f"{method}@{rate:g}"


def method_of(job: str) -> str:
    return job.partition("@")[0]


def validation(result: Mapping[str, Any]) -> float | None:
    """Return the last validation loss, or None without any."""
    found = result.get("training", {}).get("valid")
    return found[-1][1] if found else None


def lowest(results: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the job with the lowest validation loss. None if a result has none, because its loss stayed NaN or it is missing.

    results: {job: result of seed 0}, all of one method.
    """
    losses = {job: loss for job, result in results.items() if (loss := validation(result)) is not None}
    return min(losses, key=lambda job: losses[job]) if losses and len(losses) == len(results) else None


def lowest_of(folder: Path, jobs: Sequence[str]) -> str | None:
    """Return `lowest` of the jobs' files, or None if one is missing."""
    files = {job: folder / f"{job}-s0.json" for job in jobs}
    if not all(file.is_file() for file in files.values()):
        return None
    return lowest({job: read_json(file) for job, file in files.items()})


def read_results(folder: Path) -> Results:
    """Return all results of a study by job and seed.

    METHOD is that method's training with the lowest validation loss, whatever it is called in its file. The others are
    METHOD@RATE.
    """
    found: Results = {}
    for file in sorted(folder.glob("*-s*.json")):
        result = read_json(file)
        if result.get("kind") == "study":
            found.setdefault(result["job"], []).append(result)
    methods: dict[str, dict[str, Result]] = {}
    for job, some in found.items():
        methods.setdefault(method_of(job), {}).update((job, result) for result in some if result["seed"] == 0)
    best = {method: (lowest(some) if method in some else None) or method for method, some in methods.items()}

    def name(job: str) -> str:
        method = method_of(job)
        if job == best[method]:
            return method
        return job if job != method else at(method, found[job][0]["rate"])

    return {name(job): sorted(some, key=lambda result: result["seed"]) for job, some in found.items()}


def of_job(results: Results, job: str) -> list[Result]:
    """Return the results of a job. METHOD@RATE may be the one that stands for its method."""
    method, _, rate = job.partition("@")
    some = results.get(job, [])
    return some or [result for result in results.get(method, []) if rate and result["rate"] == float(rate)]
