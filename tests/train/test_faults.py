"""Faults planted in one rank: NaN, spikes, hanging, dying, running out of memory."""

import functools
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.hooks.spikes import SpikeDetector
from ssscale.train.watchdog import Watchdog
from tests.promises import promises
from tests.train.faults import events, plant
from tests.train.ranks import Ranks, running, state_of


@pytest.fixture
def arguments(corpus: Path) -> list[str]:
    return [f"data.path={corpus}", "train.save_every=4", "data.num_workers=0"]


@promises(
    "Losses",
    "the gradients of one rank are NaN in one step",
    seen="all ranks skip the step, and no weight changes; `events.jsonl` records the step",
    code="",
)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_nan_on_one_rank_skips_the_step_on_all(zero: int, arguments: list[str], tmp_path: Path) -> None:
    arguments = [*arguments, "train.max_steps=6", f"parallel.zero_stage={zero}"]
    Ranks(arguments, tmp_path / "run", plant=functools.partial(plant, "nan", (3,))).finish()
    ranks = Ranks(arguments, tmp_path / "run")
    assert [(event["event"], event["step"]) for event in events(ranks.run_dir)] == [("skipped", 3)]
    state = state_of(list_checkpoints(tmp_path / "run/checkpoints")[-1])
    assert (state["step"], state["applied_steps"]) == (6, 5)
    losses = [record["loss"] for record in ranks.records() if "loss" in record]
    assert [loss == loss for loss in losses] == [True, True, False, True, True, True]
    ranks.finish()


@promises(
    "Losses",
    "`train.max_skipped` steps in a row have NaN gradients",
    seen=(
        "the run goes back to the last checkpoint and skips the rows read since then; `events.jsonl` records how "
        "many, and the state of the checkpoints which"
    ),
    code="",
)
def test_nan_in_a_row_goes_back_and_passes_over_the_rows(arguments: list[str], tmp_path: Path) -> None:
    arguments = [*arguments, "train.max_steps=12", "train.max_skipped=2"]
    ranks = Ranks(arguments, tmp_path / "run", plant=functools.partial(plant, "nan", (6, 7)))
    ranks.finish()
    found = [(event["event"], event["step"]) for event in events(ranks.run_dir)]
    assert found == [("skipped", 6), ("skipped", 7), ("rollback", 7)]
    assert "back to step 4, passing over 12 rows" in ranks.output()
    state = state_of(list_checkpoints(tmp_path / "run/checkpoints")[-1])
    assert (state["step"], state["applied_steps"], state["samples"]) == (12, 12, 60)
    assert state["skipped"] == [[4, 12]]
    records = [record for record in ranks.records() if "loss" in record]
    assert [record["step"] for record in records] == list(range(1, 13))


def staged(first: str, second: str) -> str:
    """Six steps of one stage and any number of the next. first, second: keys of the stages."""
    schedule = "schedule: {kind: constant, lr: 1e-3}"
    stages = [
        f"{{name: a, tokens: {6 * 4 * 256}, {schedule}, {first}}}",
        f"{{name: b, tokens: 99999, {schedule}, {second}}}",
    ]
    return f"train.stages=[{', '.join(stages)}]"


def rows_at(ranks: Ranks, step: int) -> dict[str, int]:
    """Rows of each source up to a step, those that were passed over included."""
    (record,) = (record for record in ranks.records() if record["step"] == step and "loss" in record)
    return {name.removeprefix("tokens/"): count // 256 for name, count in record.items() if name.startswith("tokens/")}


def test_rows_of_two_mixes_are_passed_over_in_both(arguments: list[str], tmp_path: Path) -> None:
    """NaN after the mix has changed: each source goes on after its rows that were read, the checkpoint's and the NaN's."""
    stages = staged("mix: {code: 1.0}", "mix: {docs: 1.0}")
    arguments = [*arguments, stages, "train.max_steps=12", "train.max_skipped=2"]
    ranks = Ranks(arguments, tmp_path / "run", plant=functools.partial(plant, "nan", (7, 8)))
    ranks.finish()
    assert "back to step 4, passing over 16 rows" in ranks.output()
    assert rows_at(ranks, 12) == {"code": 6 * 4 + 8, "docs": 6 * 4 + 8}
    state = state_of(list_checkpoints(tmp_path / "run/checkpoints")[-1])
    assert (state["samples"], state["skipped"]) == (12 * 4 + 16, [[4, 8, 6, 8]])
    Ranks([*arguments, "train.max_steps=14"], tmp_path / "run").finish()  # and the state says so to the next start
    assert rows_at(ranks, 14) == {"code": 6 * 4 + 8, "docs": 8 * 4 + 8}


def test_rows_of_two_folders_are_passed_over_in_both(corpus: Path, arguments: list[str], tmp_path: Path) -> None:
    """NaN after the folder has changed, where nothing was saved at the change."""
    shutil.copytree(corpus, tmp_path / "other")
    stages = staged("mix: {code: 1.0}", f"mix: {{docs: 1.0}}, data_path: {tmp_path / 'other'}")
    arguments = [*arguments, stages, "train.max_skipped=2"]
    Ranks([*arguments, "train.max_steps=4"], tmp_path / "run").finish()
    arguments = [*arguments, "train.max_steps=10", "train.save_every=0"]
    ranks = Ranks(arguments, tmp_path / "run", plant=functools.partial(plant, "nan", (3, 4)))  # steps 7 and 8
    ranks.finish()
    assert "back to step 4, passing over 16 rows" in ranks.output()
    assert [rows_at(ranks, step)["code"] for step in (4, 5, 6)] == [16, 28, 32]
    assert [rows_at(ranks, step)["docs"] for step in (7, 10)] == [12, 24]


@promises(
    "Losses",
    "the gradients are NaN again after the run has gone back to the same checkpoint 3 times",
    seen="the run ends: `… with other rows: lower the learning rate`",
    code="77",
    do="lower the learning rate; `events.jsonl` has the steps and how many rows were skipped",
)
def test_repeated_nan_ends_the_run(arguments: list[str], tmp_path: Path) -> None:
    arguments = [*arguments, "train.max_steps=12", "train.max_skipped=2"]
    ranks = Ranks(arguments, tmp_path / "run", plant=functools.partial(plant, "nan", tuple(range(6, 99))))
    assert ranks.wait() == [77, 77]
    assert "after going back to step 4 3 times with other rows: lower the learning rate" in ranks.output()


@promises(
    "Losses",
    "the loss jumps (a robust z above `train.spike_z`)",
    seen="`events.jsonl` records the step, its loss, its z and its rows; training continues",
    code="",
    do="look at these rows",
)
@pytest.mark.parametrize("then", ["", "the batch grows", "the folder changes"])
def test_a_spike_is_noted_with_its_rows(then: str, corpus: Path, arguments: list[str], tmp_path: Path) -> None:
    """Also where the next step has another batch size, or rows of another folder."""
    arguments = [*arguments, "train.max_steps=26"]
    if then == "the batch grows":
        warmup = f"train.stages.0.batch_warmup=[{{batch_size: 4, tokens: {24 * 4 * 256}}}]"
        arguments += [warmup, "train.batch_size=8"]
    if then == "the folder changes":
        shutil.copytree(corpus, tmp_path / "other")
        stages = staged("mix: {code: 1.0}", f"mix: {{docs: 1.0}}, data_path: {tmp_path / 'other'}")
        arguments += [stages, f"train.stages.0.tokens={24 * 4 * 256}"]
    ranks = Ranks(arguments, tmp_path / "run", plant=functools.partial(plant, "spike", (24,)))
    ranks.finish()
    (event,) = events(ranks.run_dir)
    assert (event["event"], event["step"]) == ("loss_spike", 24)
    assert sum(len(rows) for rows in event["rows"].values()) == 4
    assert then != "the folder changes" or event["rows"].keys() == {"code"}


def test_spikes_are_robust_deviations() -> None:
    generator = random.Random(0)
    detector = SpikeDetector(threshold=8.0)
    scores = [detector.score(3.0 + generator.gauss(0, 0.05)) for _ in range(300)]
    assert not any(scores)
    assert detector.score(float("nan")) is None
    z = detector.score(4.0)
    assert z is not None
    assert 15 < z < 27  # one nat is 20 deviations
    assert detector.score(4.0) is not None  # the first one has not widened the window
    assert SpikeDetector(threshold=0.0).score(99.0) is None


def flip_after_a_save() -> None:
    """The save of step 4 is written before step 5 begins: its thread may else be slower than the steps until the run ends."""
    from ssscale.train.save import CheckpointWriter

    start = CheckpointWriter.start

    def start_and_write(self: CheckpointWriter, *arguments: Any) -> None:
        start(self, *arguments)
        assert self.thread is not None
        self.thread.join()

    CheckpointWriter.start = start_and_write  # type: ignore[method-assign]
    plant("bit", (6,))


@promises(
    "Ranks",
    "a weight differs by one bit between two ranks",
    seen=(
        "the run ends at the next multiple of `train.guard_every` (100) steps, before it saves that step: "
        "`step 8: norm.weight differs …`"
    ),
    code="79",
    identical="from the last save",
    do="run the same command again; a machine where it happens again is broken: exclude it",
)
def test_a_flipped_bit_ends_the_run_before_it_is_saved(arguments: list[str], tmp_path: Path) -> None:
    arguments = [*arguments, "train.max_steps=12", "train.guard_every=4", "parallel.zero_stage=0"]
    ranks = Ranks(arguments, tmp_path / "run", plant=flip_after_a_save)
    assert ranks.wait() == [79, 79]
    assert "step 8: norm.weight differs between ranks 0, 1: run the same command again" in ranks.output()
    assert len(list_checkpoints(tmp_path / "run/checkpoints")) == 1  # of step 4


def hang_on_one_disk() -> None:
    """Ranks of one machine see each other's files at once, and need not wait for them as long as those of many nodes."""
    from ssscale.train import watchdog

    watchdog.GATHER_S = 2.0
    plant("hang", (3,))


@promises(
    "Ranks",
    "one rank hangs",
    seen=(
        "the run ends: `no progress for 3 s at step 3: rank 1 (forward on HOST) is behind the others`; the stacks of all "
        "ranks are in `stacks/`"
    ),
    code="76",
    identical="from the last save",
    do="run the same command again; if it happens again, read `stacks/rank-00001.txt`",
)
def test_a_hanging_rank_is_named_and_all_stacks_are_written(arguments: list[str], tmp_path: Path) -> None:
    arguments = [*arguments, "train.max_steps=12", "train.watchdog=3"]
    with running(arguments, tmp_path / "run", plant=hang_on_one_disk) as ranks:
        assert ranks.wait(60) == [76, 76]
        assert "no progress for 3 s at step 3: rank 1 (forward on" in ranks.output()
        assert "is behind the others" in ranks.output()
        assert "tests/train/faults.py" in (tmp_path / "run/stacks/rank-00001.txt").read_text()
        assert "tests/train/faults.py" not in (tmp_path / "run/stacks/rank-00000.txt").read_text()


def test_a_run_that_hangs_at_the_same_step_four_times_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where srun returns another code, which the job script overrides with those of the file."""
    ended: list[int] = []
    monkeypatch.setattr("ssscale.train.watchdog.GATHER_S", 0.0)
    monkeypatch.setattr("ssscale.train.watchdog.time.sleep", lambda seconds: None)
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setenv("SSSCALE_EXIT_CODES", str(tmp_path / "codes"))
    for step in (3, 7, 7, 7, 7):
        watchdog = Watchdog(tmp_path, 0, 1, timeout=1)
        watchdog.begin(step)
        watchdog._end()
    assert ended == [76, 76, 76, 76, 70]
    assert (tmp_path / "codes").read_text().split() == ["76", "76", "76", "76", "70"]
    last = capsys.readouterr().err.splitlines()[-1]
    assert "no progress for 1 s at step 7: all ranks are in start; stacks are in" in last
    assert "the same has happened 4 times at this step" in last


def test_a_silent_rank_is_named(tmp_path: Path) -> None:
    place = {"rank": 0, "host": "a", "phase": "agreement", "step": 7, "marks": 1}
    watchdog = Watchdog(tmp_path, 0, 3, timeout=0)
    watchdog.step = 7
    assert watchdog.verdict({0: place, 2: place}) == "no progress for 0 s at step 7: no answer from rank 1"


@promises(
    "Ranks",
    "one rank ends without a message",
    seen="the other ranks end: `rank 0, step 3, backward: another rank is gone, without a report of rank 1 on HOST`",
    code="76",
    identical="from the last save",
    do="run the same command again",
)
@promises(
    "Ranks",
    "one rank ends with an error",
    seen=(
        "the rank gives its error; the other ranks end and repeat it: `rank 0, step 3, agreement: rank 1 has ended: …`; the "
        "traceback is in `stacks/error-rank-00001.txt`"
    ),
    code="the code of the failed rank",
    identical="from the last save",
    do="follow the message",
)
@promises(
    "Ranks",
    "one rank crashes (SIGSEGV)",
    seen="the other ranks end: `rank 1 has crashed: its stacks are in stacks/crash-rank-00001.txt`",
    code="70",
    identical="from the last save",
    do="look at the stacks in the file that the message names",
)
@promises(
    "Ranks",
    "the GPU of one rank fails, as with an ECC error (simulated)",
    seen="all ranks end: `rank 1 on HOST, step 3, forward: the GPU failed: CUDA error: …: look for Xid in dmesg`",
    code="76",
    identical="from the last save",
    do="run the same command again; if a host does it again, exclude it",
)
@promises(
    "Ranks",
    "one rank is out of GPU memory (simulated)",
    seen=(
        "the message gives the rank, the step, the phase, the memory that stays between steps, the memory that the step "
        "added, and the key to change"
    ),
    code="78",
    identical="from the last save",
    do="change the key that the message names",
)
@pytest.mark.parametrize(
    ("fault", "codes", "sentence"),
    [
        ("die", [76, 1], r"rank 0, step 3, \w+: another rank is gone, without a report of rank 1 on \S+ \("),
        # What a rank says of itself is what the others end with.
        (
            "bug",
            [70, 70],
            r"rank 0, step 3, \w+: rank 1 has ended: rank 1, step 3, forward: RuntimeError: NCCL and gloo",
        ),
        ("crash", [70, -11], r"rank 0, step 3, \w+: rank 1 has crashed: its stacks are in .*crash-rank-00001.txt"),
        ("memory", [78, 78], "rank 1, step 3, forward: out of GPU memory: 0.0 GiB stay between steps"),
        (
            "gpu",
            [76, 76],
            r"stopped: rank 1 on \S+, step 3, forward: the GPU failed: CUDA error: uncorrectable ECC error encountered: "
            "look for Xid in `dmesg` of this host, .*; the same command continues",
        ),
    ],
)
def test_a_rank_that_dies(fault: str, codes: list[int], sentence: str, arguments: list[str], tmp_path: Path) -> None:
    arguments = [*arguments, "train.max_steps=12"]
    with running(arguments, tmp_path / "run", plant=functools.partial(plant, fault, (3,))) as ranks:
        assert ranks.wait() == codes
        assert re.search(sentence, ranks.output())
        assert "Traceback" not in ranks.output()
    if fault == "bug":
        assert "whole traceback is in" in ranks.output()
        assert "do not like this tensor" in (tmp_path / "run/stacks/error-rank-00001.txt").read_text()


def on_every_rank(fault: str) -> None:
    plant(fault, (3,), int(os.environ["RANK"]))


@promises(
    "Ranks",
    "at the same step, a rank is lost or hangs, its GPU fails or a worker of its data loader is killed four times in a row, "
    "or all ranks get the same connection error twice in a row",
    seen="the run ends with another code, and Slurm does not restart it: `the same has happened 4 times at this step`",
    code="70",
    identical="from the last save",
    do="read the tracebacks in `stacks/`; remove this folder before the next start",
)
@pytest.mark.parametrize(
    ("planted", "ends"),
    [
        # Both ranks find the same error of their connections, twice at the same step: a mistake, not an accident.
        (functools.partial(on_every_rank, "backend"), [[76, 76], [70, 70]]),
        # One leaves without a word, as when its node crashes. The fourth time at the same step ends the job.
        (functools.partial(plant, "die", (3,)), [[76, 1], [76, 1], [76, 1], [70, 1]]),
        # As after a device-side assert.
        (functools.partial(plant, "gpu", (3,)), [[76, 76], [76, 76], [76, 76], [70, 70]]),
    ],
)
def test_what_happens_again_at_the_same_step_ends_the_job(
    planted: Callable[[], None], ends: list[list[int]], arguments: list[str], tmp_path: Path
) -> None:
    arguments = [*arguments, "train.max_steps=12", "train.save_every=0"]
    for codes in ends:
        with running(arguments, tmp_path / "run", plant=planted) as ranks:
            assert ranks.wait() == codes, ranks.output()
    assert f"the same has happened {len(ends)} times at this step" in ranks.output()
    assert "Traceback" not in ranks.output()
    with running(arguments, tmp_path / "run", plant=functools.partial(plant, "die", (4,))) as ranks:
        assert ranks.wait() == [76, 1], ranks.output()  # another step: an accident again
