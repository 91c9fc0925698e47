"""Whole trainings at two learning rates: which one stands for its method, has the further seeds, and is compared with which."""

import json
from pathlib import Path
from typing import Any

import pytest

from eval.papers.figures.studies import same_rate
from eval.papers.study.claims import CLAIMS, Claim, Context
from eval.papers.study.jobs import Job, Place
from eval.papers.study.report import whole
from eval.papers.study.sizes import TINY
from eval.papers.study.studies import WHY, Study, positions, ssmax, why
from eval.papers.study.whole import method_of, of_job, read_results

# method → {learning rate: validation loss}; the first rate is the chosen one
LOSSES = {"softmax": {2e-3: 2.9, 1e-3: 3.0}, "ssmax": {1e-3: 3.0, 2e-3: 2.95}, "ssmax_bias": {2e-3: 2.92}}


def result(job: str, rate: float, seed: int, loss: float | None) -> dict[str, object]:
    tokens = list(range(20))
    valid = [] if loss is None else [[20, loss]]
    training = {"tokens": tokens, "loss": [rate] * 20, "last_tenth": loss, "valid": valid}
    return {"kind": "study", "job": job, "rate": rate, "seed": seed, "training": training}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "ssmax"
    found.mkdir()
    chosen = {method: {"rate": next(iter(losses)), "losses": {}} for method, losses in LOSSES.items()}
    (found / "rates.json").write_text(json.dumps(chosen))
    for method, losses in LOSSES.items():
        for number, (rate, loss) in enumerate(losses.items()):
            job = f"{method}@{rate:g}" if number else method
            (found / f"{job}-s0.json").write_text(json.dumps(result(job, rate, 0, loss)))
    return found


def further(folder: Path, seeds: list[int] | None = None) -> list[Job]:
    place = Place(folder.parent, folder.parent, folder.parent)
    (folder.parent / "test.books.jsonl.zst").touch()
    return [job for job in ssmax(Study("ssmax", place, TINY, seeds)) if job.seed]


def test_the_best_rate_has_the_further_seeds(folder: Path) -> None:
    seeds = {(job.name, job.rate) for job in further(folder)}
    assert seeds == {("softmax", 2e-3), ("ssmax@0.002", 2e-3), ("ssmax_bias", 2e-3)}
    (job,) = (job for job in further(folder) if (job.name, job.seed) == ("ssmax@0.002", 2))
    (trained,) = (step for step in job.steps if step.name == "train")
    assert "train.stages.0.schedule.lr=0.002" in trained.command
    assert "config=50m_ssmax" in trained.command
    assert job.file.name == "ssmax@0.002-s2.json"
    assert job.group is None  # ssmax_after measures only the model of `softmax`
    assert {job.name for job in further(folder, [3])} >= {"ssmax@0.002", "ssmax_after"}


def test_a_missing_or_nan_result_leaves_the_chosen_rate(folder: Path) -> None:
    file = folder / "ssmax@0.002-s0.json"
    file.write_text(json.dumps(result("ssmax@0.002", 2e-3, 0, None)))
    assert "ssmax" in {job.name for job in further(folder)}
    assert {*read_results(folder)} >= {"ssmax", "ssmax@0.002"}
    assert read_results(folder)["ssmax"][0]["rate"] == 1e-3
    file.unlink()
    assert "ssmax" in {job.name for job in further(folder)}
    (folder / "softmax-s0.json").unlink()
    assert {*read_results(folder)} == {"softmax@0.001", "ssmax", "ssmax_bias"}


def test_the_best_stands_for_its_method(folder: Path) -> None:
    (folder / "ssmax@0.002-s1.json").write_text(json.dumps(result("ssmax@0.002", 2e-3, 1, 2.96)))
    found = read_results(folder)
    assert {job: [(one["rate"], one["seed"]) for one in some] for job, some in found.items()} == {
        "softmax": [(2e-3, 0)],
        "softmax@0.001": [(1e-3, 0)],
        "ssmax": [(2e-3, 0), (2e-3, 1)],
        "ssmax@0.001": [(1e-3, 0)],
        "ssmax_bias": [(2e-3, 0)],
    }
    assert of_job(found, "ssmax@0.002") == found["ssmax"]
    assert of_job(found, "ssmax@0.001") == found["ssmax@0.001"]
    assert not of_job(found, "ssmax_bias@0.001")
    table = whole(found).splitlines()
    assert table[2:] == [
        "| softmax | 0.001: 3.0000, **0.002: 2.9000** |",
        "| ssmax | 0.001: 3.0000, **0.002: 2.9500** |",
    ]


def test_claims_and_figure_compare_at_one_rate(folder: Path) -> None:
    rows = [row for claim in CLAIMS["ssmax"]() if (row := claim.row(read_results(folder)))]
    of = {row.split(" (Figure")[0].removeprefix("| "): row for row in rows}
    assert "ssmax@0.001: 3 | softmax@0.001: 3 " in of["ssmax@0.001 trains to a lower loss than softmax@0.001"]
    assert "ssmax@0.002: 2.95 | softmax@0.002: 2.9 " in of["ssmax@0.002 trains to a lower loss than softmax@0.002"]
    assert "ssmax_bias@0.001 trains to a lower loss than softmax@0.001" not in of
    figure = same_rate(folder)
    assert figure is not None
    labels = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert labels == [
        ["(b) SSMax: +0.0000, last 10 %"],
        ["(b) SSMax: +0.0500, last 10 %", "(d) with bias: +0.0200, last 10 %"],
    ]
    for file in folder.glob("softmax*-s0.json"):
        file.unlink()
    for file in folder.glob("ssmax*-s0.json"):
        if file.name != "ssmax-s0.json":
            file.unlink()
    assert same_rate(folder) is None


def test_a_claim_names_changed_keys() -> None:
    """And compares the longest context with the longest, or with the shortest."""
    scaled = {"model.position.rope.scaling=dynamic_ntk": {"losses": {"2048": 3.1, "4096": 3.2}}}
    books = {"": {"losses": {"2048": 3.0, "4096": 3.5}}} | scaled
    results: dict[str, list[dict[str, Any]]] = {"rope": [{"seed": 0, "rate": 1e-3, "books": books}]}
    sides = [("rope", Context("books", kind, longest)) for kind, longest in (("-ntk", True), ("", True), ("", False))]
    rows = [Claim("Figure 5", "x", "nats", sides[0], side).row(results) for side in sides[1:]]
    assert [row and row.split(" | ")[2:4] for row in rows] == [
        ["rope-ntk: 3.2", "rope: 3.5"],
        ["rope-ntk: 3.2", "rope: 3"],
    ]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Where `positions` has learning rates of three methods."""
    rates = {"sb": {"rate": 2e-3}, "rope": {"rate": 4e-3}, "nope": {"rate": 1e-3}}
    (tmp_path / "positions").mkdir()
    (tmp_path / "positions" / "rates.json").write_text(json.dumps(rates))
    (tmp_path / "test.books.jsonl.zst").touch()
    return Place(tmp_path, tmp_path, tmp_path)


def test_positions_have_both_rates_of_what_is_varied(place: Place) -> None:
    jobs = positions(Study("positions", place, TINY))
    assert [job.name for job in jobs if "@" in job.name] == ["sb@0.001", "rope@0.001", "rope@0.002"]
    (rope,) = (job for job in jobs if job.name == "rope@0.001")
    assert any("window" in step.name for step in rope.steps)
    assert any("ntk" in step.name for step in rope.steps)


def test_what_is_varied_has_the_better_rate(place: Place) -> None:
    """Once all whole trainings of the method have ended, for which it waits. A wider model is also tried at half of it."""
    for job, rate, loss in (("sb", 2e-3, 3.0), ("sb@0.001", 1e-3, 2.9), ("rope", 4e-3, 3.0), ("rope@0.001", 1e-3, 2.9)):
        (place.out / "positions" / f"{job}-s0.json").write_text(json.dumps(result(job, rate, 0, loss)))
    jobs = {job.name: job for job in why(Study("why", place, TINY))}
    rates = {name: job.rate for name, job in jobs.items() if job.has_rate}
    kinds = ("tokens", "width", "heads", "books")
    assert rates == {f"sb+{kind}": 1e-3 for kind in kinds} | {f"rope+{kind}": 4e-3 for kind in kinds} | {
        "sb+width@0.0005": 5e-4,
        "rope+width@0.002": 2e-3,
    }
    assert [file.name for file in jobs["rope+books"].after] == [
        "rope-s0.json",
        "rope@0.001-s0.json",
        "rope@0.002-s0.json",
    ]
    wide = {method_of(name) for name, job in jobs.items() if job.gib > jobs["sb+books"].gib}
    assert wide == {f"{method}+width" for method in WHY}
