"""eval/papers/papers.sh: what it would run, and how it shares jobs out over GPUs."""

import os
import shlex
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from ssscale.config import load_config

ROOT = Path(__file__).resolve().parents[3]
STUB = """#!/bin/bash
echo "$CUDA_VISIBLE_DEVICES $*" >> "$SEEN"
[[ "$*" != *"${BREAKS:-nothing}"* ]]
"""
SLEEPS = """#!/bin/bash
[[ "$*" != *data_prep* ]] || exit 0
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
    for name in ("tokenizer.json", "a.json", "b.json"):
        (folder / name).touch()
    return folder


def start(text: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """The script in a folder without .venv, whose programs would come before ours."""
    copy = text.parent / "repository" / "eval" / "papers" / "papers.sh"
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes((ROOT / "eval/papers/papers.sh").read_bytes())
    command = ["bash", str(copy), "text", "text/a.json,text/b.json", "out"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=text.parent, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def papers(text: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(text, environment)
    out, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def stand_in(text: Path, program: str) -> dict[str, str]:
    """The environment in which `program` runs in place of python, on two GPUs; it writes to the file `seen`."""
    file = text.parent / "bin" / "python"
    file.parent.mkdir()
    file.write_text(program)
    file.chmod(0o755)
    return {"PATH": f"{file.parent}:{os.environ['PATH']}", "SEEN": str(text.parent / "seen"), "GPUS": "0 3"}


def test_its_commands_are_ours(text: Path) -> None:
    found = papers(text, PRINT="1")
    assert (found.returncode, found.stderr) == (0, "")
    commands = [shlex.split(line) for line in found.stdout.splitlines() if not line.startswith("#")]
    runs = []
    for program, first, *arguments in commands:
        assert program == "python"
        if first == "launch/pretrain.py":
            runs.append(load_config(arguments))
        elif first == "-m":
            assert find_spec(arguments[0]) is not None
        else:
            assert first == "launch/finetune.py"
            assert f"questions={text}/a.json,{text}/b.json" in arguments
    assert len(runs) == 8
    lengths = {run.run_dir.rsplit("/", 1)[1]: (run.data.path.rsplit("/", 1)[1], run.data.length) for run in runs}
    assert lengths["p_n"] == ("p_n", 1024)
    assert lengths["50m_ssmax"] == ("1024", 1024)
    assert lengths["50m_window512"] == ("2048", 2048)


def test_jobs_are_shared_out_once(text: Path) -> None:
    seen, stub = text.parent / "seen", stand_in(text, STUB)
    found = papers(text, **stub)
    assert found.returncode == 0, found.stderr
    lines = seen.read_text().splitlines()
    assert {line.split(" ", 1)[0] for line in lines if "pretrain" in line} == {"0", "3"}
    expected = papers(text, PRINT="1").stdout.replace("python ", "").splitlines()
    assert sorted(line.split(" ", 1)[1] for line in lines) == sorted(line for line in expected if line[0] != "#")

    seen.unlink()
    found = papers(text, **stub, BREAKS="config=50m_nope", JOBS="extrapolation_nope p_n")
    assert found.returncode == 1
    assert "extrapolation_nope: failed, see " in found.stdout
    assert found.stderr == "error: 1 jobs failed; the same command runs them again\n"
    assert "long_context" not in seen.read_text()
    assert "pn_fit" in seen.read_text()
    found = papers(text, **stub, BREAKS="data/1024")
    assert found.returncode == 2
    assert found.stderr.startswith("error: the data could not be prepared: ")


def test_a_signal_ends_what_is_running(text: Path) -> None:
    """Once it has saved."""
    seen = text.parent / "seen"
    started = start(text, stand_in(text, SLEEPS))
    until = time.monotonic() + 30
    while (not seen.exists() or len(seen.read_text().split()) < 2) and time.monotonic() < until:
        time.sleep(0.05)
    started.terminate()
    _, errors = started.communicate(timeout=30)
    assert (started.returncode, errors) == (75, "stopped: the same command continues\n")
    assert seen.read_text().split() == ["began", "began", "saved", "saved"]


def test_bad_input_is_one_sentence(text: Path) -> None:
    (text / "b.json").unlink()
    found = papers(text, GPUS="0")
    assert (found.returncode, found.stderr) == (2, f"error: there is no file {text}/b.json\n")
    found = papers(text, PRINT="1", JOBS="mqrar_softmax_33")
    assert found.returncode == 2
    assert found.stderr.startswith("error: JOBS: there is no job mqrar_softmax_33; use pair_ssmax ")
