"""What the reports of `positions`, `why` and `mqrar` show beside their claims."""

import json
from pathlib import Path

import numpy as np
import pytest

from eval.papers.figures.studies import context_losses
from eval.papers.figures.variations import apart, by_step, differences, together
from eval.papers.study.report import losses, rates, record
from eval.papers.study.whole import read_results

NTK = "model.position.rope.scaling=dynamic_ntk model.position.rope.train_length=2048"


def write(out: Path, study: str, job: str, rate: float, books: dict[str, tuple[float, float]]) -> None:
    """A result of seed 0. books: changed keys → losses at 2,048 and 65,536 tokens."""
    entries = {changes: {"losses": {"2048": short, "65536": long}} for changes, (short, long) in books.items()}
    training = {
        "last_tenth": 3.25,
        "valid": [[1, rate]],
    }  # the loss is the rate, so the lower rate stands for its method
    result = {"kind": "study", "job": job, "rate": rate, "seed": 0, "training": training, "books": entries}
    (out / study).mkdir(exist_ok=True)
    (out / study / f"{job}-s0.json").write_text(json.dumps(result))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path, "positions", "sb", 1e-3, {"": (4.5, 4.25)})
    write(tmp_path, "positions", "rope", 2e-3, {"": (4.6, 5.5), NTK: (4.6, 4.75)})
    write(tmp_path, "positions", "rope@0.001", 1e-3, {"": (4.7, 6.5)})
    write(tmp_path, "why", "sb+heads", 1e-3, {"": (4.0, 4.0)})
    write(tmp_path, "why", "rope+heads", 1e-3, {"": (4.125, 7.0)})
    write(tmp_path, "why", "alibi+books", 1e-3, {"": (3.0, 3.0)})
    return tmp_path


def test_losses_by_context(out: Path) -> None:
    _, _, *rows = losses(read_results(out / "positions")).splitlines()
    assert sorted(rows) == [
        "| RoPE | 0.001 | 3.250 | 0.001 | 4.700 | 6.500 |  |  |",
        "| RoPE | 0.002 | 3.250 | 0.002 | 4.600 | 5.500 |  |  |",
        "| RoPE, NTK | 0.002 | 3.250 | 0.002 | 4.600 | 4.750 |  |  |",
        "| stick-breaking | 0.001 | 3.250 | 0.001 | 4.500 | 4.250 |  |  |",
    ]
    assert losses({"softmax": [{"rate": 1.0, "training": {}}]}) == ""


def test_differences_to_stickbreaking(out: Path) -> None:
    """The better whole training stands for nothing varied. A method without stick-breaking beside it has no difference."""
    found = context_losses(together(out / "why"), "books")
    assert differences(found, "rope", min) == pytest.approx({"": 0.2, "heads": 0.125})
    assert differences(found, "rope", max) == pytest.approx({"": 2.25, "heads": 3.0})
    assert differences(found, "alibi", max) == {}
    figure = apart(out / "why")
    assert figure is not None
    longest, shortest = figure.axes
    legend = longest.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["RoPE (2 farther)", "ALiBi"]
    assert np.asarray(shortest.lines[0].get_ydata()).tolist() == pytest.approx([0.2, 0.125])
    (out / "why" / "rope+heads-s0.json").unlink()
    (out / "why" / "alibi+books-s0.json").unlink()
    assert apart(out / "why") is None


def test_mqrar(tmp_path: Path) -> None:
    """Jobs with short sequences first have a panel of their own, and the rates are those of the paper, not their numbers."""
    folder = tmp_path / "mqrar"
    folder.mkdir()
    for job, core, pairs in (("softmax_32", "softmax", 32), ("curriculum_stickbreaking_128", "stickbreaking", 128)):
        for seed in (0, 1):
            history = [[250, [0.1, 0.2], [8.0, 7.0]], [500, [0.1, 0.5 + 0.1 * seed], [8.0, 2.0]]]
            mqrar = {"core": core, "pairs": pairs, "history": history}
            result = {"kind": "study", "job": job, "rate": 3, "seed": seed, "mqrar": mqrar}
            (folder / f"{job}-s{seed}.json").write_text(json.dumps(result))
    (folder / "rates.json").write_text(json.dumps({"softmax": {"rate": 3, "losses": {"1": 8.0, "3": 0.1, "4": None}}}))
    figure = by_step(folder)
    published, short_first = figure.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in published.lines] == [[0.2, 0.5], [0.2, 0.6]]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["softmax + RoPE, 32 pairs", "stick-breaking, 128 pairs"]
    assert len(short_first.lines) == 2
    assert "| softmax | 0.0001: 8.0000, **0.0022: 0.1000**, 0.01: NaN |" in rates(folder)


def test_commits_are_written_short() -> None:
    """Whatever --commit was: two forms of one commit would read as two commits."""
    common = {"seed": 0, "device": "NVIDIA H200", "date": "2026-11-29"}
    commits = ("be54d53", "be54d53" + "0" * 33, "c55e06d+", "unknown")
    line = record("why", {"sb": [{**common, "commit": commit} for commit in commits]})
    assert line.split(" · ")[1] == "Commit: be54d53, c55e06d+, unknown"
