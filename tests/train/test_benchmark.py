"""launch/benchmark.py: which runs it starts, and the table beside the papers' figures, with a stub in place of trainings."""

import json
from typing import Any

import pytest

from launch import benchmark
from launch.benchmark import kernels_of, main
from ssscale.errors import UserError

FOUND = {"tokens_per_second": 4e5, "mfu": 0.5, "mfu_causal": 0.4, "memory_gib": 50.0, "first_step_s": 9.0}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[str]]]:
    calls: list[tuple[str, int, list[str]]] = []

    def run_stack(
        name: str, options: dict[str, Any], accumulation: int, steps: int, extra: list[str]
    ) -> dict[str, float]:
        calls.append((name, options["gpus"], extra))
        return dict(FOUND)

    monkeypatch.setattr(benchmark, "run_stack", run_stack)
    monkeypatch.setattr(benchmark, "run_plain", lambda *_: FOUND | {"tokens_per_second": 5e4})
    return calls


def test_every_core_and_kernel(seen, tmp_path, capsys):
    """Softmax and SSMax run with each kernel, stick-breaking with its own. Days are of eight GPUs."""
    out = tmp_path / "speed.json"
    options = [f"data={tmp_path}", "accumulation=16", "steps=8", "gpus=4", f"out={out}"]
    main(["configs=1b_softmax,1b_ssmax,1b_sb,3b_softmax", "backend=flash,cudnn", *options, "train.seed=3"])
    assert [(name, extra[:-1]) for name, _, extra in seen] == [
        ("1b_softmax", ["model.mixer.softmax.backend=flash"]),
        ("1b_softmax", ["model.mixer.softmax.backend=cudnn"]),
        ("1b_ssmax", ["model.mixer.ssmax.backend=flash"]),
        ("1b_ssmax", ["model.mixer.ssmax.backend=cudnn"]),
        ("1b_sb", []),
        ("3b_softmax", ["model.mixer.softmax.backend=flash"]),
        ("3b_softmax", ["model.mixer.softmax.backend=cudnn"]),
    ]
    assert all(gpus == 4 and extra[-1] == "train.seed=3" for _, gpus, extra in seen)
    lines = capsys.readouterr().out.splitlines()
    assert "| 1b_softmax | flash | 16 | 100,000 | 69.12 | 19.50 | nan |" in lines[2]
    assert "| 1b_sb | own | 16 | 100,000 | 69.12 | 16.27 |" in lines[6]
    assert "| 3b_softmax | flash | 16 | 100,000 | 69.12 | – |" in lines[7]
    rows = json.loads(out.read_text())["rows"]
    assert [row["billion_tokens_per_day"] for row in rows] == [pytest.approx(1e5 * 8 * 86_400 / 1e9)] * 7


def test_plain_torch_takes_one_gpu(seen, tmp_path, capsys):
    main(["configs=1b_sb", f"data={tmp_path}", "accumulation=1", "steps=5"])
    out = capsys.readouterr().out
    assert "| plain torch 1b | cudnn | 1 | 50,000 |" in out
    assert "| 1b_sb | own | 1 | 400,000 | 276.48 | 16.27 | 8.000 |" in out
    for wrong, said in (
        (["backend=fa3"], "backend=fa3: use auto, cudnn, flash"),
        (["gpus=2", "plain=true"], "plain torch takes one GPU"),
        (["data=/nowhere"], "data=/nowhere: there is no such folder"),
    ):
        with pytest.raises(UserError, match=said):
            main(["configs=1b_sb", f"data={tmp_path}", *wrong])


def test_hybrids_change_all_of_their_mixers():
    assert kernels_of("1b_sb_rem", ["auto", "flash"]) == [("own", [])]
    assert [label for label, _ in kernels_of("162m_ssmax", ["auto", "flash"])] == ["auto", "flash"]
