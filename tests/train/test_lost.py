"""No way to lose a run: checkpoints that break, vanish, hide, or are deleted while somebody reads them."""

import errno
import functools
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.promises import promises
from tests.train import disks
from tests.train.checkpoints import names
from tests.train.commands import let_others_in, run_command, start_command
from tests.train.ranks import Ranks, running
from tests.train.same import compare

ROOT = Path(__file__).resolve().parents[2]
EVERY = ["data.num_workers=0", "train.save_every=2", "train.keep=2"]


@pytest.fixture(scope="module")
def arguments(corpus: Path) -> list[str]:
    return [f"data.path={corpus}", *EVERY]


@pytest.fixture(scope="module")
def run(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, 6 steps, checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("lost") / "run"
    Ranks([*arguments, "train.max_steps=6"], folder, size=1).finish()
    return folder


@pytest.fixture(scope="module")
def longer(arguments: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, 8 steps without a stop."""
    folder = tmp_path_factory.mktemp("longer") / "run"
    Ranks([*arguments, "train.max_steps=8"], folder, size=1).finish()
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run", symlinks=True))


def cut(checkpoint: Path) -> None:
    file = checkpoint / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a file cut short": (cut, "rank-00000.safetensors has"),
    "no list of checksums": (lambda path: (path / "checksums.json").unlink(), "checksums.json is missing"),
    "an empty list": (lambda path: (path / "checksums.json").write_text("{}"), "checksums.json is broken: it does not"),
    "no state": (lambda path: (path / "state.json").unlink(), "state.json is missing"),
    "nothing in it": (lambda path: [file.unlink() for file in path.iterdir()] and None, "checksums.json is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_retention_never_counts_a_broken_checkpoint(
    damage: str, copy: Path, longer: Path, arguments: list[str]
) -> None:
    """The newest is broken, later saves have other steps: the whole ones have to stay."""
    break_it, sentence = DAMAGES[damage]
    break_it(copy / "checkpoints/step-00000006")
    other = [*arguments, "train.save_every=5", "train.keep=1", "train.max_steps=5"]
    ranks = Ranks(other, copy, size=1)
    ranks.finish()
    assert names(copy) == ["step-00000005", "step-00000006.broken"]
    assert f"checkpoints/step-00000006/{sentence}" in ranks.output()
    assert "step-00000006 is broken and put aside as step-00000006.broken" in ranks.output()
    assert f"resumed from {copy / 'checkpoints/step-00000004'} (step 4)" in ranks.output()
    again = Ranks([*arguments, "train.max_steps=8"], copy, size=1)
    again.finish()
    assert "(step 5)" in again.output()
    compare(longer, copy)
    assert names(copy) == ["step-00000006", "step-00000008"]


def test_what_replaces_a_broken_checkpoint_frees_its_room(copy: Path, run: Path, arguments: list[str]) -> None:
    cut(copy / "checkpoints/step-00000006")
    ranks = Ranks([*arguments, "train.max_steps=6"], copy, size=1)
    ranks.finish()
    assert "(step 4)" in ranks.output()
    assert names(copy) == ["step-00000004", "step-00000006"]
    compare(run, copy)


# ---- what cannot be read for the moment


def refusing(path: str, code: int, times: int = 10**6) -> Callable[[], None]:
    environment = {"FAULT_PATH": path, "FAULT_ERRNO": str(code), "FAULT_TIMES": str(times)}
    return functools.partial(disks.refuse, environment | {"SSSCALE_READ_RETRY_S": "1" if times > 9 else "30"})


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[disks.Preloading]:
    preloading = disks.Preloading(disks.faulty_library(tmp_path_factory.mktemp("library")))
    yield preloading
    preloading.end()


@promises(
    "Files and disks",
    "a checkpoint cannot be read (EIO, ESTALE, EACCES)",
    seen=(
        "the command tries again for 30 s (`SSSCALE_READ_RETRY_S`) and then says `… cannot be read: Input/output error; "
        "nothing there was changed`"
    ),
    code="2",
    identical="nothing is changed",
    do="repair the disk; or move the checkpoint away, and the run continues from the one before it",
)
@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("step-00000006/rank-00000.safetensors", errno.EIO),
        ("step-00000006/checksums.json", errno.EACCES),
        ("run/checkpoints", errno.ESTALE),  # the folder itself, and all in it
    ],
)
def test_what_cannot_be_read_is_not_broken(
    path: str, code: int, copy: Path, arguments: list[str], faulty: disks.Preloading
) -> None:
    before, metrics = names(copy), (copy / "metrics.jsonl").read_bytes()
    with faulty.used():
        ranks = Ranks([*arguments, "train.max_steps=8"], copy, size=1, plant=refusing(path, code))
    assert ranks.wait() == [2], ranks.output()
    last = ranks.output().splitlines()[-1]
    assert last.startswith("error: ")
    assert f"{path} cannot be read: {os.strerror(code)}" in last
    assert "Traceback" not in ranks.output()
    assert names(copy) == before
    assert (copy / "metrics.jsonl").read_bytes() == metrics
    again = Ranks([*arguments, "train.max_steps=8"], copy, size=1)
    again.finish()
    assert "step-00000006 (step 6)" in again.output()


def test_what_can_be_read_the_third_time_is_read(
    copy: Path, longer: Path, arguments: list[str], faulty: disks.Preloading
) -> None:
    plant = refusing("step-00000006/state.json", errno.ESTALE, times=2)
    with faulty.used():
        ranks = Ranks([*arguments, "train.max_steps=8"], copy, size=1, plant=plant)
    ranks.finish()
    assert "state.json cannot be read: Stale file handle; trying again" in ranks.output()
    assert "step-00000006 (step 6)" in ranks.output()
    compare(longer, copy)


# ---- checkpoints that are not there any more


def unmount(run: Path) -> None:
    """`checkpoints` is a link to another disk, which is not mounted."""
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to("/nowhere/checkpoints")


def empty(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()


def stateless(run: Path) -> None:
    for path in (run / "checkpoints").iterdir():
        (path / "state.json").unlink()


def a_file(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").touch()


LOST: dict[str, tuple[Callable[[Path], None], str]] = {
    "a link that leads nowhere": (unmount, "checkpoints is a link to /nowhere/checkpoints, which does not exist"),
    "an empty mount point": (empty, "has saved checkpoints before"),
    "removed": (lambda run: shutil.rmtree(run / "checkpoints"), "has saved checkpoints before"),
    "no state.json anywhere": (stateless, "step-00000006/state.json is missing"),
    "a file": (a_file, "checkpoints cannot be read: Not a directory"),
}


def impatient() -> None:
    os.environ["SSSCALE_READ_RETRY_S"] = "0"


@promises(
    "Files and disks",
    "the folder `checkpoints` is missing, empty, or a link to a disk that is not mounted",
    seen="`… has saved checkpoints before (first_save.json) and … has none now`",
    code="2",
    identical="nothing is changed",
    do="mount the disk or restore the folder; or begin again: give another `run_dir`, or move the run folder away",
)
@pytest.mark.parametrize("loss", LOST)
def test_a_run_that_has_saved_never_begins_again_by_itself(
    loss: str, copy: Path, run: Path, arguments: list[str]
) -> None:
    lose, sentence = LOST[loss]
    lose(copy)
    metrics = (copy / "metrics.jsonl").read_bytes()
    ranks = Ranks([*arguments, "train.max_steps=8"], copy, size=1, plant=impatient)
    assert ranks.wait() == [2], ranks.output()
    assert sentence in ranks.output().splitlines()[-1]
    assert str(copy) in ranks.output().splitlines()[-1]
    assert (copy / "metrics.jsonl").read_bytes() == metrics
    if (copy / "checkpoints").is_dir():
        shutil.rmtree(copy / "checkpoints")
    (copy / "checkpoints").unlink(missing_ok=True)
    shutil.copytree(run / "checkpoints", copy / "checkpoints")  # the disk is there again
    again = Ranks([*arguments, "train.max_steps=8"], copy, size=1)
    again.finish()
    assert "step-00000006 (step 6)" in again.output()


def as_nobody() -> None:
    os.setegid(65534)
    os.seteuid(65534)
    impatient()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without permission")
def test_checkpoints_that_may_not_be_listed(copy: Path, corpus: Path, arguments: list[str], tmp_path: Path) -> None:
    let_others_in(corpus.parent, copy.parent)
    for path in (copy, *copy.rglob("*")):
        os.chown(path, 65534, 65534)
    os.chown(copy / "checkpoints", 0, 0)
    (copy / "checkpoints").chmod(0o700)
    log = tmp_path / "log"
    log.touch(0o666)
    metrics = (copy / "metrics.jsonl").read_bytes()
    keys = [*arguments, "train.max_steps=8", f"data.cache={tmp_path / 'cache'}"]
    ranks = Ranks(keys, copy, size=1, plant=as_nobody, log=log)
    assert ranks.wait() == [2], ranks.output()
    assert f"{copy / 'checkpoints'} cannot be read: Permission denied" in ranks.output()
    assert (copy / "metrics.jsonl").read_bytes() == metrics


@promises(
    "Stops and starts",
    "the run is killed before its first save",
    seen="the next start begins again with step 1",
    code="",
    identical="yes",
    do="run the same command again",
)
def test_a_run_killed_before_its_first_save_begins_again(corpus: Path, tmp_path: Path) -> None:
    few = [f"data.path={corpus}", "data.num_workers=0", "train.save_every=100"]
    with running([*few, "train.max_steps=5000"], tmp_path / "run", size=1) as ranks:
        ranks.wait_for_step(3)
        ranks.send(signal.SIGKILL)
        ranks.wait()
    again = Ranks([*few, "train.max_steps=4"], tmp_path / "run", size=1)
    again.finish()
    assert [record["step"] for record in again.records() if "loss" in record] == [1, 2, 3, 4]


# ---- readers of a run that trains


def sums(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


class Reader:
    """A command that stands still in the middle of a checkpoint: at the n-th time that it opens a file."""

    def __init__(
        self, module: str, arguments: list[str], faulty: disks.Preloading, path: str, opens: int, flag: Path
    ) -> None:
        self.flag, self.log = flag, flag.with_name("reader.log")
        fault = {"FAULT_PATH": path, "FAULT_SKIP": str(opens - 1), "FAULT_FLAG": str(flag), "SSSCALE_READ_RETRY_S": "1"}
        with faulty.used():
            self.process = start_command(module, arguments, self.log, functools.partial(disks.refuse, fault))
        disks.wait_until(lambda: flag.exists() or not self.process.is_alive())
        assert self.process.is_alive(), self.log.read_text()

    def end(self) -> tuple[int | None, str]:
        """Let it go on; its exit code and what it said."""
        self.flag.unlink()
        self.process.join(120)
        return self.process.exitcode, self.log.read_text()


WEIGHTS = "step-00000006/rank-00000.safetensors"


def test_retention_waits_for_an_export(
    copy: Path, run: Path, arguments: list[str], faulty: disks.Preloading, tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    undisturbed = [f"checkpoint={run}", f"out={tmp_path / 'undisturbed'}"]
    assert run_command("launch.export", undisturbed, tmp_path / "log")[0] == 0
    given = [f"checkpoint={copy}", f"out={out}"]
    reader = Reader("launch.export", given, faulty, WEIGHTS, 2, tmp_path / "flag")  # the first is for its checksum
    ranks = Ranks([*arguments, "train.keep=1", "train.max_steps=10"], copy, size=1)
    ranks.finish()
    code, errors = reader.end()
    assert code == 0, errors
    assert names(copy) == ["step-00000006", "step-00000010"]
    assert sums(out) == sums(tmp_path / "undisturbed")
    Ranks([*arguments, "train.keep=1", "train.max_steps=12"], copy, size=1).finish()
    assert names(copy) == ["step-00000012"]  # nobody reads it any more


@promises(
    "Files and disks",
    "a checkpoint is deleted while it is evaluated or exported",
    seen=(
        "the training run keeps the checkpoint until the command has read it; a file system without locks cannot do this, "
        "and the command says `… was deleted or replaced while it was read`"
    ),
    code="2",
    do="run the same command again; if it happens again, set a larger `train.keep`",
)
@pytest.mark.parametrize(("command", "opens"), [("export", 2), ("evaluate", 1)])
def test_a_checkpoint_that_vanishes_while_it_is_read(
    command: str, opens: int, copy: Path, faulty: disks.Preloading, tmp_path: Path
) -> None:
    """As on a file system without locks: one sentence, and nothing half."""
    out = tmp_path / "exported"
    more = [f"out={out}"] if command == "export" else ["tasks=none", "baseline=false"]
    given = f"checkpoint={copy / 'checkpoints/step-00000006'}"
    reader = Reader(f"launch.{command}", [given, *more], faulty, WEIGHTS, opens, tmp_path / "flag")
    os.replace(copy / "checkpoints/step-00000006", copy / "checkpoints/step-00000006.partial")
    shutil.rmtree(copy / "checkpoints/step-00000006.partial")
    code, errors = reader.end()
    assert code == 2, errors
    assert "step-00000006" in errors.splitlines()[-1]
    assert "deleted" in errors.splitlines()[-1]
    assert "Traceback" not in errors
    assert not out.exists()
    assert not (copy / "eval").exists()


def test_evaluation_takes_the_newest_whole_checkpoint_and_says_so(copy: Path, tmp_path: Path) -> None:
    weights = copy / "checkpoints/step-00000006/rank-00000.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    arguments = [f"checkpoint={copy}", "tasks=none", "baseline=false"]
    code, output = run_command("launch.evaluate", arguments, tmp_path / "log")
    assert code == 0, output
    assert "rank-00000.safetensors is broken: its checksum does not match; the checkpoint before it is taken" in output
    (results,) = (copy / "eval").glob("*.json")
    assert results.name == "step-00000004.json"
    assert json.loads(results.read_text())["checkpoint"].endswith("step-00000004")


def test_an_evaluation_names_what_a_checkpoint_lacks(copy: Path, tmp_path: Path) -> None:
    for path in (copy / "checkpoints").iterdir():
        (path / "checksums.json").unlink()
    code, output = run_command("launch.evaluate", [f"checkpoint={copy}", "tasks=none"], tmp_path / "log")
    assert code == 2, output
    assert output.splitlines()[-1].endswith("checkpoints/step-00000006/checksums.json is missing")
