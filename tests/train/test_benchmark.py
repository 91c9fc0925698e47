"""launch/benchmark.py: which runs it starts, and the table beside the papers' figures, with a stub in place of trainings."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from launch import benchmark
from launch.benchmark import kernels_of, main
from ssscale.errors import UserError
from ssscale.options import last_of_each

FOUND = {"tokens_per_second": 4e5, "mfu": 0.5, "mfu_causal": 0.4, "memory_gib": 50.0, "first_step_s": 9.0}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, list[str]]]:
    calls: list[tuple[str, int, list[str]]] = []

    def run_stack(
        name: str, options: dict[str, Any], accumulation: int, steps: int, extra: list[str], kernel: str
    ) -> dict[str, float]:
        calls.append((name, options["gpus"], extra))
        return {} if "train.seed=13" in extra and kernel in ("own", "flash") else dict(FOUND)

    monkeypatch.setattr(benchmark, "run_stack", run_stack)
    monkeypatch.setattr(benchmark, "check_data", lambda config: None)
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
        (["accumulation=1,2,4", "steps=9,8"], "accumulation=1,2,4 and steps=9,8 differ in length"),
        (["accumulation=4"], "accumulation=4 and steps=100,8 differ in length"),
        (["masters=true", "plain=false"], "masters=true runs plain torch once more, but .* with plain=false"),
        (["masters=true", "gpus=2"], "masters=true .* with gpus=2, where plain torch takes one"),
    ):
        seen.clear()
        with pytest.raises(UserError, match=said):
            main(last_of_each(["configs=1b_sb", f"data={tmp_path}", *wrong]))
        assert not seen


def test_one_number_of_steps_serves_all(monkeypatch, tmp_path):
    counts: list[tuple[int, int]] = []
    monkeypatch.setattr(benchmark, "check_data", lambda config: None)
    monkeypatch.setattr(benchmark, "run_stack", lambda _name, _options, *sizes: counts.append(sizes[:2]) or dict(FOUND))
    main(["configs=1b_sb", f"data={tmp_path}", "accumulation=1,2,4", "steps=9", "plain=false"])
    assert counts == [(1, 9), (2, 9), (4, 9)]


def test_failed_runs_are_named_after_the_table_of_the_others(seen, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "run_plain", lambda *_, masters=False: {} if masters else dict(FOUND))
    options = [f"data={tmp_path}", f"folder={tmp_path}/runs", "accumulation=4", "steps=9", "backend=flash,cudnn"]
    with pytest.raises(UserError) as raised:
        main(["configs=1b_softmax,1b_sb", *options, "train.seed=13", "masters=true"])
    runs = tmp_path / "runs"
    assert str(raised.value) == (
        "3 of 5 runs failed; their output is in the files: "
        f"plain torch 1b, fp32 masters, clipping x4 ({runs}/benchmark_1b_softmax_4_masters.log), "
        f"1b_softmax x4 ({runs}/benchmark_1b_softmax_4_flash.log), 1b_sb x4 ({runs}/benchmark_1b_sb_4_own.log)"
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[:2] for row in rows] == [["| plain torch 1b", "cudnn"], ["| 1b_softmax", "cudnn"]]
    assert not any("nan" in row for row in rows)


def test_a_folder_without_packed_data_is_refused_first(monkeypatch, tmp_path):
    monkeypatch.setattr(benchmark, "run_stack", lambda *_: pytest.fail("a run began"))
    with pytest.raises(UserError, match=f"data folder {tmp_path} is empty or unfinished: make it with"):
        main(["configs=1b_sb", f"data={tmp_path}", "plain=false"])


def test_paths_lead_from_the_folder_of_the_caller(monkeypatch, tmp_path, capsys):
    """What a failed run wrote is in its file, and the paths that the runs get lead where the caller's do."""
    (tmp_path / "mine.yaml").write_text("include: [tiny_sb]\nname: mine\n")
    (tmp_path / "data").mkdir()
    started: list[Path] = []

    def start(command: list[str], cwd: Path | None = None, **_: Any) -> subprocess.CompletedProcess[str]:
        here, script = cwd or Path.cwd(), next(part for part in command if "plain_torch" in part or "pretrain" in part)
        config = next(part.removeprefix("config=") for part in command if part.endswith(".yaml"))
        assert (here / config).samefile(tmp_path / "mine.yaml")
        if script.endswith(".py"):
            pairs = [part.split("=", 1) for part in command if "=" in part]
            keys = dict(pairs)
            assert len(keys) == len(pairs), "launch/pretrain.py refuses a key that is given twice"
            assert keys["train.save_every"] == "7"
            assert (here / keys["data.path"]).samefile(tmp_path / "data")
            assert (here / keys["init_from"]) == tmp_path / "other"
            assert (here / keys["run_dir"]).parent == tmp_path / "runs"
            assert (here / script).is_file()
        started.append(here)
        return subprocess.CompletedProcess(command, 70, "began\n", "failed: planted\n")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(benchmark, "check_data", lambda config: None)
    given = ["configs=mine.yaml", "data=data", "accumulation=1", "steps=9", "out=found.json", "init_from=other"]
    with pytest.raises(UserError, match="2 of 2 runs failed"):
        main([*given, "train.save_every=7"])
    assert len(started) == 2
    assert (tmp_path / "runs/benchmark_mine.yaml_1_own.log").read_text() == "began\nfailed: planted\n"
    assert (tmp_path / "found.json").is_file()


def test_hybrids_change_all_of_their_mixers():
    assert kernels_of("1b_sb_rem", ["auto", "flash"]) == [("own", [])]
    assert [label for label, _ in kernels_of("162m_ssmax", ["auto", "flash"])] == ["auto", "flash"]
