"""Whatever lies in a file, whatever the disk refuses: one sentence and an exit code, from every command."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main as data_prep
from eval.checkpoint.command import sentences
from launch.evaluate import main as evaluate
from launch.export import main as export
from launch.import_hf import main as import_hf
from launch.pretrain import main as pretrain
from launch.report import main as report
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from tests.config.refusals import refuses
from tests.train.checkpoints import sign
from tests.train.commands import let_others_in, run_command
from tests.train.ranks import SMALL, Ranks

ROOT = Path(__file__).resolve().parents[2]
NEWEST = "step-00000004"
CONTENTS: dict[str, bytes] = {
    "nothing": b"",
    "a list": b"[]",
    "an object": b"{}",
    "a number": b"3",
    "null": b"null",
    "bytes that are not UTF-8": b"\xff\xfe\x00",
    "deep nesting": b'{"a": ' * 50_000,
    "lists within lists": b"[" * 50_000 + b"]" * 50_000,
    "wrong values": b'{"step": "x", "skipped": 3, "pid": [], "tasks": 3, "bos_id": "a", "model_type": "ssscale"}',
}


@pytest.fixture(scope="module")
def keys(corpus: Path) -> list[str]:
    return [f"data.path={corpus}", "data.num_workers=0", "train.save_every=2", "train.max_steps=4"]


@pytest.fixture(scope="module")
def run(keys: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("sentence") / "run"
    Ranks(keys, folder, size=1).finish()
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def end_of(command: Callable[[list[str]], object], arguments: list[str]) -> str:
    """The sentence with which a command ends, nothing where it ends well; any other exception is the test's failure."""
    try:
        command(arguments)
    except UserError as error:
        sentence = str(error)
    else:
        return ""
    assert "\n" not in sentence, sentence
    return sentence


def with_each_content(file: Path, act: Callable[[str], None]) -> None:
    before = file.read_bytes() if file.is_file() else None
    for kind, content in CONTENTS.items():
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
        act(kind)
    if before is None:
        file.unlink(missing_ok=True)
    else:
        file.write_bytes(before)


@pytest.mark.parametrize("name", ["config.yaml", "rollback.json", "run.lock", "first_save.json", "events.jsonl"])
def test_files_of_a_run(
    name: str, copy: Path, keys: list[str], groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on; it never begins again. Which rows it passes over nothing else knows: that is refused."""
    monkeypatch.setattr("ssscale.train.lock.SILENT_S", 0.6)
    arguments = [*SMALL, *keys, f"run_dir={copy}"]

    def go_on(kind: str) -> None:
        sentence = end_of(pretrain, arguments)
        assert not sentence or str(copy) in sentence, (kind, sentence)
        if name == "rollback.json":
            assert sentence or kind == "an object", kind
        else:
            assert not sentence, (kind, sentence)
        assert (copy / "checkpoints" / NEWEST).is_dir()

    with_each_content(copy / name, go_on)


@pytest.mark.parametrize("name", ["state.json", "rank-00000.json", "config.yaml", "tokenizer.json", "boundaries.json"])
def test_files_of_a_checkpoint(name: str, copy: Path, tmp_path: Path, groups: Groups) -> None:
    """Signed again, as a stranger would: evaluation and export say what is broken."""
    checkpoint = copy / "checkpoints" / NEWEST

    def read(kind: str) -> None:
        sign(checkpoint)
        for command, more in ((export, f"out={tmp_path / 'out'}"), (evaluate, "tasks=none")):
            sentence = end_of(command, [f"checkpoint={checkpoint}", more])
            if name == "config.yaml":  # every key has a default: of another model, trained on other data
                assert sentence, kind
            else:
                assert str(checkpoint) in sentence, (kind, sentence)
            assert not (tmp_path / "out").exists()

    with_each_content(checkpoint / name, read)


def test_files_beside_a_run(copy: Path, groups: Groups) -> None:
    def look(kind: str) -> None:
        sentence = end_of(report, [str(copy), "sample=false"])
        assert not sentence or str(copy) in sentence, (kind, sentence)

    with_each_content(copy / f"eval/{NEWEST}.json", look)
    with_each_content(copy / "metrics.jsonl", look)


def test_files_of_a_hugging_face_folder(copy: Path, tmp_path: Path, groups: Groups) -> None:
    folder, out = tmp_path / "hf", tmp_path / "imported"
    export([f"checkpoint={copy}", f"out={folder}"])
    weights = (folder / "model.safetensors").read_bytes()

    def read(kind: str) -> None:
        sentence = end_of(import_hf, [f"from={folder}", f"out={out}"])
        assert str(folder) in sentence, (kind, sentence)
        assert not out.exists()

    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        with_each_content(folder / name, read)
    (folder / "model.safetensors").unlink()
    with_each_content(folder / "model.safetensors.index.json", read)
    (folder / "model.safetensors").write_bytes(weights)
    for key, value in (("hidden_size", 10**9), ("hidden_size", "x"), ("head_dim", 10**18), ("num_hidden_layers", None)):
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config))
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        assert end_of(import_hf, [f"from={folder}", f"out={out}"])
        shutil.move(tmp_path / "config.json", folder / "config.json")


@pytest.mark.parametrize("name", ["manifest.json", "train/code/index.json", "tokenizer.json"])
def test_files_of_a_data_folder(
    name: str, corpus: Path, tmp_path: Path, groups: Groups, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the tokenizer is read at the start: the run folder is not made."""
    folder = tmp_path / "data"
    shutil.copytree(corpus, folder, ignore=shutil.ignore_patterns("*.mds", "*.lock"))

    def read(kind: str) -> None:
        keys = ["data.num_workers=0", "train.max_steps=1", f"run_dir={tmp_path / 'run'}"]
        sentence = end_of(pretrain, [*SMALL, f"data.path={folder}", *keys])
        assert str(folder) in sentence, (kind, sentence)
        assert not (tmp_path / "run").exists()
        assert data_prep(["verify", str(folder)]) == 2
        assert capsys.readouterr().err.startswith("error: ")

    with_each_content(folder / name, read)


def test_a_deeply_nested_line(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + b'{"a": ' * 50_000 + b"\n")
    command = ["pack", "--out", str(tmp_path / "out"), "--source", f"a={tmp_path}/a.jsonl", "--workers", "1"]
    assert data_prep([*command, "--tokenizer", str(corpus / "tokenizer.json"), "--length", "16"]) == 2
    assert "a.jsonl line 2 is not a JSON record" in capsys.readouterr().err


# What fits every type and bound, and no machine.
LARGE = [
    ["model.head_dim=1000000000"],
    ["model.hidden_size=2000000000", "model.num_heads=1"],
    ["model.num_layers=10000", "model.hidden_size=131072", "model.num_heads=1024"],
    ["model.vocab_size=2000000000"],
    [
        "train.microbatch=100000000",
        "train.batch_size=100000000",
        "train.stages.0.tokens=1e15",
        "train.stages.1.tokens=1e15",
    ],
]


def test_sizes_that_no_machine_has_are_refused_before_they_are_allocated(
    corpus: Path, tmp_path: Path, groups: Groups
) -> None:
    for arguments in LARGE:
        sentence = refuses(
            pretrain, ["config=tiny_sb", f"data.path={corpus}", f"run_dir={tmp_path / 'run'}", *arguments]
        )
        assert "GiB" in sentence, sentence
    assert not (tmp_path / "run").exists()


# ---- processes


class Planted(str):
    """An argument that no command foresees: looking at it fails."""

    def _fail(self, *rest: Any, **more: Any) -> Any:
        raise ZeroDivisionError("planted\nin two lines")

    partition = startswith = split = __contains__ = __getitem__ = encode = _fail  # type: ignore[assignment]


def plant_argument() -> None:
    sys.argv[1:] = [Planted("config=tiny_sb")]


COMMANDS = [
    "benchmark",
    "benchmark_links",
    "benchmark_parallel",
    "costs",
    "estimate",
    "evaluate",
    "export",
    "finetune",
    "import_hf",
]
MODULES = [*(f"launch.{name}" for name in (*COMMANDS, "pretrain", "report")), "slurm.submit", "data_prep.__main__"]
MODULES += [
    f"eval.papers.{name}" for name in ("needle", "long_context", "pn_fit", "mqrar.__main__", "figures.__main__")
]


@pytest.mark.parametrize("module", MODULES)
def test_what_nobody_foresaw_is_one_sentence_with_a_file(module: str, tmp_path: Path) -> None:
    code, output = run_command(module, [], tmp_path / "log", plant_argument)
    last = output.splitlines()[-1]
    assert code == 70, output
    assert "Traceback" not in output
    assert last.startswith("failed: "), output
    assert "ZeroDivisionError: planted" in last
    file = Path(last.rpartition(" is in ")[2])
    assert "in _fail" in file.read_text()
    file.unlink()


def as_nobody() -> None:
    import eval.checkpoint.loss_curves
    import eval.checkpoint.sample
    import eval.checkpoint.scales  # noqa: F401 - while this process may still read what is installed

    os.setegid(65534)
    os.seteuid(65534)
    os.environ["SSSCALE_READ_RETRY_S"] = "0"


def arguments_of(module: str, run: Path, out: Path) -> list[str]:
    return {
        "launch.evaluate": [f"checkpoint={run}", "tasks=none", "baseline=false"],
        "launch.export": [f"checkpoint={run}", f"out={out / 'exported'}"],
        "launch.report": [str(run), "sample=false"],
    }[module]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without permission")
@pytest.mark.parametrize("module", ["launch.evaluate", "launch.export", "launch.report"])
@pytest.mark.parametrize("shut", ["out", "run", "checkpoints", "checkpoint"])
def test_what_may_not_be_read_or_written(
    module: str, shut: str, copy: Path, corpus: Path, tmp_path: Path, keys: list[str]
) -> None:
    let_others_in(corpus.parent, tmp_path)
    (tmp_path / "out").mkdir(mode=0o755)
    folders = {"run": copy, "checkpoints": copy / "checkpoints", "checkpoint": copy / "checkpoints" / NEWEST}
    if shut in folders:
        folders[shut].chmod(0o700)
    code, output = run_command(module, arguments_of(module, copy, tmp_path / "out"), tmp_path / "log", as_nobody)
    assert code == 2, output
    assert "Traceback" not in output
    assert output.splitlines()[-1].startswith("error: "), output
    assert "Permission denied" in output.splitlines()[-1]
    assert "nats" not in output  # said before the work


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without permission")
def test_permission_to_write_checkpoints_is_tried_at_the_start(
    copy: Path, corpus: Path, keys: list[str], tmp_path: Path
) -> None:
    let_others_in(corpus.parent, tmp_path)
    for path in (copy, *copy.rglob("*")):
        os.chown(path, 65534, 65534)
    os.chown(copy / "checkpoints", 0, 0)  # may be read, not written
    arguments = [*SMALL, *keys[:-1], "train.max_steps=6", f"run_dir={copy}", f"data.cache={tmp_path / 'cache'}"]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    code, output = run_command("launch.pretrain", arguments, tmp_path / "log", functools.partial(as_nobody))
    assert code == 2, output
    assert "checkpoints" in output.splitlines()[-1]
    assert "cannot be written: Permission denied" in output.splitlines()[-1]
    assert "step 5" not in output  # before a step is trained


@pytest.mark.parametrize(
    "command",
    [
        ["launch/pretrain.py", "config=tiny_sb", "--print"],
        ["launch/pretrain.py", "--help"],
        ["launch/estimate.py", "config=tiny_sb", "gpus=1"],
    ],
)
def test_nobody_reads_the_output(command: list[str]) -> None:
    """As in `COMMAND | head`: not a word, and no file with a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (ended.stderr, ended.returncode in (1, 141)) == ("", True)


def test_ctrl_c_in_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, sentences():
        raise KeyboardInterrupt
    assert (ended.value.code, capsys.readouterr().err) == (130, "interrupted\n")
