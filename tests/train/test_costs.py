"""The command that measures what saves and metrics cost; its figures mean something on a GPU only."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.costs import check_room, main, rate, records_of
from ssscale.errors import UserError


def test_the_rate_is_by_the_clock() -> None:
    records = [{"step": step, "loss": 1.0, "tokens": 100 * step, "time": 1000.0 + 2 * step} for step in range(1, 6)]
    assert rate([*records, {"step": 2, "valid_loss": 1.0}], 2, 4) == 50.0
    with pytest.raises(UserError, match="no record of step 6 in its metrics"):
        rate(records, 2, 6)


def test_a_run_without_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"data": "data", "folder": str(tmp_path), "microbatch": 1}
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(returncode=0, stdout="", stderr=""))
    with pytest.raises(UserError, match=r"tiny_sb_1 has no record of a step .*: train\.log_every must be at most 5"):
        records_of({"config": "tiny_sb", **options}, 1, 5, [])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "of=saves|metrics is missing"),
        (["of=speed"], "of must be saves or metrics, not 'speed'"),
        (["of=saves", "config=tiny_sb"], "data=FOLDER is missing: a packed data folder"),
        (["of=saves", "config=tiny_sb", "data=.", "steps=8"], "steps=8 leaves no steps between saves: give 12 or more"),
        (["of=metrics", "config=tiny_sb", "data=.", "steps=4"], "steps=4 leaves too few steps to compare"),
        (["of=metrics", "config=tiny_sb", "data=.", "steps=many"], "steps must be a whole number, not 'many'"),
        (["of=metrics", "config=tiny_sb", "data=."], "data folder . is empty or unfinished: make it with"),
        (["of=saves", "config=tiny_sb", "data=no/such"], "data folder no/such does not exist: make it with"),
        (["of=saves", "config=tiny_sb", "data=.", "train.keep=x"], "train.keep"),
    ],
)
def test_bad_input(arguments: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        main(arguments)


def test_room_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_room({"config": "tiny_sb"}, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**10}))
    with pytest.raises(UserError, match=r"10\.0 GB are free on the disk of .*, 2\d\.\d GB are needed"):
        check_room({"config": "1b_softmax"}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "last"), [("saves", "dip, median: .*goal 5 %"), ("metrics", "a look takes .* every 1000 steps")]
)
def test_a_whole_measurement(
    of: str, last: str, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ["config=tiny_sb", "microbatch=2", "accumulation=1", "repeats=1", "data.num_workers=0"]
    steps = {"saves": "steps=12", "metrics": "steps=5"}[of]
    main([f"of={of}", *small, steps, f"data={corpus}", f"folder={tmp_path}"])
    assert re.search(last, capfd.readouterr().out)
