"""What the study of the cores measures: time to a target, losses at multiples of the training length, scores, verdicts."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.papers.figures.cores import reached, target_of
from eval.papers.study import measure
from eval.papers.study.cores_report import accuracy, claims, found_at, positions_at, ruler_at, summary

CURVE = [[100, 10.0, 4.0], [200, 20.0, 3.0], [300, 30.0, 2.8]]


def test_a_target_is_reached_between_validations():
    assert reached(CURVE, 3.5) == (150, 15.0)
    assert reached(CURVE, 2.9) == pytest.approx((250, 25.0))
    assert reached(CURVE, 4.5) == (100, 10.0)
    assert reached(CURVE, 2.8) == (300, 30.0)
    assert reached(CURVE, 2.7) is None
    assert reached([], 2.7) is None


def test_all_trainings_reach_the_target():
    worse = [[*entry[:2], entry[2] + 0.3] for entry in CURVE]
    results: Any = {"sb": [{"to_loss": CURVE}], "softmax": [{"to_loss": worse}, {}], "sb+ruler": [{"ruler": {}}]}
    assert target_of(results) == pytest.approx(3.1)
    assert all(reached(curve, target_of(results)) for curve in (CURVE, worse))


def test_seconds_leave_out_validations_and_compilation(tmp_path: Path):
    """A step of 50 s that compiles counts as three median steps of 0.1 s, in the first step and after a pause."""
    rates = [2.0, 1000.0, 1000.0, 1000.0, 2.0, 500.0]
    records: list[dict[str, Any]] = []
    for step, rate in enumerate(rates, 1):
        records.append({"step": step, "tokens": 100 * step, "loss": 3.0, "lr": 0.1, "tokens_per_second": rate})
        if step % 3 == 0:
            records.append({"step": step, "tokens": 100 * step, "valid_loss": 4.0 - step / 10})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    median = (1000 + 500) / 2
    long = 100 * measure.CAP / median
    assert measure.to_loss(tmp_path) == [
        [300, pytest.approx(long + 0.2, abs=0.01), 3.7],
        [600, pytest.approx(2 * long + 0.5, abs=0.01), 3.4],
    ]


def bins(losses: list[float]) -> dict[str, Any]:
    return {"bin": 512, "windows": 9, "train_length": 5120, "mean": losses, "error": losses}


def test_losses_at_multiples_of_the_training_length():
    """The last tenth before 1 and 4 lengths. A core without RoPE has one kind."""
    found = {"positions": {"plain": bins([5.0] * 9 + [4.0] + [5.0] * 26 + [3.0, 3.0, 2.0, 2.0])}}
    assert positions_at(1)(found) == 4.0
    assert positions_at(4)(found) == pytest.approx(2.5)
    assert positions_at(10)(found) is None
    assert positions_at(1)({}) is None
    found["positions"]["base"] = bins([1.0] * 40)
    assert positions_at(1)(found) == 1.0
    assert positions_at(1, "plain")(found) == 4.0


def test_scores():
    cells = [{"length": n, "depth": d, "samples": 10, "correct": c} for n, d, c in ((9, 1, 4), (9, 2, 6), (90, 1, 1))]
    assert found_at(0)({"needle": {"cells": cells}}) == 0.5
    assert found_at(1)({"needle": {"cells": cells}}) == 0.1
    ruler = {
        f"{task}@{n}": [score / n, 0.01] for n in (1, 2, 4) for task, score in (("niah_single_1", 1), ("ruler_vt", 0.5))
    }
    assert ruler_at("all", 1)({"ruler": ruler}) == 0.75
    assert ruler_at("needles", None)({"ruler": ruler}) == pytest.approx((0.5 + 0.25) / 2)
    assert ruler_at("tracking", 4)({}) is None
    tables = {
        "piqa": {"chance": 0.5, "value": 0.6, "metrics": {"acc,none": 0.6, "acc_norm,none": 0.62}},
        "winogrande": {"chance": 0.5, "value": 0.5, "metrics": {"acc,none": 0.5}},
        "mmlu": {"chance": 0.25, "value": 0.9, "metrics": {"acc,none": 0.9}},
        "wikitext": {"chance": None, "value": 60.0, "metrics": {"word_perplexity,none": 60.0}},
    }
    assert accuracy({"tables": tables}) == pytest.approx(0.56)


def test_verdicts_and_the_readmes_table():
    """Stick-breaking is 10 s faster at the target, softmax loses at 10 lengths."""

    def result(name: str, seed: int, loss: float, far: float) -> dict[str, Any]:
        curve = [[100, 10.0, 4.0], [200, 20.0, loss]]
        positions = {"plain": bins([3.0] * 90 + [far] * 10)}
        training = {"last_tenth": loss, "tokens_per_second": 100_000}
        return {"job": name, "seed": seed, "to_loss": curve, "positions": positions, "training": training}

    results: Any = {
        "softmax": [result("softmax", seed, 3.0 + seed / 100, 5.0) for seed in (0, 1)],
        "sb": [result("sb", seed, 2.0 + seed / 100, 2.9) for seed in (0, 1)],
    }
    rows = [row for claim in claims(results) if (row := claim.row(results)) is not None]
    said = {row.split(" (")[0].strip("| "): row.rpartition(" | ")[2].strip(" |") for row in rows}
    assert said["sb reaches the loss sooner than softmax"] == "holds"
    assert said["sb is below softmax in long contexts"] == "holds"
    assert said["sb gains by longer contexts"] == "holds"
    assert said["sb trains fewer tokens per second than softmax"].startswith("open: the ranges overlap")
    table = summary(results)
    assert "tokens (M) to 3.010" in table
    assert "| stick-breaking | 0 | 15 | 100,000 | 2.005 | 3.000 | 3.000 | 2.900 |" in table
