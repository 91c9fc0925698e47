"""A mistake ends in one sentence that names what to mend, and leaves the run folder as it was."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.pretrain import checked, main
from launch.training import check_writable
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from tests.promises import promises
from tests.train.commands import let_others_in
from tests.train.ranks import Ranks, free_port

ROOT = Path(__file__).resolve().parents[2]
TINY = ["config=tiny_sb", "model.num_layers=1", "train.max_steps=1", "train.eval_every=0", "data.num_workers=0"]


def run(*arguments: str) -> None:
    main([*TINY, *arguments])


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
    "resuming with a changed model, optimizer or seed",
    seen="`… holds a run with another configuration: model.hidden_size was 128 and is now 64`",
    code="2",
    identical="nothing is changed",
    do="the old value, or another `run_dir`",
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


@promises(
    "Files and disks",
    "a run folder without permission",
    seen="`run_dir=… cannot be written: Permission denied`",
    code="2",
    identical="nothing is changed",
    do="another `run_dir`",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without permission")
@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_folder_without_permission(mode: int, corpus: Path, tmp_path: Path) -> None:
    let_others_in(corpus.parent, tmp_path)
    shut = tmp_path / "shut"
    shut.mkdir(mode=mode)
    log = tmp_path / "log"
    log.touch(0o666)
    ranks = Ranks([*TINY, f"data.path={corpus}"], shut / "run", size=1, plant=as_nobody, small=False, log=log)
    assert ranks.wait() == [2]
    assert f"error: run_dir={shut / 'run'} cannot be " in ranks.output()
    assert "Permission denied" in ranks.output()
    assert "Traceback" not in ranks.output()


def test_a_folder_without_permission_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    let_others_in(tmp_path)
    (tmp_path / "shut").mkdir(mode=0o555)
    sentence = f"run_dir={tmp_path}/shut/a/run cannot be written: Permission denied ({tmp_path}/shut)"
    check_writable(str(tmp_path / "new" / "run"))
    root = os.geteuid() == 0
    if root:
        as_nobody()  # root may write everywhere
    try:
        with pytest.raises(UserError, match=re.escape(sentence)):
            check_writable(f"{tmp_path}/shut/a/run")
        with pytest.raises(UserError, match=re.escape(sentence)):
            checked(
                ["config=tiny_sb", "data.path=s3://a/b", "data.cache=auto", f"run_dir={tmp_path}/shut/a/run"], 1, False
            )
    finally:
        if root:
            os.seteuid(0)
            os.setegid(0)


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
