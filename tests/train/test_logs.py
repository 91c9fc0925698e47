"""What a run writes about itself: damaged lines, and a disk that is full for a while or to the end."""

import functools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ssscale.train.records import keep_until
from tests.promises import promises
from tests.train import disks
from tests.train.faults import events, plant
from tests.train.ranks import Ranks, running

MORE = ["data.num_workers=0", "train.save_every=2"]


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, 6 steps."""
    folder = tmp_path_factory.mktemp("logs") / "run"
    Ranks([f"data.path={corpus}", *MORE, "train.max_steps=6"], folder, size=1).finish()
    return folder


def losses(run: Path) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records if "loss" in record]


LINES = {
    "cut short": b'{"step": 2, "tokens": 20',
    "not UTF-8": b'{"step": 2, "tokens": "\xff\xfe"}',
    "a bare number": b"7",
    "no step": b'{"loss": 5.0}',
    "a step that is none": b'{"step": "2", "loss": 5.0}',
    "nothing but zeros": bytes(64),
}


@promises(
    "Files and disks",
    "a line of `metrics.jsonl` is damaged",
    seen="the line is moved to `metrics.damaged.jsonl`, with one message; all other lines stay",
    code="0",
    identical="yes",
)
@pytest.mark.parametrize("damage", LINES)
def test_a_damaged_line_takes_no_other_with_it(damage: str, run: Path, corpus: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    lines = (copy / "metrics.jsonl").read_bytes().splitlines()
    lines.insert(2, LINES[damage])
    (copy / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    ranks = Ranks([f"data.path={corpus}", *MORE, "train.max_steps=8"], copy, size=1)
    ranks.finish()
    assert [step for step, _ in losses(copy)] == list(range(1, 9))
    assert losses(copy)[:6] == losses(run)
    assert "Traceback" not in ranks.output()
    assert ranks.output().count("lines are damaged and are moved to metrics.damaged.jsonl") == 1
    assert (copy / "metrics.damaged.jsonl").read_bytes() == LINES[damage] + b"\n"


def test_two_losses_of_one_step_are_both_moved(run: Path, tmp_path: Path) -> None:
    """A bit flips in the number of a step. Nobody knows then which of two losses is that of the step."""
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    lines = (copy / "metrics.jsonl").read_bytes().splitlines()
    (third,) = (line for line in lines if b'"loss"' in line and b'"step": 3,' in line)
    (second,) = (line for line in lines if b'"loss"' in line and b'"step": 2,' in line)
    flipped = third.replace(b'"step": 3,', b'"step": 2,')
    (copy / "metrics.jsonl").write_bytes(b"".join(line.replace(third, flipped) + b"\n" for line in lines))
    keep_until(copy / "metrics.jsonl", 6)
    assert losses(copy) == [pair for pair in losses(run) if pair[0] not in (2, 3)]
    assert (copy / "metrics.damaged.jsonl").read_bytes().splitlines() == [second, flipped]


def test_a_last_line_that_a_crash_cut_short_is_written_again(run: Path, corpus: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    with open(copy / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 7, "tok')
    Ranks([f"data.path={corpus}", *MORE, "train.max_steps=8"], copy, size=1).finish()
    assert [step for step, _ in losses(copy)] == list(range(1, 9))
    assert not (copy / "metrics.damaged.jsonl").exists()


def flush_slowly() -> None:
    fsync = os.fsync
    os.fsync = lambda descriptor: (time.sleep(0.05), fsync(descriptor))[1]  # type: ignore[assignment]


def saved_steps(run: Path) -> list[int]:
    file = run / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [record["saved_step"] for record in records if "saved_step" in record]


def test_the_records_of_saves_outlive_a_kill(corpus: Path, tmp_path: Path) -> None:
    """A save is committed some steps later than it began; its record belongs to the step that it holds."""
    arguments = [f"data.path={corpus}", "data.num_workers=0", "train.save_every=20", "train.keep=9"]
    with running([*arguments, "train.max_steps=5000"], tmp_path / "run", size=1, plant=flush_slowly) as ranks:
        ranks.wait_for(lambda: 20 in saved_steps(tmp_path / "run"))
        ranks.send(signal.SIGKILL)
        ranks.wait()
    (checkpoint,) = (tmp_path / "run/checkpoints").glob("step-*[0-9]")
    assert checkpoint.name == "step-00000020"
    Ranks([*arguments, "train.max_steps=60"], tmp_path / "run", size=1).finish()
    assert saved_steps(tmp_path / "run") == [20, 40, 60]


def tensorboard_losses(run: Path) -> dict[int, float]:
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    return {event.step: event.value for event in found.Scalars("loss")}


def fill_its_page(events: Path) -> None:
    """Adds a line that leaves no room in the last page of the file, into which the next event would go on a full disk."""
    line = b'{"event": "start", "more": "%s"}\n'
    room = -(events.stat().st_size + len(line) - 2) % os.sysconf("SC_PAGESIZE")
    with open(events, "ab") as file:
        file.write(line % (b"x" * room))


@promises(
    "Files and disks",
    "the disk is full between saves",
    seen=(
        "one message, `metrics.jsonl cannot be written: …; kept in memory`; metrics, TensorBoard and events are written "
        "as soon as the disk has room"
    ),
    code="0",
    identical="yes",
    do="make room on the disk before the run ends",
)
def test_training_goes_on_over_a_full_disk_and_nothing_is_lost(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"data.path={corpus}", "data.num_workers=0", "train.save_every=1000", "train.max_steps=400"]
    arguments += ["train.batch_size=1"]
    with disks.small_disk(tmp_path / "small", "4m") as disk:
        # `plant` counts steps of two microbatches, and these have one: steps 199 and 200.
        nan = functools.partial(plant, "nan", (100,), rank=0)
        with running(arguments, disk / "run", size=1, plant=nan, log=tmp_path / "log") as ranks:
            ranks.wait_for_step(5)
            fill_its_page(disk / "run/events.jsonl")
            filler = disks.fill(disk)
            ranks.wait_for(lambda: disks.shown_step(ranks) >= 250)
            on_disk = ranks.records()[-1]["step"]
            assert on_disk < 200
            filler.unlink()
            assert ranks.wait() == [0], ranks.output()
        assert [step for step, _ in losses(disk / "run")] == list(range(1, 401))
        kept: dict[int, Any] = {step: loss for step, loss in losses(disk / "run") if loss == loss}
        drawn = tensorboard_losses(disk / "run")
        assert drawn.keys() == set(range(1, 401))
        assert {step: drawn[step] for step in kept} == pytest.approx(kept, rel=1e-6)
        found = [(event["event"], event["step"]) for event in events(disk / "run")]
        assert ("skipped", 200) in found
        assert ranks.output().count("metrics.jsonl cannot be written: No space left on device; kept in memory") == 1
        assert ranks.output().count("events.jsonl cannot be written: No space left on device; kept in memory") == 1
        assert "metrics.jsonl can be written again; nothing is lost" in ranks.output()
        assert "Traceback" not in ranks.output()


def test_a_disk_that_stays_full_changes_no_exit_code(corpus: Path, tmp_path: Path) -> None:
    """Its log lies there too, as under Slurm."""
    arguments = [f"data.path={corpus}", "data.num_workers=0", "train.save_every=0", "train.max_steps=100"]
    arguments += ["train.batch_size=1"]
    with disks.small_disk(tmp_path / "small", "2m") as disk:
        # A process whose streams the interpreter closes.
        with running(arguments, disk / "run", size=1, plant=disks.start_again, log=disk / "log") as ranks:
            ranks.wait_for_step(5)
            disks.fill(disk)
            assert ranks.wait() == [0], ranks.output()
        assert ranks.records()[-1]["step"] < 100
