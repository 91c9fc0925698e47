"""Data that cannot be read, and data or weights that the run would take for its own."""

import errno
import functools
import os
import re
import shutil
import signal
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from ssscale.data.shards import RowStore
from ssscale.data.stream import _Microbatches
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import list_checkpoints
from tests.promises import promises
from tests.tokenizers_of_data import exchange_tokens, write_in_another_form
from tests.train.ranks import Ranks
from tests.train.same import compare


def break_row(rank: int, number: int) -> None:
    """In one rank, the row that is read as the `number`-th cannot be."""
    whole, read = RowStore.__getitem__, []

    def broken(self: RowStore, row: int) -> object:
        read.append(row)
        if os.environ["RANK"] == str(rank) and len(read) == number:
            raise UserError(f"shard {self.shard_of(row)} is missing or corrupt")
        return whole(self, row)

    patch.object(RowStore, "__getitem__", broken).start()


@pytest.fixture
def arguments(corpus: Path) -> list[str]:
    return [f"data.path={corpus}", "train.save_every=1000", "train.max_steps=6", "data.num_workers=0"]


@promises(
    "Files and disks",
    "a shard that a rank reads in mid-run is damaged or gone",
    seen="all ranks save the last step and end: `… is missing or corrupt; step N is saved`",
    code="2",
    identical="yes",
    do="repair the shard, and run the same command again",
)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_steps_before_unreadable_data_are_saved(rank: int, arguments: list[str], tmp_path: Path) -> None:
    """Each of two ranks reads two rows per step, so the ninth is of step 5."""
    ranks = Ranks(arguments, tmp_path / "run", plant=functools.partial(break_row, rank, 9))
    assert ranks.wait() == [2, 2]
    assert "is missing or corrupt; step 4 is saved, the same command continues with whole data" in ranks.output()
    assert [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-00000004"]
    Ranks(arguments, tmp_path / "run").finish()
    Ranks(arguments, tmp_path / "plain").finish()
    compare(tmp_path / "plain", tmp_path / "run")


def fail_to_map(times: int) -> None:
    """In rank 1, shards cannot be mapped at the first `times` attempts."""
    whole, failed = np.memmap, []

    def failing(*given: object) -> object:
        if os.environ["RANK"] == "1" and len(failed) < times:
            failed.append(1)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return whole(*given)

    patch.object(np, "memmap", failing).start()
    os.environ["SSSCALE_READ_RETRY_S"] = "30" if times == 1 else "0"


@promises(
    "Files and disks",
    "a shard cannot be read for a moment (EIO, ESTALE)",
    seen="the rank tries again for 30 s (`SSSCALE_READ_RETRY_S`); then all ranks save the last step and end",
    code="0; 2 after 30 s",
    identical="yes",
    do="after code 2, repair the disk, and run the same command again",
)
def test_a_shard_is_read_at_another_attempt(arguments: list[str], tmp_path: Path) -> None:
    ranks = Ranks(arguments, tmp_path / "run", plant=functools.partial(fail_to_map, 99))
    assert ranks.wait() == [2, 2]
    assert re.search(r"shard \S+\.mds\S* cannot be read: Stale file handle", ranks.output())
    Ranks(arguments, tmp_path / "run", plant=functools.partial(fail_to_map, 1)).finish()
    Ranks(arguments, tmp_path / "plain").finish()
    compare(tmp_path / "plain", tmp_path / "run")


def kill_a_worker(number: int) -> None:
    """In rank 1, the worker that reads the microbatch `number` of a part is killed, as by the kernel when memory is full."""
    whole = _Microbatches.__getitem__

    def killed(self: _Microbatches, index: int) -> object:
        if os.environ["RANK"] == "1" and index == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(self, index)

    patch.object(_Microbatches, "__getitem__", killed).start()


@promises(
    "Ranks",
    "a worker of the data loader of one rank is killed, as when the memory of its host is full",
    seen="all ranks end: `rank 1 on HOST, step 3, data: a worker of the data loader was killed (…): look for Out of memory`",
    code="76",
    identical="from the last save",
    do="run the same command again; if it happens again, lower `data.num_workers` or `data.prefetch`",
)
def test_a_killed_worker_of_the_loader_is_named(arguments: list[str], tmp_path: Path) -> None:
    """torch raises the error wherever the rank is at that moment."""
    ranks = Ranks([*arguments, "data.num_workers=1"], tmp_path / "run", plant=functools.partial(kill_a_worker, 8))
    assert ranks.wait() == [76, 76], ranks.output()
    assert re.search(
        r"stopped: rank 1 on \S+, step \d, \w+: a worker of the data loader was killed \(DataLoader worker \(pid.*"
        r"Killed\): look for `Out of memory` in `dmesg` of this host, .*; the same command continues",
        ranks.output(),
    )
    assert "Traceback" not in ranks.output()


def test_before_the_first_step_nothing_is_saved(arguments: list[str], tmp_path: Path) -> None:
    ranks = Ranks(arguments, tmp_path / "run", plant=functools.partial(break_row, 1, 1))
    assert ranks.wait() == [2, 2]
    assert "is saved" not in ranks.output()
    assert not list_checkpoints(tmp_path / "run/checkpoints")


def _train(data: Path, run: Path, *changes: str) -> tuple[int | None, str]:
    keys = [f"data.path={data}", "train.save_every=0", "train.max_steps=2", "data.num_workers=0", *changes]
    ranks = Ranks(keys, run, size=1)
    return ranks.wait()[0], ranks.output()


def appear(folder: Path, late: Path) -> None:
    """After the checks before the run, a data folder is there."""
    from launch import pretrain

    started = pretrain.pretrain

    def begin(*given: object) -> None:
        shutil.copytree(folder, late)
        started(*given)

    patch.object(pretrain, "pretrain", begin).start()


STAGE = ["train.stages.0.tokens=1024", "train.stages.0.schedule.warmup_tokens=0", "train.stages.1.mix=null"]


def test_data_of_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    """Two tokens of `other` are exchanged. `same` has the same tokenizer, written in another form."""
    other, same = (shutil.copytree(corpus, tmp_path / name / "data") for name in ("other", "same"))
    exchange_tokens(other)
    write_in_another_form(same)
    said = f"data.path={other} was packed with another tokenizer than"
    assert _train(corpus, tmp_path / "run", "train.save_every=1")[0] == 0
    begin = f"init_from={tmp_path / 'run'}"
    code, output = _train(other, tmp_path / "init", begin)
    assert (code, said in output) == (2, True), output
    code, output = _train(other, tmp_path / "run", "train.max_steps=3", "data.accept_changed=true")
    assert (code, said in output) == (2, True), output
    code, output = _train(corpus, tmp_path / "stage", *STAGE, f"train.stages.1.data_path={other}")
    assert (code, f"the data folder {other} was packed with another tokenizer than {corpus}" in output) == (2, True)
    assert not (tmp_path / "stage").exists()  # said before the run begins, as both folders are there
    late = tmp_path / "late"
    keys = [*STAGE, f"train.stages.1.data_path={late}", "train.save_every=1"]
    ranks = Ranks(
        [f"data.path={corpus}", "train.max_steps=2", "data.num_workers=0", *keys],
        tmp_path / "stage",
        size=1,
        plant=functools.partial(appear, other, late),
    )
    assert ranks.wait() == [2]
    assert f"data.path={late} was packed with another tokenizer than" in ranks.output()
    assert _train(same, tmp_path / "again", begin)[0] == 0
    assert _train(corpus, tmp_path / "two", *STAGE, f"train.stages.1.data_path={same}")[0] == 0


def test_weights_of_other_heads_are_refused(corpus: Path, tmp_path: Path) -> None:
    """The shapes are the same, and so nothing else would notice."""
    assert _train(corpus, tmp_path / "run", "train.save_every=1", "model.num_heads=2")[0] == 0
    code, output = _train(corpus, tmp_path / "init", "model.num_heads=4", f"init_from={tmp_path / 'run'}")
    assert code == 2
    assert "has num_heads=2, and model.num_heads is 4 here" in output
    four = tmp_path / "four"
    assert _train(corpus, four, "train.save_every=1", "model.num_heads=4", "train.max_steps=1")[0] == 0
    (own,) = list_checkpoints(four / "checkpoints")
    shutil.copytree(list_checkpoints(tmp_path / "run/checkpoints")[-1], own.with_name("step-00000002"))
    code, output = _train(corpus, four, "model.num_heads=4", "train.max_steps=3")
    assert code == 2
    assert "has num_heads=2, and model.num_heads is 4 here" in output
