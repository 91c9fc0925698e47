"""Ranks that see different files of a run: they stop, or wait for the one whose view is old."""

import functools
import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from tests.promises import promises
from tests.train import disks
from tests.train.checkpoints import names
from tests.train.ranks import Ranks


@pytest.fixture(scope="module")
def arguments(corpus: Path) -> list[str]:
    return [f"data.path={corpus}", "data.num_workers=0", "train.save_every=2", "train.keep=2"]


@pytest.fixture(scope="module")
def two(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, 6 steps."""
    disks.needs_mounts()
    folder = tmp_path_factory.mktemp("two") / "run"
    Ranks([*arguments, "train.max_steps=6"], folder).finish()
    return folder


def see_nothing(folder: Path, rank: str, seconds: float, retry: str) -> None:
    """To plant: one rank finds an empty folder, forever or for a while."""
    os.environ["SSSCALE_READ_RETRY_S"] = retry
    if os.environ["RANK"] != rank:
        return
    # The thread that takes the mount away must have been started in its name space.
    disks.own_mounts()
    disks.hide(folder)
    if seconds:
        threading.Thread(target=lambda: (time.sleep(seconds), disks.show(folder)), daemon=True).start()


@promises(
    "Ranks",
    "one rank does not see the newest checkpoint, or reads other bytes in it than the other ranks",
    seen=("the ranks try again for 30 s and then end: `rank 1 on HOST: … is missing, which other ranks do not find`"),
    code="2",
    identical="nothing is changed",
    do="check the mounts and the memory of the host that the message names",
)
@pytest.mark.parametrize("hidden", ["checkpoints", "checkpoints/step-00000006"])
def test_ranks_that_see_different_checkpoints_stop(
    hidden: str, two: Path, arguments: list[str], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(two, tmp_path / "run"))
    plant = functools.partial(see_nothing, copy / hidden, "1", 0.0, "1")
    ranks = Ranks([*arguments, "train.max_steps=8"], copy, plant=plant)
    assert ranks.wait() == [2, 2], ranks.output()
    assert "error: rank 1 on " in ranks.output()
    assert "step-00000006/checksums.json is missing, which other ranks do not find" in ranks.output()
    assert names(copy) == ["step-00000004", "step-00000006"]


def test_a_view_that_is_old_for_a_moment_is_waited_for(two: Path, arguments: list[str], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(two, tmp_path / "run"))
    plant = functools.partial(see_nothing, copy / "checkpoints/step-00000006", "1", 4.0, "30")
    ranks = Ranks([*arguments, "train.max_steps=8"], copy, plant=plant)
    ranks.finish()
    assert "which other ranks do not find; trying again" in ranks.output()
    assert "step-00000006 (step 6)" in ranks.output()
