"""eval/papers/ssmax_your_model.sh: what it would run, what it repeats, how it stops, and a miniature of all of it."""

import math
import os
import shlex
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ssscale.config import load_config

ROOT = Path(__file__).resolve().parents[3]
STUB = """#!/bin/bash
echo "$*" >> "$SEEN"
[[ "$*" != *"${BREAKS:-nothing}"* ]]
"""
SLEEPS = """#!/bin/bash
trap 'sleep 0.5; echo saved >> "$SEEN"; exit 75' TERM
echo began >> "$SEEN"
sleep 100 & wait
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("books", "code"):
        (folder / f"train.{name}.jsonl.zst").touch()
        (folder / f"valid.{name}.jsonl.zst").touch()
    (folder / "tokenizer.json").touch()
    return folder


def start(folder: Path, source: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """The script in a copy of the repository's folder without .venv, whose programs would come before ours."""
    copy = folder / "repository" / "eval" / "papers" / "ssmax_your_model.sh"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes((ROOT / "eval/papers/ssmax_your_model.sh").read_bytes())
    (folder / "repository/ssscale").mkdir(exist_ok=True)
    (folder / "repository/ssscale/a.py").write_text("a = 1\n")
    command, pipe = ["bash", str(copy), source, "out"], subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def script(folder: Path, source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(folder, source, environment)
    out, errors = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def stand_in(folder: Path, program: str) -> dict[str, str]:
    """The environment in which `program` runs in place of python; it writes to the file `seen`."""
    file = folder / "bin" / "python"
    file.parent.mkdir()
    file.write_text(program)
    file.chmod(0o755)
    (folder / "out").mkdir()
    return {"PATH": f"{file.parent}:{os.environ['PATH']}", "SEEN": str(folder / "seen")}


@pytest.mark.parametrize(
    ("source", "config", "length"), [("text", "50m_softmax", 1024), ("stdlib", "tiny_softmax", 256)]
)
def test_its_commands_are_ours(source: str, config: str, length: int, text: Path) -> None:
    found = script(text.parent, source, PRINT="1")
    assert (found.returncode, found.stderr) == (0, "")
    runs = []
    for program, first, *arguments in (shlex.split(line) for line in found.stdout.splitlines()):
        assert program == "python"
        if first == "-m":
            assert find_spec(arguments[0]) is not None
        elif first == "launch/pretrain.py":
            # The imported model's file is not there yet: the run file that it comes from has its model.
            imported = f"config={text.parent}/out/imported/config.yaml"
            runs.append(load_config([f"config={config}" if text == imported else text for text in arguments]))
        else:
            assert (ROOT / first).is_file()
    assert [run.model.mixers for run in runs] == [["softmax"], ["softmax"], ["ssmax"]]
    base, control, switched = runs
    assert {run.data.length for run in runs} == {length}
    assert {run.data.one_document for run in runs} == {source == "text"}
    assert control.train == switched.train
    assert control.data == switched.data
    tokens = sum(stage.tokens for stage in base.train.stages)
    assert 0.1 <= control.train.stages[0].tokens / tokens <= 0.2
    assert control.train.stages[0].tokens % control.tokens_per_step == 0


def test_your_own_model_is_not_trained_first(text: Path) -> None:
    found = script(text.parent, "text", PRINT="1", MODEL="mine", LENGTH="4096", LR="1e-4", WORKERS="gpus=8")
    lines = found.stdout.splitlines()
    assert f"--length 4096 --tokenizer {text.parent}/mine/tokenizer.json " in lines[0]
    assert lines[1] == f"python launch/import_hf.py from={text.parent}/mine out={text.parent}/out/imported"
    assert all(line.endswith(" gpus=8") and "lr=1e-4" in line for line in lines[2:4])
    assert "--lengths 4096,8192,16384,32768 " in lines[4]


def test_what_has_ended_is_not_repeated(text: Path) -> None:
    stub = stand_in(text.parent, STUB)
    found = script(text.parent, "stdlib", **stub, BREAKS="launch/import_hf.py")
    assert found.returncode == 1
    seen = text.parent / "seen"
    assert seen.read_text().splitlines()[-1].startswith("launch/import_hf.py ")
    for file in ("llama/config.json", "imported/checkpoints/step-00000000/x", "exported/config.json"):
        (text.parent / "out" / file).parent.mkdir(parents=True)
        (text.parent / "out" / file).touch()
    seen.unlink()
    assert script(text.parent, "stdlib", **stub).returncode == 0
    lines = seen.read_text().splitlines()
    assert not [line for line in lines if "import_hf" in line or "export.py" in line]
    assert len([line for line in lines if "pretrain" in line]) == 3
    assert lines[-1].startswith("-m eval.papers.before_after ")


def test_a_signal_ends_what_is_running(text: Path) -> None:
    """Once it has saved."""
    seen = text.parent / "seen"
    started = start(text.parent, "stdlib", stand_in(text.parent, SLEEPS))
    until = time.monotonic() + 30
    while not seen.exists() and time.monotonic() < until:
        time.sleep(0.05)
    started.terminate()
    _, errors = started.communicate(timeout=30)
    assert (started.returncode, errors) == (75, "stopped: the same command continues\n")
    assert seen.read_text().split() == ["began", "saved"]


def test_bad_input_is_one_sentence(text: Path) -> None:
    (text / "valid.books.jsonl.zst").unlink()
    found = script(text.parent, "text")
    assert (found.returncode, found.stderr) == (2, f"error: there is no file {text}/valid.books.jsonl.zst\n")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_miniature(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from ssscale.layout import PackedLayout
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_for_inference
    from ssscale.train.checkpoint import CheckpointReader

    stages = "train.stages.0.tokens=40960 train.stages.0.schedule.warmup_tokens=8192 train.stages.1.tokens=8192"
    sizes = {"PRETRAIN": stages, "TOKENS": "8192", "LR": "1e-5", "WINDOWS": "2", "SAMPLES": "2", "OMP_NUM_THREADS": "1"}
    command = ["bash", "eval/papers/ssmax_your_model.sh", "stdlib", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | sizes, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    based = "rope.base=500000"
    names = ["imported", f"imported ({based})", f"softmax ({based})", f"ssmax ({based})"]
    assert [row for row in rows if row in names] == names * 3
    out = tmp_path / "out"
    for name in ("loss_by_position", "repeats"):
        assert (out / f"figures/{name}.png").is_file()
    # Two steps of 1e-5 leave s where the switch has computed it: at 1 / mean(ln n), n = 1 … 256.
    (checkpoint,) = (out / "ssmax/checkpoints").glob("step-*")
    s = CheckpointReader(checkpoint).whole("blocks.1.attention.weights.s", "weight")
    assert s.tolist() == pytest.approx([256 / math.lgamma(257)] * 2, abs=1e-4)
    ours, _ = load_for_inference(out / "ssmax", initialize())
    theirs = AutoModelForCausalLM.from_pretrained(out / "exported", trust_remote_code=True)
    tokens = torch.randint(1024, (300,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = ours(tokens, PackedLayout.from_lengths([300]))
        torch.testing.assert_close(theirs(tokens[None]).logits[0], expected, rtol=1e-4, atol=1e-5)
