"""Ctrl-C while a command imports its modules."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
AGAIN = "interrupted: the same command continues\n"
# The command, the module whose import takes long, and what is said. Of the modules, torch is imported after the
# arguments are read, and the others before.
CASES = [
    ("launch/pretrain.py config=tiny_sb", "difflib", "interrupted\n"),
    ("-m launch.report runs", "difflib", "interrupted\n"),
    ("slurm/submit.py config=tiny_sb", "difflib", "interrupted\n"),
    ("-m eval.papers.needle RUN", "difflib", "interrupted\n"),
    ("-m eval.benchmarks.stickbreaking_trained RUN DATA", "torch", "interrupted\n"),
    ("-m eval.benchmarks.deterministic", "psutil", "interrupted\n"),
    ("-m ssscale.config.reference", "yaml", "interrupted\n"),
    ("-m data_prep verify data", "rich", AGAIN),
]


def interrupted(command: str, module: str, tmp_path: Path, **more: str) -> tuple[int, str]:
    """The exit code and what is said if Ctrl-C comes during the import of a module."""
    begun = tmp_path / "begun"
    (tmp_path / f"{module}.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"} | more
    given = [sys.executable, *command.split()]
    with subprocess.Popen(given, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 60
        while not begun.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize(("command", "module", "said"), CASES)
def test_it_is_one_line_and_code_130(command: str, module: str, said: str, tmp_path: Path) -> None:
    assert interrupted(command, module, tmp_path) == (130, said)


def test_only_the_main_rank_says_it(tmp_path: Path) -> None:
    assert interrupted("launch/evaluate.py", "difflib", tmp_path, RANK="1") == (130, "")


def test_a_program_that_imports_us_keeps_its_own_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text("import signal, ssscale, eval, launch, data_prep; print(signal.getsignal(2))")
    command = [sys.executable, "-m", "theirs", "-m", "eval.papers.needle"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert "default_int_handler" in shown
