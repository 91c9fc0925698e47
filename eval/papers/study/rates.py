"""Learning rates: tried on the validation documents, chosen, and written to OUT/STUDY/rates.json before any test.

    rates.json: {"METHOD": {"rate": 0.001, "losses": {"0.0005": 3.1, "0.001": 3.0, "0.002": 3.2}}, ...}

A loss of null is a training whose loss stayed NaN. Where the best rate is at the edge of those tried, the next one beyond it
(twice or half of it) is tried first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.checkpoint.command import write
from ssscale.errors import UserError
from ssscale.json_object import read_json

FILE = "rates.json"
FEWEST = 3  # learning rates per method


def chosen(folder: Path) -> dict[str, float]:
    """Return {method: learning rate} of rates.json, or {} without the file."""
    file = folder / FILE
    return {method: float(entry["rate"]) for method, entry in read_json(file).items()} if file.is_file() else {}


def tried(folder: Path) -> dict[str, dict[float, float | None]]:
    """Return {method: {learning rate: validation loss}} of the rate jobs that have ended."""
    found: dict[str, dict[float, float | None]] = {}
    for file in sorted((folder / "rates").glob("*.json")):
        result = read_json(file)
        for rate, loss in result["losses"].items():
            found.setdefault(result["method"], {})[float(rate)] = loss
    return found


def best_of(losses: dict[float, float | None]) -> float | None:
    """Return the learning rate with the lowest loss, or None if all are NaN."""
    finite = {rate: loss for rate, loss in losses.items() if loss is not None}
    return min(finite, key=lambda rate: finite[rate]) if finite else None


def beyond(losses: dict[float, float | None], most: int) -> float | None:
    """Return the learning rate to try next, because the best is at the edge of those tried, or None.

    most: rates to try in all. Of so many the best is taken, also at the edge.
    """
    best = best_of(losses)
    if not FEWEST <= len(losses) < most or best is None:
        return None
    if best == max(losses):
        return 2 * best
    return best / 2 if best == min(losses) else None


def to_try(folder: Path, method: str, first: Sequence[float], most: int) -> list[float]:
    """Return the learning rates of a method: `first`, those tried beyond them, and the next one if none is chosen yet."""
    losses = tried(folder).get(method, {})
    found = [*first, *(rate for rate in losses if rate not in first)]
    further = None if method in chosen(folder) else beyond(losses, most)
    return found if further is None else [*found, further]


def choose(folder: Path, most: int = FEWEST) -> list[str]:
    """Write rates.json from the rate jobs. Returns one sentence per method.

    most: as for `beyond`. A choice that is on file stays, because tests may have used it. Raises UserError without any
    tried rate.
    """
    before = read_json(folder / FILE) if (folder / FILE).is_file() else {}
    result: dict[str, Any] = dict(before)
    lines = []
    for method, losses in tried(folder).items():
        best = best_of(losses)
        if len(losses) < FEWEST or best is None:
            count = sum(loss is not None for loss in losses.values())
            lines.append(f"{method}: not chosen, {len(losses)} of {FEWEST} rates are tried, {count} have a loss")
            continue
        further = None if method in before else beyond(losses, most)
        if further is not None:
            lines.append(f"{method}: not chosen, the best is at the edge: --jobs 'rate-*' tries {further:g} next")
            continue
        kept = float(before[method]["rate"]) if method in before else best
        edge = " (at the edge of those tried)" if kept in (min(losses), max(losses)) else ""
        stays = f", which stays although {best:g} is best now" if kept != best else ""
        result[method] = {"rate": kept, "losses": {f"{rate:g}": loss for rate, loss in sorted(losses.items())}}
        lines.append(f"{method}: {kept:g}{edge}{stays}")
    if not lines:
        raise UserError(f"{folder}/rates has no results: run --jobs 'rate-*'")
    if result:
        write(folder / FILE, result, indent=1)
    return lines


def choose_new(folder: Path, most: int) -> list[str]:
    """Choose the learning rates whose trials have ended. Returns one sentence per method that had none before."""
    before = chosen(folder)
    lines = choose(folder, most) if tried(folder) else []
    new = chosen(folder).keys() - before.keys()
    return [line for line in lines if line.partition(":")[0] in new]
