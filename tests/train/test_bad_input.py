"""A mistake ends in one sentence that names what to mend, and leaves the run folder as it was."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from launch.pretrain import checked, main
from launch.training import check_writable
from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.options import last_of_each
from ssscale.parallel.groups import Groups
from ssscale.train.early import check_data
from ssscale.train.lock import RunLock
from tests.promises import promises
from tests.train.commands import let_others_in
from tests.train.ranks import Ranks, free_port

ROOT = Path(__file__).resolve().parents[2]
TINY = ["config=tiny_sb", "model.num_layers=1", "train.max_steps=1", "train.eval_every=0", "data.num_workers=0"]


def run(*arguments: str) -> None:
    main(last_of_each([*TINY, *arguments]))


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


CASES = [
    (["data.path=nowhere"], r"nowhere does not exist.*python -m data_prep pack --out nowhere --length 256"),
    (
        ["model.vocab_size=1000"],
        r"vocabulary of 1,024, but model.vocab_size=1000 has no rows .* set model.vocab_size=1024",
    ),
    (["data.length=128"], r"rows of 256 tokens, but data.length=128"),
    (["train.batch_size=15"], r"train.batch_size=15 is not a multiple"),
    (["model.mixers=[stickbreaking]", "model.position.method=rope"], r"position"),
]


@pytest.mark.parametrize(("arguments", "sentence"), CASES)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, corpus: Path, tmp_path: Path, groups: Groups
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(UserError, match=sentence):
        run(f"run_dir={run_dir}", f"data.path={corpus}", *arguments)
    assert not run_dir.exists()


@promises(
    "Files and disks",
    "a run is resumed with another model, optimizer or seed",
    seen="`… holds a run with another configuration: model.hidden_size was 128 and is now 64`",
    code="2",
    identical="nothing is changed",
    do="give the old value, or another `run_dir`",
)
def test_a_run_folder_is_never_overwritten(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    good = [*TINY, f"run_dir={run_dir}", f"data.path={corpus}"]
    Ranks(good, run_dir, size=1, small=False).finish()
    before = snapshot(run_dir)
    for wrong, sentence in (
        ("model.hidden_size=64", "model.hidden_size was 128 and is now 64"),
        ("optimizer.name=muon", "optimizer.name was adamw and is now muon"),
        ("data.shuffle_seed=5", "data.shuffle_seed was 0 and is now 5"),
    ):
        with pytest.raises(UserError, match=sentence):
            main([*good, wrong])
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="something that is not a run"):
        main([*TINY, f"run_dir={other}", f"data.path={corpus}"])
    assert snapshot(run_dir) == before
    assert snapshot(other) == {str(other / "thesis.txt"): b"years of work"}


def as_nobody() -> None:
    os.setegid(65534)
    os.seteuid(65534)


@contextmanager
def without_permission() -> Iterator[None]:
    """Root, who may write everywhere, is somebody else meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    as_nobody()
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@promises(
    "Files and disks",
    "the run folder may not be written",
    seen="`run_dir=… cannot be written: Permission denied`",
    code="2",
    identical="nothing is changed",
    do="get write permission, or give another `run_dir`",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without permission")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_folder_without_permission(mode: int, corpus: Path, tmp_path: Path) -> None:
    let_others_in(corpus.parent, tmp_path)
    shut = tmp_path / "shut"
    shut.mkdir(mode=mode)
    log = tmp_path / "log"
    log.touch(0o666)
    keys = [*TINY, f"data.path={corpus}", f"data.cache={tmp_path / 'cache'}"]
    ranks = Ranks(keys, shut / "run", size=1, plant=as_nobody, small=False, log=log)
    assert ranks.wait() == [2]
    assert f"error: run_dir={shut / 'run'} cannot be " in ranks.output()
    assert "Permission denied" in ranks.output()
    assert "Traceback" not in ranks.output()


def test_a_folder_without_permission_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    let_others_in(tmp_path)
    (tmp_path / "shut").mkdir(mode=0o555)
    sentence = f"run_dir={tmp_path}/shut/a/run cannot be written: Permission denied ({tmp_path}/shut)"
    check_writable(str(tmp_path / "new" / "run"))
    with without_permission():
        with pytest.raises(UserError, match=re.escape(sentence)):
            check_writable(f"{tmp_path}/shut/a/run")
        with pytest.raises(UserError, match=re.escape(sentence)):
            checked(
                ["config=tiny_sb", "data.path=s3://a/b", "data.cache=auto", f"run_dir={tmp_path}/shut/a/run"], 1, False
            )


def test_a_folder_in_use_is_found_before_torch_is_imported(corpus: Path, tmp_path: Path) -> None:
    arguments = [*TINY, f"data.path={corpus}", f"run_dir={tmp_path}"]
    lock = RunLock(tmp_path, slurm_job=None)
    sentence = f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}: wait for it or stop it"
    lock.acquire()
    try:
        with pytest.raises(UserError, match=re.escape(sentence)):
            checked(arguments, 1, False)
    finally:
        lock.release()
    checked(arguments, 1, False)
    lock.path.write_text(
        json.dumps(lock.owner | {"machine": "far", "host": "far"})
    )  # only time shows whether it is alive
    start = time.monotonic()
    checked(arguments, 1, False)
    assert time.monotonic() - start < 0.5
    lock.path.unlink()
    lock.path.mkdir()  # cannot be read as a file
    checked(arguments, 1, False)


def test_data_that_cannot_be_written_is_found_before_torch_is_imported(corpus: Path, tmp_path: Path) -> None:
    let_others_in(tmp_path)
    data = Path(copytree(corpus, tmp_path / "data", ignore=ignore_patterns("*.lock", "*.mds")))
    sources = [path for path in data.glob("train/*") if path.is_dir()]
    for path in (*sources, *(path for path in data.glob("valid/*") if path.is_dir()), tmp_path):
        path.chmod(0o777 if path == tmp_path else 0o555)
    arguments = [*TINY, f"data.path={data}", f"run_dir={tmp_path}/run"]
    sentence = re.escape(" cannot be written (Permission denied), and shards are decompressed beside their files: ")
    with without_permission():
        with pytest.raises(UserError, match=rf"{data}/train/\w+{sentence}data.cache must name"):
            checked(arguments, 1, False)
        checked([*arguments, f"data.cache={tmp_path}/cache"], 1, False)
        with pytest.raises(UserError, match=rf"{data}/valid/\w+{sentence}name a copy .* with data=FOLDER"):
            check_data(load_config(arguments), str(data), "valid")  # as launch/evaluate.py does
    for source in sources:  # another user has decompressed the shards, and lets others take their locks
        lock = source / ".shard.00000.mds.lock"
        source.chmod(0o755)
        lock.touch()
        lock.chmod(0o666)
        source.chmod(0o555)
    with without_permission():
        checked(arguments, 1, False)
    lock.chmod(0o444)
    with without_permission(), pytest.raises(UserError, match=sentence):
        checked(arguments, 1, False)


def test_under_torchrun_the_sentence_comes_without_a_traceback_of_ours() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command += ["launch/pretrain.py", "config=tiny_sbb"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    # The other rank waits five seconds to be ended before it says the same; a loaded machine may take longer.
    assert 1 <= result.stderr.count("error: config=tiny_sbb: there is no configs/tiny_sbb.yaml") <= 2
    assert "exitcode  : 2" in result.stderr
    assert result.stderr.count("Traceback") == 1  # torchrun's own, about its worker
    assert 'launch/pretrain.py", line' not in result.stderr
