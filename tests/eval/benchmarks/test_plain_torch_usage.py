import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_missing_arguments_are_one_sentence() -> None:
    command = [sys.executable, "-m", "eval.benchmarks.plain_torch", "tiny_sb", "8"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert (
        result.stderr == "error: usage: plain_torch.py CONFIG MICROBATCH ACCUMULATION STEPS [masters] [key=value ...]\n"
    )
