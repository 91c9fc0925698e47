"""What guessing scores on a task, and whether the 95 % interval of a score excludes it."""

from statistics import NormalDist
from typing import NamedTuple

from eval.checkpoint.ruler import TASKS as RULER

Z = NormalDist().inv_cdf(0.975)  # 1.96
SHARES = ("acc", "acc_norm", "exact_match")  # metrics that are 0 or 1 for each document


class Chance(NamedTuple):
    """rate: the expected score of guessing. source: where the rate comes from."""

    rate: float
    source: str


# Of tasks that are not multiple choice. Guessing among n choices scores 1 / n; scoring.py takes its mean over the documents.
WRITTEN = {
    "gsm8k": Chance(0.0, "the answer is any number (arXiv:2110.14168), so no guess scores"),
    "gsm8k_cot": Chance(0.0, "as gsm8k"),
    "lambada_openai": Chance(0.017, "a random word of the passage, over the 5,153 passages of the test set"),
}
WRITTEN |= {task: Chance(0.0, "the answer is one of many numbers or words") for task in RULER if "qa" not in task}


def interval(metric: str, value: float, stderr: float | None, items: int) -> tuple[float, float] | None:
    """Return the 95 % interval of a score, or None without a standard error that says something.

    Shares of documents have Wilson's interval (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n), which is not empty at
    0 and 1. Other metrics have value ± 1.96 standard errors.
    """
    if metric in SHARES and 0 <= value <= 1:
        middle, extent = value + Z**2 / (2 * items), Z * (value * (1 - value) / items + Z**2 / (4 * items**2)) ** 0.5
        low, high = ((middle + sign * extent) / (1 + Z**2 / items) for sign in (-1, 1))
        return max(0.0, min(low, value)), min(1.0, max(high, value))
    if not stderr:  # 0 if all documents have the same score, which says nothing about others
        return None
    return value - Z * stderr, value + Z * stderr


def against_chance(found: tuple[float, float] | None, chance: float | None) -> str:
    """Return `above` or `below` if the interval excludes chance, `no` if it does not, and "" without either."""
    if found is None or chance is None:
        return ""
    return "above" if found[0] > chance else "below" if found[1] < chance else "no"
